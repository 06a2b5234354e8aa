from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Builder, DType, Graph, Module, Node, Role, Value
from edgecc.ir.analysis import (
    ancestors,
    call_graph,
    dataflow,
    descendants,
    dominators,
    is_convex,
    live_nodes,
    topological_order,
)
from edgecc.ir.ops.control import CallAttributes
from helpers.modules import modules
from helpers.pairs import pair


def diamond() -> Graph:
    """x -> a -> (b, c) -> d, and e = mul(x, c), which nobody reads; d is returned."""
    builder = Builder(Module("m"), "main")
    x = builder.input("x", DType.F32, (4,), Role.ACTIVATION)
    a = builder.op("silu", x, name="a")
    b = builder.op("silu", a, name="b")
    c = builder.op("sigmoid", a, name="c")
    d = builder.op("add", b, c, name="d")
    builder.op("mul", x, c, name="e")
    builder.output(d, "d", Role.ACTIVATION)
    return builder.graph


def names(found) -> str:
    return "".join(sorted(v.name if isinstance(v, Value) else v.result.name for v in found))


def by_name(graph: Graph, wanted: str) -> list[Node]:
    return [next(n for n in graph.nodes if n.result.name == name) for name in wanted]


def test_dataflow():
    graph = diamond()
    view = dataflow(graph)
    assert names(view) == "abcdex"
    edges = {(names([a]), names([b])) for a, b in view.edges}
    assert edges == {*zip("xabacxc", "abdcdee", strict=True)}


def test_live_nodes():
    graph = diamond()
    assert names(live_nodes(graph)) == "abcd"
    graph.outputs.clear()
    assert live_nodes(graph) == set()


@pytest.mark.parametrize(
    ("wanted", "above", "below"),
    [
        ("a", "a", "abcde"),
        ("b", "ab", "bd"),
        ("bc", "abc", "bcde"),
        ("e", "ace", "e"),
        ("", "", ""),
    ],
)
def test_ancestors_and_descendants(wanted, above, below):
    graph = diamond()
    nodes = by_name(graph, wanted)
    assert names(ancestors(graph, [n.result for n in nodes])) == above
    assert names(descendants(graph, nodes)) == below
    assert ancestors(graph, [graph.inputs[0].value]) == set()


@pytest.mark.parametrize(
    ("wanted", "convex"),
    [("ab", True), ("abc", True), ("ad", False), ("abd", False), ("abcd", True), ("bc", True)],
)
def test_convexity(wanted, convex):
    graph = diamond()
    assert is_convex(graph, set(by_name(graph, wanted))) is convex
    assert is_convex(graph, set())


def test_topological_order_repairs_and_keeps():
    graph = diamond()
    assert topological_order(graph) == graph.nodes
    right = list(graph.nodes)
    graph.nodes.reverse()
    found = topological_order(graph)
    assert names(found[:1]) == "a"
    assert sorted(found, key=right.index) == right
    position = {n: i for i, n in enumerate(found)}
    for node in found:
        for value in node.operands:
            assert value.producer is None or position[value.producer] < position[node]
    # Ties keep the present order: e before d, c before b.
    assert [n.result.name for n in found] == ["a", "c", "e", "b", "d"]


def test_dominators():
    graph = diamond()
    a, b, c, d, e = by_name(graph, "abcde")
    x = graph.inputs[0].value
    assert dominators(graph) == {a: x, b: a, c: a, d: a, e: x}


def test_dominators_with_several_inputs_and_none():
    builder = Builder(Module("m"), "main")
    assert dominators(builder.graph) == {}
    x = builder.input("x", DType.F32, (4,), Role.ACTIVATION)
    y = builder.input("y", DType.F32, (4,), Role.ACTIVATION)
    both = builder.op("add", x, y)
    after = builder.op("silu", both)
    found = dominators(builder.graph)
    assert found == {both.producer: None, after.producer: both.producer}


@given(modules(depth=3), st.data())
def test_against_definitions(module, data):
    """Each analysis against a direct reading of its definition, on random graphs."""
    graph = data.draw(st.sampled_from(list(module.graphs.values())))
    nodes = graph.nodes
    reads = {n: {o.producer for o in n.operands if o.producer is not None} for n in nodes}

    def above(node: Node) -> set[Node]:
        return {node}.union(*(above(n) for n in reads[node]))

    outputs = [o.value.producer for o in graph.outputs if o.value.producer is not None]
    assert live_nodes(graph) == set().union(*map(above, outputs))
    if not nodes:
        return
    picked = set(data.draw(st.lists(st.sampled_from(nodes), min_size=1, max_size=4)))
    assert ancestors(graph, [r for n in picked for r in n.results]) == set().union(
        *map(above, picked)
    )
    below = {n for n in nodes if above(n) & picked}
    assert descendants(graph, picked) == below
    leaves_and_returns = any(
        outside in below and outside not in picked and above(inside) >= {outside}
        for inside in picked
        for outside in nodes
    )
    assert is_convex(graph, picked) is not leaves_and_returns
    assert topological_order(graph) == nodes
    view = dataflow(graph)
    for node, dominator in dominators(graph).items():
        if dominator is not None:
            cut = view.copy()
            cut.remove_node(dominator)
            inputs = [i.value for i in graph.inputs if i.value in cut]
            assert not any(nx.has_path(cut, i, node) for i in inputs)


def test_analyses_are_not_cached():
    graph = diamond()
    assert names(live_nodes(graph)) == "abcd"
    graph.outputs[0].value = by_name(graph, "c")[0].result
    assert names(live_nodes(graph)) == "ac"


def test_call_graph():
    module = Module("m")
    main, f, g = (Builder(module, n) for n in ("main", "f", "g"))
    values = [b.input("x", DType.F32, (2,), Role.ACTIVATION) for b in (main, f, g)]
    for b, v in zip((main, f, g), values, strict=True):
        b.output(v, "y", Role.ACTIVATION)
    main.op("call", values[0], attrs=CallAttributes("f"))
    main.op("call", values[0], attrs=CallAttributes("g"))
    f.op("call", values[1], attrs=CallAttributes("g"))
    view = call_graph(module)
    assert list(view) == ["main", "f", "g"]
    assert set(view.edges) == {("main", "f"), ("main", "g"), ("f", "g")}
    assert set(call_graph(pair())) == {"target", "draft"}
    assert not call_graph(pair()).edges
