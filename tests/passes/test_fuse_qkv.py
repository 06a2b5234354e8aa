from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Builder, DType, Module, Role, SymbolRange, sym
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.fuse_cached_attention import FuseCachedAttention
from edgecc.passes.fuse_qkv import FuseQkv
from helpers.modules import check_pass, evaluate, storage
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options
from helpers.weights import dense

OWN = PairOptions(draft_head="own", draft_embedding="own")


def run(options: PairOptions) -> tuple[Module, list[str]]:
    """The pair after the pass, and what it said."""
    module, ctx = pair(options), PassContext()
    check_pass(FuseQkv(), module, pair_inputs(module, options), ctx)
    return module, [r.message for r in ctx.remarks]


def layers(module: Module, graph: str) -> dict[str, list[str]]:
    """Stacked weights and the sizes of the pieces."""
    found = {}
    for node in module.graphs[graph].nodes:
        if node.op.name == "split":
            linear = node.operands[0].producer
            found[linear.weights[0]] = [r.name for r in node.results]
    return found


@pytest.mark.parametrize("encoding", ["f32", "bf16", "nvfp4"])
def test_target_stacks_three_and_block_draft_two(encoding):
    """In the draft, keys and values also cover context rows that queries do not."""
    module, remarks = run(replace(OWN, encoding=encoding))
    assert layers(module, "target") == {
        "target.layers.0.q_proj+k_proj+v_proj.weight": ["q_proj", "k_proj", "v_proj"]
    }
    assert layers(module, "draft") == {"draft.layers.0.k_proj+v_proj.weight": ["k_proj", "v_proj"]}
    assert remarks == [
        "@target.layers.0.q_proj+k_proj+v_proj.weight",
        "@draft.layers.0.k_proj+v_proj.weight",
    ]
    fused = module.weights["target.layers.0.q_proj+k_proj+v_proj.weight"]
    assert fused.shape == (2 * 4 + 4 + 4, 8)
    assert list(fused.source.inputs) == [f"target.layers.0.{n}_proj.weight" for n in "qkv"]


@pytest.mark.parametrize("head_norms", [True, False])
@pytest.mark.parametrize("rope", [True, False])
def test_norms_and_rotary_are_looked_through(head_norms, rope):
    module, _ = run(replace(OWN, head_norms=head_norms, rope=rope))
    assert len(layers(module, "target")) == len(layers(module, "draft")) == 1


def test_biases_are_stacked_in_the_order_of_the_weights():
    module, remarks = run(replace(OWN, bias=True))
    assert remarks == [
        "@target.layers.0.q_proj+k_proj+v_proj.weight",
        "@draft.layers.0.k_proj+v_proj.weight",
    ]
    for graph, names in (("target", "qkv"), ("draft", "kv")):
        stem = f"{graph}.layers.0.{'+'.join(f'{n}_proj' for n in names)}"
        (node,) = (n for n in module.graphs[graph].nodes if f"{stem}.weight" in n.weights)
        assert node.weights == (f"{stem}.weight", f"{stem}.bias")
        parts = [module.weights.dense(f"{graph}.layers.0.{n}_proj.bias") for n in names]
        assert np.array_equal(module.weights.dense(f"{stem}.bias"), np.concatenate(parts))


def test_every_layer():
    module, remarks = run(replace(OWN, layers=3))
    assert len(layers(module, "target")) == len(layers(module, "draft")) == 3
    assert len(remarks) == 6


@pytest.mark.parametrize(
    ("options", "target", "draft"),
    [
        (
            {"special": {"q_proj": "bf16"}},
            "@target.layers.0.k_proj+v_proj.weight",
            "@draft.layers.0.k_proj+v_proj.weight",
        ),
        (
            {"special": {"v_proj": "f32"}},
            "encodings differ: dense<f32>, nvfp4<block=4>",
            "encodings differ: dense<f32>, nvfp4<block=4>",
        ),
        (
            {"special": {"k_proj": "other"}},
            "weight_scale_2 differs between the layers",
            "weight_scale_2 differs between the layers",
        ),
        (
            {"special": {"q_proj": "other"}},
            "@target.layers.0.k_proj+v_proj.weight",
            "@draft.layers.0.k_proj+v_proj.weight",
        ),
    ],
)
def test_near_misses(options, target, draft):
    _, remarks = run(replace(OWN, **options))
    assert remarks == [target, draft]


def test_equal_scales_are_compared_bit_for_bit():
    """Three layers with the other scale have one scale again."""
    other = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "other")
    module, _ = run(replace(OWN, special=other))
    assert len(layers(module, "target")) == 1


def attention(*, share: str = "", extra: str = "") -> Builder:
    """One attention of one head over caches that somebody else filled."""
    module = Module("m", symbols={"b": SymbolRange(1, 2), "t": SymbolRange(1, 8)})
    b = Builder(module, "main")
    x = b.input("x", DType.F32, (sym("b"), sym("t"), 4), Role.ACTIVATION)
    length = b.input("length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
    shape = (sym("b"), 1, 8, 4)
    caches = [b.input(f"{n}_cache", DType.F32, shape, Role.KV_CACHE) for n in "kv"]
    rng = np.random.default_rng(0)
    made = {}
    for name in "qkv":
        symbol = module.weights.add(f"a.{name}.w", dense(rng.standard_normal((4, 4))))
        if share == f"weight of {name}":
            symbol = "a.q.w"
        made[name] = b.op("linear", x, weights=(symbol,), name=name)
    if share == "layer":
        made["v"] = made["k"]
    k = b.op("cache_update", caches[0], made["k"], length)
    v = b.op("cache_update", caches[1], made["v"], length)
    end = b.op("advance", length, x)
    attrs = AttentionAttributes(1, 1, 0.5)
    b.output(b.op("attention", made["q"], k, v, end, attrs=attrs), "y", Role.ACTIVATION)
    if extra == "attention":
        module.weights.add("q2", dense(rng.standard_normal((4, 4))))
        q2 = b.op("linear", x, weights=("q2",), name="q2")
        b.output(b.op("attention", q2, k, v, end, attrs=attrs), "z", Role.ACTIVATION)
    elif extra:
        source = made[extra.split()[-1]]
        b.output(source if "output" in extra else b.op("silu", source), "z", Role.ACTIVATION)
    return b


INPUTS = {
    "main": {
        "x": np.random.default_rng(1).standard_normal((1, 3, 4)),
        "length": np.array([2]),
        "k_cache": np.ones((1, 1, 8, 4)),
        "v_cache": np.ones((1, 1, 8, 4)),
    }
}


@pytest.mark.parametrize("extra", ["output k", "user of v", "output q"])
def test_outputs_and_other_users_read_the_pieces(extra):
    b = attention(extra=extra)
    assert check_pass(FuseQkv(), b.module, INPUTS)
    assert [n.op.name for n in b.graph.nodes].count("linear") == 1


def test_one_layer_for_keys_and_values():
    """Stacked once, below the queries."""
    b = attention(share="layer")
    assert check_pass(FuseQkv(), b.module, INPUTS)
    assert layers(b.module, "main") == {"a.q+k.w": ["q", "k"]}


@pytest.mark.parametrize("share", ["weight of k", "weight of v"])
def test_two_layers_with_one_weight_are_not_stacked(share):
    b, ctx = attention(share=share), PassContext()
    assert not check_pass(FuseQkv(), b.module, INPUTS, ctx)
    assert {r.message for r in ctx.remarks} == {"two layers share one weight"}


def test_keys_and_values_of_two_attentions():
    """The second finds pieces instead of layers, and its query alone."""
    b = attention(extra="attention")
    assert check_pass(FuseQkv(), b.module, INPUTS)
    assert layers(b.module, "main") == {"a.q+k+v.w": ["q", "k", "v"]}
    assert [n.op.name for n in b.graph.nodes].count("linear") == 2


def test_weights_somebody_else_reads_are_not_stacked():
    b, ctx = attention(), PassContext()
    x = b.graph.inputs[0].value
    b.output(b.op("linear", x, weights=("a.k.w",), name="z"), "z", Role.ACTIVATION)
    before = storage(b.module)
    assert not check_pass(FuseQkv(), b.module, INPUTS, ctx)
    assert {r.message for r in ctx.remarks} == {"@a.k.w is also read in @main by %z = linear(%x)"}
    assert storage(b.module) == before


def test_it_comes_before_fuse_cached_attention():
    module = pair(OWN)
    FuseCachedAttention().run(module, PassContext())
    assert not check_pass(FuseQkv(), module, pair_inputs(module, OWN))


@given(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    encoding=st.sampled_from(["f32", "nvfp4"]),
    seed=st.integers(0, 99),
)
def test_split_undoes_the_stack_for_any_head_counts(kv_heads, group, encoding, seed):
    """Rows are stacked q, k, v and not interleaved by group: every row keeps its place."""
    options = replace(OWN, heads=kv_heads * group, kv_heads=kv_heads, encoding=encoding, seed=seed)
    module = pair(options, draft=False)
    rows = {n: module.weights.dense(f"target.layers.0.{n}_proj.weight") for n in "qkv"}
    assert check_pass(FuseQkv(), module, pair_inputs(module, options, seed))
    fused = module.weights.dense("target.layers.0.q_proj+k_proj+v_proj.weight")
    sizes = [len(r) for r in rows.values()]
    assert sizes == [4 * kv_heads * group, 4 * kv_heads, 4 * kv_heads]
    for found, expected in zip(np.split(fused, np.cumsum(sizes)[:-1]), rows.values(), strict=True):
        assert np.array_equal(found, expected)


@FEWER
@given(pair_options(), st.integers(0, 9))
def test_random_pairs(options, seed):
    options = replace(options, draft_head="own", draft_embedding="own")
    module = pair(options)
    check_pass(FuseQkv(), module, pair_inputs(module, options, seed, batch=2))
    stacked = [s for s in storage(module) if "+" in s]
    inputs = [i for s in stacked for i in module.weights[s].source.inputs]
    assert len(set(inputs)) == len(inputs)


def test_constants_per_head_stay_with_their_head():
    """Every head has values of its own constant: a wrong order of rows would mix them up."""
    options = PairOptions(heads=4, kv_heads=2, encoding="f32", head_norms=False, rope=False)
    module = pair(options, draft=False)
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        constants = np.repeat(np.arange(1.0, heads + 1), 4)[:, None] * np.ones((1, 8)) / 8
        module.weights.rebind(f"target.layers.0.{name}_proj.weight", dense(constants))
    inputs = pair_inputs(module, options)
    before = evaluate(module, inputs)
    assert FuseQkv().run(module, PassContext())
    after = evaluate(module, inputs)
    assert all(np.array_equal(after[name], before[name]) for name in before)
    new_values = after["target.v_cache.0"][0, :, 2:5]
    assert np.allclose(new_values[1], 2 * new_values[0])
