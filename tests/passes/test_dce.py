from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Builder, DType, Module, Role, SymbolRange, print_module, sym, verify
from edgecc.ir.analysis import live_nodes
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.shape import SplitAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.dce import Dce
from helpers.modules import check_pass, interface, modules, random_inputs
from helpers.pairs import pair
from helpers.weights import ForbiddenReader, dense, store


def builder(module: Module, name: str = "main") -> tuple[Builder, list]:
    module.symbols["t"] = SymbolRange(1, 8)
    b = Builder(module, name)
    return b, [b.input(n, DType.F32, (sym("t"), 4), Role.ACTIVATION) for n in ("x", "y")]


def weights(module: Module, *symbols: str) -> None:
    for i, symbol in enumerate(symbols):
        module.weights.add(symbol, dense(np.full((4, 4), float(i))))


def ops(module: Module, graph: str = "main") -> list[str]:
    return [n.op.name for n in module.graphs[graph].nodes]


def test_removes_nodes_no_output_needs_and_their_weights():
    module = Module("m")
    weights(module, "w0", "w1", "w2")
    b, (x, _) = builder(module)
    a = b.op("linear", x, weights=("w0",))
    unused = b.op("linear", a, weights=("w1",))
    b.op("add", unused, a)
    b.output(a, "out", Role.ACTIVATION)
    assert check_pass(Dce(), module)
    assert ops(module) == ["linear"]
    assert list(module.weights) == ["w0"]
    assert [i.name for i in module.graphs["main"].inputs] == ["x", "y"]
    assert list(x.uses) == [(a.producer, 0)]


def test_nothing_to_remove():
    module = Module("m")
    weights(module, "w0")
    b, (x, y) = builder(module)
    z = b.op("mul", b.op("linear", x, weights=("w0",)), y)
    b.output(z, "a", Role.ACTIVATION)
    b.output(y, "b", Role.ACTIVATION)
    assert not check_pass(Dce(), module)
    assert ops(module) == ["linear", "mul"]


def test_a_node_with_one_used_result_stays():
    module = Module("m")
    b, (x, _) = builder(module)
    pieces = b.node("split", (x,), attrs=SplitAttributes(1, (1, 3))).results
    b.op("silu", pieces[0])
    b.output(pieces[1], "out", Role.ACTIVATION)
    assert check_pass(Dce(), module)
    assert ops(module) == ["split"]


def test_outputs_that_are_inputs_need_no_nodes():
    module = Module("m")
    b, (x, y) = builder(module)
    b.op("add", x, y)
    b.output(x, "out", Role.ACTIVATION)
    assert check_pass(Dce(), module)
    assert ops(module) == []


def test_a_graph_without_outputs_is_emptied_but_stays():
    module = Module("m")
    weights(module, "w0")
    b, (x, _) = builder(module)
    b.op("linear", x, weights=("w0",))
    assert check_pass(Dce(), module)
    assert ops(module) == []
    assert not module.weights
    assert [i.name for i in module.graphs["main"].inputs] == ["x", "y"]


def test_weights_behind_aliases_and_recipes_stay():
    module = Module("m")
    weights(module, "a", "b", "other", "unread")
    module.weights.alias("other", "b")
    module.weights.derive("both", "concat_rows", ("a", "other"))
    module.weights.derive("unread too", "concat_rows", ("both", "unread"))
    b, (x, _) = builder(module)
    b.output(b.op("linear", x, weights=("both",)), "out", Role.ACTIVATION)
    assert check_pass(Dce(), module)
    assert list(module.weights) == ["a", "b", "other", "both"]


def test_weights_another_graph_reads_stay():
    module = Module("m")
    weights(module, "w")
    for name, needed in (("f", False), ("g", True)):
        b, (x, _) = builder(module, name)
        y = b.op("linear", x, weights=("w",))
        b.output(y if needed else x, "out", Role.ACTIVATION)
    assert check_pass(Dce(), module)
    assert (ops(module, "f"), ops(module, "g")) == ([], ["linear"])
    assert list(module.weights) == ["w"]


def calls(dead: str) -> Module:
    """`main` calls `f` and `g`, `f` calls `leaf`; the results of `dead` are not needed."""
    module = Module("m")
    weights(module, "wf", "wg", "wl")
    main, (x, y) = builder(module)
    for name, symbol in (("leaf", "wl"), ("f", "wf"), ("g", "wg")):
        b, (inner, _) = builder(module, name)
        made = b.op("linear", inner, weights=(symbol,))
        if name == "f":
            made = b.op("call", made, inner, attrs=CallAttributes("leaf"))
        b.output(made, "out", Role.ACTIVATION)
    total = x
    for name in ("f", "g"):
        called = main.op("call", total, y, attrs=CallAttributes(name))
        if name not in dead:
            total = called
    main.output(total, "out", Role.ACTIVATION)
    return module


@pytest.mark.parametrize(
    ("dead", "graphs", "symbols"),
    [
        ("", ["main", "leaf", "f", "g"], ["wf", "wg", "wl"]),
        ("g", ["main", "leaf", "f"], ["wf", "wl"]),
        ("f", ["main", "g"], ["wg"]),
        ("fg", ["main"], []),
    ],
)
def test_graphs_whose_last_call_is_dead_go_with_it(dead, graphs, symbols):
    """Otherwise they would become entries: something the runtime starts."""
    module = calls(dead)
    assert check_pass(Dce(), module) is bool(dead)
    assert list(module.graphs) == graphs
    assert list(module.weights) == symbols
    assert [g.name for g in module.entries()] == ["main"]


def test_nothing_is_read():
    module = Module("m")
    store(module, "target", "a", dense(np.ones((4, 4))))
    store(module, "target", "b", dense(np.ones((4, 4))))
    module.weights.readers["target"] = ForbiddenReader()
    b, (x, _) = builder(module)
    b.output(b.op("linear", x, weights=("a",)), "out", Role.ACTIVATION)
    assert Dce().run(module, PassContext())
    assert list(module.weights) == ["a"]


def test_unbound_weights_are_like_others():
    module = pair()
    module.graphs["draft"].outputs = module.graphs["draft"].outputs[:2]  # the caches
    before = interface(module.graphs["draft"])
    assert Dce().run(module, PassContext())
    assert verify(module) == []
    assert interface(module.graphs["draft"]) == before
    assert "draft.lm_head.weight" not in module.weights
    assert "draft.embed_tokens.weight" in module.weights


@given(modules(dead=True), st.integers(0, 5))
def test_random_modules(module, seed):
    check_pass(Dce(), module, random_inputs(module, seed))
    read = set()
    for graph in module.graphs.values():
        assert live_nodes(graph) == set(graph.nodes)
        for symbol in graph.used_weights():
            read.update(module.weights.dependencies(symbol))
    assert set(module.weights) == read


@given(modules())
def test_modules_without_dead_code_stay(module):
    text = print_module(module)
    assert not Dce().run(module, PassContext())
    assert print_module(module) == text
