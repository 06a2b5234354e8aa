from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Builder, DType, Module, Role, SymbolRange, Weight, sym, verify
from edgecc.ir.core import Graph
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.ops.control import CallAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.split_layers import SplitLayers, SplitLayersOptions, layers_of
from helpers.modules import check_pass
from helpers.weights import dense

WIDTH, CAPACITY = 4, 6


def decoder(kinds: str, taps: frozenset[int] = frozenset(), *, called: bool = False) -> Module:
    """A decoder with a layer for each letter: `a`ttention, or attention behind a `g`ate.

    Args:
        kinds: Of the layers.
        taps: Layers whose results are wanted as well.
        called: Whether the entry calls the decoder as a graph of its own.
    """
    module = Module("m", symbols={"b": SymbolRange(1, 2), "t": SymbolRange(1, 3)})
    b = Builder(module, "body" if called else "target")
    ids = b.input("token_ids", DType.I64, (sym("b"), sym("t")), Role.TOKEN_IDS)
    start = b.input("cache_length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
    module.weights.add("embed.weight", _numbers(5, WIDTH, 1))
    x = b.op("embedding", ids, weights=("embed.weight",), name="x")
    length = b.op("advance", start, ids, name="length")
    updated, tapped = [], []
    for i, kind in enumerate(kinds):
        names = [f"layers.{i}.{n}.weight" for n in ("mix", "gate", "out")]
        for j, name in enumerate(names):
            module.weights.add(name, _numbers(WIDTH, WIDTH, 3 * i + j + 2))
        cache = b.input(f"k_cache.{i}", DType.F32, (sym("b"), 1, CAPACITY, WIDTH), Role.KV_CACHE)
        y = b.op("linear", x, weights=names[:1], name="mixed")
        now = b.op("cache_update", cache, y, start, name=f"k_cache.{i}")
        attrs = AttentionAttributes(1, 1, 0.5)
        y = b.op("attention", y, now, now, length, attrs=attrs, name="attn")
        if kind == "g":
            gate = b.op("linear", x, weights=names[1:2], name="gate")
            y = b.op("mul", y, b.op("sigmoid", gate))
        x = b.op("add", x, y, name="x")
        x = b.op("add", x, b.op("linear", x, weights=names[2:], name="out"), name="x")
        updated.append((now, cache.name))
        tapped += [x] if i in taps else []
    b.output(b.op("silu", x, name="y"), "hidden", Role.HIDDEN_TAP)
    for i, value in enumerate(tapped):
        b.output(value, f"tap{i}", Role.ACTIVATION)
    for value, name in updated:
        b.output(value, name, Role.KV_CACHE, alias=name)
    if called:
        _caller(module, b.graph)
    return module


def _numbers(rows: int, columns: int, seed: int) -> Weight:
    return dense(np.random.default_rng(seed).standard_normal((rows, columns)) / 4)


def _caller(module: Module, body: Graph) -> None:
    b = Builder(module, "target")
    inputs = [b.input(i.name, i.value.type.dtype, i.value.type.shape, i.role) for i in body.inputs]
    made = b.node("call", inputs, attrs=CallAttributes("body")).results
    for value, output in zip(made, body.outputs, strict=True):
        b.output(value, output.name, output.role, output.alias)


def parts(module: Module) -> list[list[str]]:
    """The layers each called graph multiplies by."""
    called = [module.graphs[n] for n in module.graphs["target"].callees()]
    return [
        sorted({w.split(".")[1] for w in g.used_weights() if w.startswith("layers")})
        for g in called
    ]


def split(module: Module, **options: int) -> bool:
    return SplitLayers(SplitLayersOptions(**options)).run(module, PassContext())


@pytest.mark.parametrize("called", [False, True])
def test_an_embedding_layers_and_what_follows(called):
    module = decoder("aaaaa", frozenset({1}), called=called)
    assert split(module, layers=2, most=3)
    verify(module)
    assert parts(module) == [[], ["0", "1"], ["2", "3"], ["4"], []]
    name = "body" if called else "target"
    assert list(module.graphs["target"].callees()) == [f"{name}.{i}" for i in range(5)]
    assert [n.op.name for n in module.graphs[f"{name}.0"].nodes] == ["embedding", "advance"]
    assert [n.op.name for n in module.graphs[f"{name}.4"].nodes] == ["silu"]
    assert "body" not in module.graphs


def test_numbers_count_from_the_first_layer_of_a_part():
    module = decoder("aaaa")
    assert split(module, layers=2, most=2)
    first, second = (module.graphs[f"target.{i}"] for i in (1, 2))
    assert [i.name for i in first.inputs] == [i.name for i in second.inputs]
    assert "k_cache.1" in {i.name for i in second.inputs}
    assert [(o.name, o.alias) for o in second.outputs if o.alias] == [
        ("k_cache.0", "k_cache.0"),
        ("k_cache.1", "k_cache.1"),
    ]
    names = [o.name for o in module.graphs["target"].outputs]
    assert names[-1] == "k_cache.3"


@pytest.mark.parametrize(
    ("kinds", "layers", "expected"),
    [
        ("aagaagaag", 1, 3),  # one period of three
        ("aagaagaag", 4, 6),  # two of them
        ("aaaaaaaaa", 4, 4),
        ("agaaaggag", 2, 2),  # no period
    ],
)
def test_parts_are_multiples_of_the_period(kinds, layers, expected):
    module = decoder(kinds)
    assert split(module, layers=layers, most=6)
    assert len(parts(module)[1]) == expected


def test_a_graph_of_few_layers_stays_whole():
    for kinds in ("", "a", "aaa"):
        assert not split(decoder(kinds), layers=1, most=3)


def test_layers_follow_one_another():
    module = decoder("agaga")
    graph = module.graphs["target"]
    layers = layers_of(graph)
    assert len(layers) == 5
    nodes = list(graph.nodes)
    assert nodes[layers[0].start].op.name == "linear"
    assert nodes[layers[-1].stop].op.name == "silu"
    assert [a.stop for a in layers[:-1]] == [b.start for b in layers[1:]]


def test_parts_stand_where_the_graph_stood():
    module = decoder("aaa", called=True)
    Builder(module, "last")
    split(module, layers=1, most=1)
    assert list(module.graphs) == [*(f"body.{i}" for i in range(5)), "target", "last"]


@given(
    st.text("ag", min_size=1, max_size=6),
    st.frozensets(st.integers(0, 5), max_size=2),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 4),
)
def test_values_stay(kinds, taps, called, layers, most):
    module = decoder(kinds, taps, called=called)
    options = replace(SplitLayersOptions(), layers=layers, most=most)
    changed = check_pass(SplitLayers(options), module)
    assert changed == any(len(part) < len(kinds) for part in parts(module))
    assert not changed or max(map(len, parts(module))) < len(kinds) > most
