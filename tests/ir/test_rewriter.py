from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from edgecc.errors import InternalError
from edgecc.ir import (
    Builder,
    DType,
    Graph,
    Location,
    Module,
    Node,
    Output,
    Rewriter,
    Role,
    SymbolRange,
    Value,
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


# Random edits against a naive model: plain lists of ids, rebuilt rather than kept consistent.


@dataclass
class ModelNode:
    id: int
    operands: list[int]
    kind: int
    """Two types of values: 0 is `[4]`, 1 is `[2]`."""


@dataclass
class Model:
    inputs: list[int]
    nodes: list[ModelNode] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def position(self, value: int) -> int:
        found = [i for i, n in enumerate(self.nodes) if n.id == value]
        return found[0] if found else -1

    def used(self, value: int) -> bool:
        return value in self.outputs or any(value in n.operands for n in self.nodes)


class RewriterMachine(RuleBasedStateMachine):
    """Every edit is allowed exactly when the model says so, and has the effect it has there."""

    @initialize()
    def start(self) -> None:
        module = Module("m")
        b = Builder(module, "main")
        self.values: dict[int, Value] = {
            0: b.input("x0", DType.F32, (4,), Role.ACTIVATION),
            1: b.input("x1", DType.F32, (2,), Role.ACTIVATION),
        }
        self.kinds = {0: 0, 1: 1}
        self.model = Model([0, 1])
        self.rewriter = Rewriter(module, b.graph, "random")
        self.locations: dict[int, Location] = {}
        last = b.op("silu", self.values[0])
        self._add(last.producer, [0], 0, 0)
        b.output(last, "out", Role.ACTIVATION)
        self.model.outputs.append(2)

    def _add(self, node: Node, operands: list[int], kind: int, index: int) -> None:
        new = len(self.values)
        self.values[new] = node.result
        self.kinds[new] = kind
        self.locations[new] = node.location
        self.model.nodes.insert(index, ModelNode(new, operands, kind))

    def _known(self, seed: int) -> int:
        known = [*self.model.inputs, *(n.id for n in self.model.nodes)]
        return known[seed % len(known)]

    def _node(self, seed: int) -> ModelNode:
        return self.model.nodes[seed % len(self.model.nodes)]

    def _real(self, node: ModelNode) -> Node:
        producer = self.values[node.id].producer
        assert producer is not None
        return producer

    SEED = st.integers(0, 1 << 16)

    @rule(anchor=SEED, a=SEED, b=SEED, narrow=st.booleans())
    def insert(self, anchor: int, a: int, b: int, narrow: bool) -> None:
        at = self._node(anchor)
        index = self.model.position(at.id)
        first, second = self._known(a), self._known(b)
        kind = self.kinds[first]
        op, attrs, operands = "add", None, [first, second]
        if narrow and kind == 0:
            op, attrs, operands, kind = "slice", SliceAttributes(0, 1, 3), [first], 1
        elif self.kinds[second] != kind:
            op, operands = "silu", [first]
        fine = all(self.model.position(o) < index for o in operands)
        arguments = (self._real(at), op, [self.values[o] for o in operands])
        if fine:
            node = self.rewriter.insert(*arguments, attrs=attrs)
            self._add(node, operands, kind, index)
        else:
            with pytest.raises(InternalError, match="is not defined before"):
                self.rewriter.insert(*arguments, attrs=attrs)

    @rule(old=SEED, new=SEED)
    def replace_value(self, old: int, new: int) -> None:
        before, after = self._known(old), self._known(new)
        position = self.model.position(after)
        users = [n for n in self.model.nodes if before in n.operands and n.id != after]
        late = all(self.model.position(n.id) > position for n in users)
        if self.kinds[before] == self.kinds[after] and late:
            self.rewriter.replace_value(self.values[before], self.values[after])
            for node in users:
                node.operands = [after if o == before else o for o in node.operands]
            self.model.outputs = [after if o == before else o for o in self.model.outputs]
        else:
            with pytest.raises(InternalError, match=r"cannot replace|stands before"):
                self.rewriter.replace_value(self.values[before], self.values[after])

    @rule(seed=SEED)
    def erase(self, seed: int) -> None:
        node = self._node(seed)
        if self.model.used(node.id) or len(self.model.nodes) == 1:
            if self.model.used(node.id):
                with pytest.raises(InternalError, match="is still used"):
                    self.rewriter.erase(self._real(node))
            return
        real = self._real(node)
        self.rewriter.erase(real)
        self.model.nodes.remove(node)
        with pytest.raises(InternalError, match="is not part of graph"):
            self.rewriter.erase(real)

    @rule(seed=SEED)
    def replace(self, seed: int) -> None:
        """Replace a node by a copy of itself right before it."""
        node = self._node(seed)
        real = self._real(node)
        name = real.result.name
        copy = self.rewriter.insert(
            real, real.op.name, real.operands, attrs=real.attrs, names=("copy",)
        )
        self.rewriter.replace(real, (copy.result,))
        assert copy.result.name == name
        self.values[node.id] = copy.result
        self.locations[node.id] = copy.location
        assert copy.location.passes[-1] == "random"

    @invariant()
    def the_module_verifies(self) -> None:
        assert verify(self.rewriter.module) == []

    @invariant()
    def the_graph_is_the_model(self) -> None:
        graph = self.rewriter.graph
        ids = {value: id_ for id_, value in self.values.items()}
        assert [ids[n.result] for n in graph.nodes] == [n.id for n in self.model.nodes]
        for node, expected in zip(graph.nodes, self.model.nodes, strict=True):
            assert [ids[o] for o in node.operands] == expected.operands
            assert node.location == self.locations[expected.id]
        assert [ids[o.value] for o in graph.outputs] == self.model.outputs

    @invariant()
    def uses_are_those_of_the_operands(self) -> None:
        graph = self.rewriter.graph
        uses = {value: set() for value in self.values.values()}
        for node in graph.nodes:
            for index, value in enumerate(node.operands):
                uses[value].add((node, index))
        assert all(set(value.uses) == found for value, found in uses.items())


TestRewriterMachine = RewriterMachine.TestCase
