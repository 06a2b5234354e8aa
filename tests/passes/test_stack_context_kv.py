from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Builder, Dense, DType, Module, Role, SymbolRange, Unbound, Weight, sym
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.fuse_cached_attention import FuseCachedAttention
from edgecc.passes.fuse_qkv import FuseQkv
from edgecc.passes.stack_context_kv import StackContextKv, StackContextKvOptions
from helpers.modules import check_pass, modules, storage
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options
from helpers.weights import dense, packed

ALLOWED = StackContextKvOptions(duplicate=True)
OWN = PairOptions(draft_head="own", draft_embedding="own", encoding="bf16", layers=2)


class Layers(Builder):
    """A context `[c, 8]`, blocks `[2, 8]`, and layers over both."""

    def __init__(self) -> None:
        super().__init__(Module("m", symbols={"c": SymbolRange(0, 9)}), "main")
        self.rng = np.random.default_rng(0)
        self.context = self.input("context", DType.F32, (sym("c"), 8), Role.ACTIVATION)

    def block(self, name: str, rows: int = 2):
        return self.input(name, DType.F32, (rows, 8), Role.ACTIVATION)

    def rows(self, *values, axis: int = 0):
        return self.op("concat", *values, attrs=AxisAttributes(axis))

    def weight(self, name: str, rows: int, kind: str = "bf16", scale: float = 0.5) -> str:
        if kind == "nvfp4":
            made = packed(self.rng, rows, 8, global_scale=scale).weight
        else:
            made = dense(self.rng.standard_normal((rows, 8)), DType(kind))
        return self.module.weights.add(name, made)

    def layer(self, x, name: str, rows: int = 4, kind: str = "bf16", scale: float = 0.5):
        symbols = (self.weight(name, rows, kind, scale),)
        return self.at(f"model.{name}").op("linear", x, weights=symbols, name=f"{name}_y")


def run(b: Layers, *values, changed: bool = True, options=ALLOWED) -> list[str]:
    """The remarks."""
    for i, value in enumerate(values):
        b.output(value, f"out{i}", Role.ACTIVATION)
    ctx = PassContext()
    assert (
        check_pass(StackContextKv(options), b.module, ctx=ctx, may_copy=options.duplicate)
        is changed
    )
    return [str(r) for r in ctx.remarks]


def ops(b: Layers) -> list[str]:
    return [n.op.name for n in b.graph.nodes]


def two_layers(b: Layers, **second):
    first = b.layer(b.rows(b.context, b.block("y0")), "k0")
    return first, b.layer(b.rows(b.context, b.block("y1")), "k1", **second)


def test_keys_of_two_layers():
    b = Layers()
    first, second = two_layers(b, rows=6)
    remarks = run(b, first, b.op("silu", second))
    stacked = b.module.weights["main.context.stacked"]
    assert stacked.shape == (10, 8)
    assert stacked.source.inputs == ("k0", "k1")
    products = [n for n in b.graph.nodes if n.op.name == "linear"]
    assert [n.operands[0].name for n in products] == ["context", "y0", "y1"]
    assert [n.weights[0] for n in products] == ["main.context.stacked", "k0", "k1"]
    joined = b.graph.outputs[0].value
    assert (joined.name, str(joined.producer.location)) == ("k0_y", "model.k0 <- stack-context-kv")
    assert remarks == [
        "stack-context-kv: applied at @main, linear of model.k0: 2 layers over %context became "
        "one, 160 bytes of weights are stored twice"
    ]
    assert storage(b.module) == {"main.context.stacked", "k0", "k1"}


def test_it_asks_before_it_stores_anything_twice():
    b = Layers()
    remarks = run(b, *two_layers(b), changed=False, options=StackContextKvOptions())
    assert remarks == [
        "stack-context-kv: not applied at @main, linear of model.k0: 2 layers over %context would "
        "store 128 bytes of weights twice, see duplicate"
    ]


def test_keys_and_values_of_three_layers_in_one_product():
    b = Layers()
    made = []
    for i in range(3):
        rows = b.rows(b.context, b.block(f"y{i}"))
        made += [b.layer(rows, f"{n}{i}") for n in "kv"]
    run(b, *made)
    assert ops(b).count("split") == 1
    assert b.module.weights["main.context.stacked"].shape == (24, 8)


def test_rows_of_several_parts():
    """The second part is shared as well: then it is stacked like the first."""
    b = Layers()
    blocks = [b.block(n, 1) for n in ("y0", "y1", "y2")]
    made = [b.layer(b.rows(b.context, *p), f"k{i}") for i, p in enumerate((blocks, blocks[:2]))]
    assert [r.split("linear of ")[-1].split(",")[0] for r in run(b, *made)] == [
        "model.k0: 2 layers over %context became one",
        "model.k0: 2 layers over %y0 became one",
    ]
    # The weights are those of the first part.
    assert {s for s in storage(b.module) if "stacked" in s} == {"main.context.stacked"}


def test_rows_others_read_too():
    b = Layers()
    rows = b.rows(b.context, b.block("y0"))
    other = b.layer(b.rows(b.context, b.block("y1")), "k1")
    run(b, b.op("silu", rows), b.layer(rows, "k0"), other)


def test_two_contexts():
    b = Layers()
    made = list(two_layers(b))
    late = b.op("silu", b.context, name="late")
    made += [b.layer(b.rows(late, b.block(f"z{i}")), f"v{i}") for i in range(2)]
    run(b, *made)
    assert {"main.context.stacked", "main.late.stacked"} <= storage(b.module)


def test_layouts_are_stacked_apart():
    """Two encodings, and NVFP4 with two global scales: three products, one layer stays."""
    b = Layers()
    kinds = ["bf16", "f32", "nvfp4", "nvfp4", "f32", "bf16", "nvfp4", "nvfp4", "f16"]
    scales = [0.5, 0.5, 0.5, 0.25, 0.5, 0.5, 0.5, 0.25, 0.5]
    made = [
        b.layer(b.rows(b.context, b.block(f"y{i}")), f"k{i}", kind=kind, scale=scale)
        for i, (kind, scale) in enumerate(zip(kinds, scales, strict=True))
    ]
    remarks = run(b, *made)
    stacked = {s: b.module.weights[s].source.inputs for s in storage(b.module) if "stacked" in s}
    assert stacked == {
        "main.context.stacked": ("k0", "k5"),
        "main.context.stacked.1": ("k1", "k4"),
        "main.context.stacked.2": ("k2", "k6"),
        "main.context.stacked.3": ("k3", "k7"),
    }
    assert remarks[-1].endswith(
        "model.k8: no layer over other rows has a weight in dense<f16> with the same scalars"
    )


def one_concat(b):
    """What `fuse-qkv` is for."""
    rows = b.rows(b.context, b.block("y0"))
    return b.layer(rows, "k0"), b.layer(rows, "v0")


def context_last(b):
    return tuple(b.layer(b.rows(b.block(f"y{i}"), b.context), f"k{i}") for i in range(2))


def other_contexts(b):
    late = b.op("silu", b.context)
    return tuple(
        b.layer(b.rows(c, b.block(f"y{i}")), f"k{i}") for i, c in enumerate((b.context, late))
    )


def nothing_but_context(b):
    return tuple(b.layer(b.rows(b.context), f"k{i}") for i in range(2))


def along_columns(b):
    halves = [b.input(n, DType.F32, (3, 4), Role.ACTIVATION) for n in ("a", "x", "y")]
    return tuple(b.layer(b.rows(halves[0], h, axis=1), f"k{i}") for i, h in enumerate(halves[1:]))


def no_concat(b):
    return tuple(b.layer(b.context, f"k{i}") for i in range(2))


@pytest.mark.parametrize(
    "make",
    [one_concat, context_last, other_contexts, nothing_but_context, along_columns, no_concat],
)
def test_near_misses(make):
    b = Layers()
    assert run(b, *make(b), changed=False) == []


def test_a_bias():
    b = Layers()
    b.module.weights.add("bias", dense(np.ones(4)))
    made = []
    for i in range(2):
        symbols = (b.weight(f"k{i}", 4), "bias")
        rows = b.rows(b.context, b.block(f"y{i}"))
        made.append(b.op("linear", rows, weights=symbols))
    assert [r.split(": ")[-1] for r in run(b, *made, changed=False)] == ["the layer has a bias"]


def test_unbound_weights():
    b, ctx = Layers(), PassContext()
    weight = Weight((4, 8), Dense(DType.BF16), Unbound("lm_head"))
    for i in range(2):
        symbol = b.module.weights.add(f"k{i}", weight)
        rows = b.rows(b.context, b.block(f"y{i}"))
        b.output(b.op("linear", rows, weights=(symbol,)), f"y{i}", Role.ACTIVATION)
    assert not StackContextKv(ALLOWED).run(b.module, ctx)
    assert [r.message for r in ctx.remarks] == ["a weight is unbound"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_block_draft(fused):
    """Before and after `fuse-qkv`; `fuse-cached-attention` finds its patterns afterwards."""
    module = pair(OWN)
    if fused:
        FuseQkv().run(module, PassContext())
    inputs = pair_inputs(module, OWN, batch=2)
    assert check_pass(StackContextKv(ALLOWED), module, inputs, may_copy=True)
    assert "stacked" not in str([n.weights for n in module.graphs["target"].nodes])
    stacked = [s for s in storage(module) if s.endswith(".stacked")]
    assert len(stacked) == 1
    rows = 2 * OWN.layers * OWN.kv_heads * 4
    assert module.weights[stacked[0]].shape[0] == rows
    assert check_pass(FuseCachedAttention(), module, inputs)


@given(modules(), st.booleans())
def test_random_modules(module, duplicate):
    check_pass(StackContextKv(StackContextKvOptions(duplicate)), module, may_copy=duplicate)


@FEWER
@given(pair_options(), st.booleans(), st.integers(0, 9))
def test_random_pairs(options, fused, seed):
    options = replace(options, draft_head="own", draft_embedding="own", layers=2)
    module = pair(options)
    if fused:
        FuseQkv().run(module, PassContext())
    inputs = pair_inputs(module, options, seed, batch=2)
    check_pass(StackContextKv(ALLOWED), module, inputs, may_copy=True)
