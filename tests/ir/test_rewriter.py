from __future__ import annotations

import numpy as np
import pytest

from edgecc.errors import InternalError
from edgecc.ir import (
    Builder,
    DType,
    Graph,
    Location,
    Module,
    Output,
    Rewriter,
    Role,
    SymbolRange,
    print_module,
    sym,
    verify,
)
from edgecc.ir.ops.shape import AxisAttributes, SliceAttributes, SplitAttributes
from edgecc.ir.rewriter import clone_nodes
from helpers.weights import dense, packed


def chain() -> tuple[Module, Graph, Rewriter]:
    """x -> a = silu(x) -> b = sigmoid(a) -> c = add(a, b), outputs a and c."""
    module = Module("m", symbols={"t": SymbolRange(1, 8)})
    module.weights.add("w", dense(np.ones((4, 4))))
    b = Builder(module, "main").at("origin")
    x = b.input("x", DType.F32, (sym("t"), 4), Role.ACTIVATION)
    b.input("y", DType.F32, (sym("t"), 4), Role.ACTIVATION)
    first = b.op("silu", x, name="a")
    second = b.op("sigmoid", first, name="b")
    third = b.op("add", first, second, name="c")
    b.output(first, "first", Role.ACTIVATION)
    b.output(third, "third", Role.ACTIVATION)
    return module, b.graph, Rewriter(module, b.graph, "test-pass")


def names(graph: Graph) -> list[str]:
    return [r.name for n in graph.nodes for r in n.results]


def test_insert_before_an_anchor():
    module, graph, rewriter = chain()
    a, b, c = graph.nodes
    x = graph.inputs[0].value
    node = rewriter.insert(b, "mul", (a.result, x), names=("m",))
    assert graph.nodes == [a, node, b, c]
    assert verify(module) == []
    assert node.location == Location("origin", ("test-pass",))
    assert (node, 0) in a.result.uses
    first = rewriter.insert(a, "linear", (x,), weights=("w",), origin=Location("other", ("p",)))
    assert graph.nodes[0] is first
    assert first.location == Location("other", ("p", "test-pass"))
    assert first.result.name == "linear"


def test_insert_checks_types():
    _, graph, rewriter = chain()
    text = print_module(rewriter.module)
    x = graph.inputs[0].value
    with pytest.raises(InternalError, match="concat: axis 7 is outside"):
        rewriter.insert(graph.nodes[0], "concat", (x,), attrs=AxisAttributes(7))
    assert print_module(rewriter.module) == text
    assert list(x.uses) == [(graph.nodes[0], 0)]


@pytest.mark.parametrize(("anchor", "operand"), [(0, 0), (0, 2), (1, 1), (1, 2), (2, 2)])
def test_insert_refuses_operands_defined_later(anchor, operand):
    _, graph, rewriter = chain()
    before = list(graph.nodes)
    with pytest.raises(InternalError, match="is not defined before") as caught:
        rewriter.insert(before[anchor], "silu", (before[operand].result,))
    assert caught.value.id == "ir/order"
    assert graph.nodes == before


def test_foreign_nodes_and_values_are_refused():
    _, graph, rewriter = chain()
    _, other, _ = chain()
    ours, theirs = graph.nodes[0], other.nodes[0]
    x, foreign = graph.inputs[0].value, other.inputs[0].value
    calls = [
        lambda: rewriter.insert(theirs, "silu", (x,)),
        lambda: rewriter.insert(ours, "silu", (theirs.result,)),
        lambda: rewriter.erase(other.nodes[-1]),
        lambda: rewriter.replace_value(ours.result, theirs.result),
        lambda: rewriter.replace_value(theirs.result, ours.result),
        lambda: rewriter.replace(theirs, (ours.result,)),
        lambda: rewriter.replace_weights(theirs, ()),
    ]
    for call in calls:
        with pytest.raises(InternalError, match="is not part of graph @main") as caught:
            call()
        assert caught.value.id == "ir/foreign-node"
    for call in (
        lambda: rewriter.insert(ours, "silu", (foreign,)),
        lambda: rewriter.replace_value(ours.result, foreign),
        lambda: rewriter.replace_value(foreign, x),
    ):
        with pytest.raises(InternalError, match="is not part of graph @main") as caught:
            call()
        assert caught.value.id == "ir/foreign-value"
    assert names(graph) == names(other) == ["a", "b", "c"]
    assert verify(rewriter.module) == []


def test_replace_value_everywhere_outputs_included():
    module, graph, rewriter = chain()
    a, b, c = graph.nodes
    y = graph.inputs[1].value
    rewriter.replace_value(a.result, y)
    assert b.operands == (y,)
    assert c.operands == (y, b.result)
    assert graph.outputs[0].value is y
    assert a.result.uses == {}
    assert list(y.uses) == [(b, 0), (c, 0)]
    assert verify(module) == []
    assert y.name == "y"


def test_replace_value_keeps_the_node_that_makes_the_new_one():
    """`silu(a)` instead of `a` for all others: the new node goes on reading `a`."""
    module, graph, rewriter = chain()
    a, b, c = graph.nodes
    node = rewriter.insert(b, "silu", (a.result,))
    rewriter.replace_value(a.result, node.result)
    assert node.operands == (a.result,)
    assert b.operands == (node.result,)
    assert c.operands == (node.result, b.result)
    assert graph.outputs[0].value is node.result
    assert verify(module) == []


def test_replace_value_by_itself_changes_nothing():
    module, graph, rewriter = chain()
    text = print_module(module)
    rewriter.replace_value(graph.nodes[0].result, graph.nodes[0].result)
    assert print_module(module) == text
    assert verify(module) == []


@pytest.mark.parametrize(
    ("op", "attrs"),
    [("slice", SliceAttributes(1, 0, 3)), ("unsqueeze", AxisAttributes(0))],
)
def test_replace_value_refuses_another_type(op, attrs):
    _, graph, rewriter = chain()
    a, b, _ = graph.nodes
    node = rewriter.insert(b, op, (a.result,), attrs=attrs)
    with pytest.raises(InternalError, match="cannot replace %a: f32") as caught:
        rewriter.replace_value(a.result, node.result)
    assert caught.value.id == "ir/replace-type"
    assert b.operands == (a.result,)


def test_replace_value_refuses_users_before_the_definition_and_changes_nothing():
    """`x` is read by `a` and `d`; only `d` stands after the new value, and neither is changed."""
    module, graph, rewriter = chain()
    x, (a, _, c) = graph.inputs[0].value, graph.nodes
    d = rewriter.insert(c, "silu", (x,))
    e = rewriter.insert(d, "sigmoid", (graph.inputs[1].value,))
    text = print_module(module)
    with pytest.raises(InternalError, match="stands before %sigmoid") as caught:
        rewriter.replace_value(x, e.result)
    assert caught.value.id == "ir/order"
    assert print_module(module) == text
    assert (d.operands, a.operands) == ((x,), (x,))


def test_replace_hands_names_and_outputs_on():
    module, graph, rewriter = chain()
    a, b, c = graph.nodes
    node = rewriter.insert(b, "mul", (a.result, a.result), names=("new",))
    rewriter.replace(b, (node.result,))
    assert graph.nodes == [a, node, c]
    assert node.result.name == "b"
    assert c.operands == (a.result, node.result)
    assert b.operands == ()
    assert (b, 0) not in a.result.uses
    assert verify(module) == []


def test_replace_keeps_names_of_values_that_were_there_before():
    _, graph, rewriter = chain()
    _, b, _ = graph.nodes
    y = graph.inputs[1].value
    rewriter.replace(b, (y,))
    assert y.name == "y"
    assert names(graph) == ["a", "c"]


def test_replace_all_results():
    module, graph, rewriter = chain()
    a, b, _ = graph.nodes
    split = rewriter.insert(
        b, "split", (a.result,), attrs=SplitAttributes(1, (1, 3)), names=("p", "q")
    )
    graph.outputs += [Output(r, r.name, Role.ACTIVATION) for r in split.results]
    pieces = [
        rewriter.insert(split, "slice", (a.result,), attrs=SliceAttributes(1, low, high)).result
        for low, high in ((0, 1), (1, 4))
    ]
    with pytest.raises(InternalError, match="1 values for the results of %p, %q = split"):
        rewriter.replace(split, pieces[:1])
    rewriter.replace(split, pieces)
    assert names(graph) == ["a", "p", "q", "b", "c"]
    assert [o.value for o in graph.outputs[2:]] == pieces
    assert verify(module) == []


@pytest.mark.parametrize("index", [0, 1, 2])
def test_erase_refuses_used_nodes(index):
    module, graph, rewriter = chain()
    text = print_module(module)
    with pytest.raises(InternalError, match="is still used") as caught:
        rewriter.erase(graph.nodes[index])
    assert caught.value.id == "ir/erase-used"
    assert print_module(module) == text


def test_erase():
    module, graph, rewriter = chain()
    a, b, c = graph.nodes
    graph.outputs.pop()
    rewriter.erase(c)
    rewriter.erase(b)
    assert graph.nodes == [a]
    assert a.result.uses == {}
    assert verify(module) == []
    with pytest.raises(InternalError, match="is not part of graph @main"):
        rewriter.erase(b)


def test_replace_weights():
    module, graph, rewriter = chain()
    a = graph.nodes[0]
    node = rewriter.insert(a, "linear", (graph.inputs[0].value,), weights=("w",))
    module.weights.add("packed", packed(np.random.default_rng(0), 4, 4).weight)
    rewriter.replace_weights(node, ["packed"])
    assert node.weights == ("packed",)
    assert node.location == Location("origin", ("test-pass", "test-pass"))
    assert verify(module) == []


@pytest.mark.parametrize(
    ("weights", "message", "id_"),
    [
        (["tall"], r"\['tall'\] change the results of %linear", "ir/replace-type"),
        (["wide"], "columns of the weight", "ir/type-rule"),
        (["vector"], "rank of the weight", "ir/type-rule"),
        ([], "expects weights", "ir/type-rule"),
        (["gone"], "no weight @gone", "ir/unknown-weight"),
    ],
)
def test_replace_weights_refuses_others_that_do_not_fit(weights, message, id_):
    module, graph, rewriter = chain()
    for symbol, shape in (("tall", (5, 4)), ("wide", (4, 5)), ("vector", (4,))):
        module.weights.add(symbol, dense(np.ones(shape)))
    a = graph.nodes[0]
    node = rewriter.insert(a, "linear", (graph.inputs[0].value,), weights=("w",))
    with pytest.raises(InternalError, match=message) as caught:
        rewriter.replace_weights(node, weights)
    assert caught.value.id == id_
    assert node.weights == ("w",)


def test_clone_nodes():
    module, graph, _ = chain()
    copy = Builder(module, "copy")
    mapping = {
        i.value: copy.input(i.name, i.value.type.dtype, i.value.type.shape, i.role)
        for i in graph.inputs
    }
    result = clone_nodes(module, graph.nodes[:2], copy.graph, mapping)
    assert names(copy.graph) == ["a", "b"]
    assert [n.location for n in copy.graph.nodes] == [Location("origin")] * 2
    assert set(result) == {*mapping, graph.nodes[0].result, graph.nodes[1].result}
    assert set(mapping) == {i.value for i in graph.inputs}
    copy.output(result[graph.nodes[1].result], "out", Role.ACTIVATION)
    assert verify(module) == []
    assert all(n not in graph.nodes for n in copy.graph.nodes)
