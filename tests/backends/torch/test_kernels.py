"""Every kernel against formulas written down in tests/ir, and against the interpreter on shapes
that formulas are not written for: no rows, one row, no sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.torch.executor import KERNELS
from edgecc.errors import RequestError
from edgecc.ir import DType
from edgecc.ir.ops import OPS
from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes, SplitHeadsAttributes
from edgecc.ir.ops.elementwise import GELUS, CastAttributes, GeluAttributes
from edgecc.ir.ops.norm import AddRmsNormAttributes, LayerNormAttributes, RmsNormAttributes
from edgecc.ir.ops.quantization import FakeQuantizeAttributes
from edgecc.ir.ops.sampling import ArgmaxAttributes, MarkovChainAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from edgecc.ir.ops.vision import (
    MergeRowsAttributes,
    MultiAxisRopeAttributes,
    MultiHeadAttentionAttributes,
)
from helpers.ops import Array, Case, assert_same_bits, check_reference, run_op, values
from helpers.oracle import assert_close, on_devices, op_cases, oracle
from helpers.weights import dense, packed

CASES = op_cases()


def test_every_op_has_a_kernel():
    assert set(KERNELS) == set(OPS)


def test_every_op_is_tried():
    # Calls are between graphs: see test_executor.
    assert {name.split("-")[0] for name in CASES} | set(RANDOM) == set(OPS) - {"call"}


@on_devices
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_reference(name, seed, device):
    case = CASES[name](np.random.default_rng(seed))
    check_reference(name.split("-")[0], case, evaluator=oracle(device))


@dataclass(frozen=True)
class Sizes:
    """Sequences, rows and heads, any of the first two 0."""

    b: int
    s: int
    kv_heads: int
    group: int
    causal: bool


sizes = st.builds(
    Sizes,
    b=st.integers(0, 3),
    s=st.integers(0, 5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    causal=st.booleans(),
)

Make = Callable[[np.random.Generator, Sizes], Case]
CAPACITY, HEAD = 9, 4


def plain(*operands: Array, weights=(), attrs=None) -> Case:
    return Case(operands, (), tuple(weights), attrs)


def unary(rng: np.random.Generator, n: Sizes) -> Case:
    return plain(values(rng, n.b, n.s, 5, scale=4))


def binary(rng: np.random.Generator, n: Sizes) -> Case:
    return plain(values(rng, n.b, n.s, 5), values(rng, n.b, n.s, 5))


def linear(rng: np.random.Generator, n: Sizes) -> Case:
    w = packed(rng, 7, 8).weight if n.causal else dense(values(rng, 7, 8), DType.BF16)
    bias = [dense(values(rng, 7))] if n.group > 1 else []
    return plain(values(rng, n.b, n.s, 8), weights=[w, *bias])


def embedding(rng: np.random.Generator, n: Sizes) -> Case:
    table = packed(rng, 6, 8).weight if n.causal else dense(values(rng, 6, 3))
    return plain(rng.integers(0, 6, (n.b, n.s)), weights=[table])


def lookup(rng: np.random.Generator, n: Sizes) -> Case:
    table = dense(rng.integers(-(1 << 60), 1 << 60, 6))
    return plain(rng.integers(0, 6, (n.b, n.s)), weights=[table])


def rms_norm(rng: np.random.Generator, n: Sizes) -> Case:
    x, weight = values(rng, n.b, n.s, 5 * n.group), dense(values(rng, 5))
    return plain(x, weights=[weight], attrs=RmsNormAttributes(1e-5, n.group))


def add_rms_norm(rng: np.random.Generator, n: Sizes) -> Case:
    operands, weight = [values(rng, n.b, n.s, 5) for _ in range(2)], dense(values(rng, 5))
    return plain(*operands, weights=[weight], attrs=AddRmsNormAttributes(1e-5))


def fake_quantize(rng: np.random.Generator, n: Sizes) -> Case:
    encoding, scale = "nvfp4<block=4>" if n.causal else "fp8<tensor>", rng.uniform(0.01, 0.1)
    x = values(rng, n.b, n.s, 4 * n.group)
    return plain(x, weights=[dense(scale)], attrs=FakeQuantizeAttributes(encoding))


def tables(rng: np.random.Generator):
    return [dense(values(rng, CAPACITY, half)) for half in [int(rng.integers(1, 3))] * 2]


def rope(rng: np.random.Generator, n: Sizes) -> Case:
    operands = values(rng, n.b, n.s, n.group * HEAD), rng.integers(0, CAPACITY, (n.b, n.s))
    return plain(*operands, weights=tables(rng), attrs=RopeAttributes(n.group))


def cache(rng: np.random.Generator, n: Sizes, width: int = HEAD) -> Array:
    return values(rng, n.b, n.kv_heads, CAPACITY, width)


def start(rng: np.random.Generator, n: Sizes) -> Array:
    return rng.integers(0, CAPACITY - n.s + 1, n.b)


def cache_update(rng: np.random.Generator, n: Sizes) -> Case:
    return plain(cache(rng, n), values(rng, n.b, n.s, n.kv_heads * HEAD), start(rng, n))


def window(rng: np.random.Generator, n: Sizes) -> int | None:
    return int(rng.integers(1, CAPACITY)) if n.causal and rng.integers(2) else None


def attention(rng: np.random.Generator, n: Sizes) -> Case:
    heads = n.kv_heads * n.group
    attrs = AttentionAttributes(heads, n.kv_heads, 0.3, n.causal, window(rng, n))
    q, length = values(rng, n.b, n.s, heads * HEAD), start(rng, n) + n.s
    return plain(q, cache(rng, n), cache(rng, n, int(rng.integers(1, 6))), length, attrs=attrs)


def cached_attention(rng: np.random.Generator, n: Sizes) -> Case:
    heads, width = n.kv_heads * n.group, n.kv_heads * HEAD
    queries = int(rng.integers(0, n.s + 1))
    operands = [values(rng, n.b, queries, heads * HEAD)]
    operands += [values(rng, n.b, n.s, width) for _ in range(2)]
    attrs = AttentionAttributes(heads, n.kv_heads, 0.3, n.causal, window(rng, n))
    weights = tables(rng) if rng.integers(2) else []
    return plain(
        *operands, cache(rng, n), cache(rng, n), start(rng, n), weights=weights, attrs=attrs
    )


def concat(rng: np.random.Generator, n: Sizes) -> Case:
    return plain(values(rng, n.b, n.s, 2), values(rng, n.b, 3, 2), attrs=AxisAttributes(1))


def take_rows(rng: np.random.Generator, n: Sizes) -> Case:
    count = n.group if n.s else 0
    return plain(values(rng, n.b, n.s, 3), rng.integers(0, max(1, n.s), count))


def lengths(rng: np.random.Generator, n: Sizes) -> Case:
    return plain(rng.integers(0, 99, n.b), values(rng, n.b, n.s, 1))


def markov_chain(rng: np.random.Generator, n: Sizes) -> Case:
    base, anchor = values(rng, n.b, 4, 7), rng.integers(0, 7, n.b)
    weights = [dense(values(rng, 7, 4)), packed(rng, 7, 4).weight]
    return plain(base, anchor, weights=weights, attrs=MarkovChainAttributes(n.group, 5))


def causal_conv1d(rng: np.random.Generator, n: Sizes) -> Case:
    taps = n.group + 1
    x, state = values(rng, n.b, n.s, 3), values(rng, n.b, 3, taps - 1)
    return plain(x, state, weights=[dense(values(rng, 3, 1, taps))])


def gated_delta_net(rng: np.random.Generator, n: Sizes, rows: int | None = None) -> Case:
    heads, rows = n.kv_heads * n.group, n.s if rows is None else rows
    operands = [values(rng, n.b, rows, 3 * n.kv_heads) for _ in "qk"]
    operands += [values(rng, n.b, rows, width * heads) for width in (2, 1, 1)]
    operands.append(values(rng, n.b, heads, 3, 2))
    gates = [dense(values(rng, heads)) for _ in range(2)]
    attrs = GatedDeltaNetAttributes(n.kv_heads, heads)
    return plain(*operands, weights=gates, attrs=attrs)


def logged_delta_net(rng: np.random.Generator, n: Sizes) -> Case:
    heads, taps = n.kv_heads * n.group, n.group + 1
    channels = 2 * 3 * n.kv_heads + 2 * heads
    operands = [values(rng, n.b, n.s, width) for width in (channels, heads, heads)]
    operands += [values(rng, n.b, channels, taps - 1), values(rng, n.b, heads, 3, 2)]
    operands += [values(rng, n.b, 3, channels + 2 * heads)]
    operands += [rng.integers(0, most + 1, n.b) for most in (3, n.s)]
    weights = [dense(values(rng, *shape)) for shape in ((channels, 1, taps), (heads,), (heads,))]
    return plain(*operands, weights=weights, attrs=GatedDeltaNetAttributes(n.kv_heads, heads))


def cast(rng: np.random.Generator, n: Sizes) -> Case:
    attrs = CastAttributes("bf16" if n.causal else "f16")
    return plain(values(rng, n.b, n.s, 5, scale=4), attrs=attrs)


def layer_norm(rng: np.random.Generator, n: Sizes) -> Case:
    weights = [dense(values(rng, 5)) for _ in "wb"]
    return plain(values(rng, n.b, n.s, 5), weights=weights, attrs=LayerNormAttributes(1e-5))


def multi_axis_rope(rng: np.random.Generator, n: Sizes) -> Case:
    positions, weights = rng.integers(0, CAPACITY, (3, n.b, n.s)), tables(rng)
    axes = tuple(rng.integers(0, 3, weights[0].shape[1]).tolist())
    x, attrs = values(rng, n.b, n.s, n.group * HEAD), MultiAxisRopeAttributes(n.group, axes)
    return plain(x, positions, weights=weights, attrs=attrs)


def multi_head_attention(rng: np.random.Generator, n: Sizes) -> Case:
    operands = [values(rng, n.b, n.s, n.group * HEAD) for _ in "qkv"]
    return plain(*operands, attrs=MultiHeadAttentionAttributes(n.group, 0.3))


def merge_rows(rng: np.random.Generator, n: Sizes) -> Case:
    return plain(values(rng, n.b, n.s * n.group, 3), attrs=MergeRowsAttributes(n.group))


def replace_rows(rng: np.random.Generator, n: Sizes) -> Case:
    rows = n.group - 1  # sometimes none
    index = rng.integers(-1, rows, (n.b, n.s))
    return plain(values(rng, n.b, n.s, 3), values(rng, rows, 3), index)


def embedding_bag(rng: np.random.Generator, n: Sizes) -> Case:
    table = packed(rng, 6, 8).weight if n.causal else dense(values(rng, 6, 3), DType.BF16)
    shape = (n.b, n.s, n.group)
    return plain(rng.integers(0, 6, shape), values(rng, *shape), weights=[table])


def gelu(rng: np.random.Generator, n: Sizes) -> Case:
    attrs = GeluAttributes(GELUS[n.causal])
    return plain(values(rng, n.b, n.s, 5, scale=4), attrs=attrs)


RANDOM: Mapping[str, Make] = {
    "gelu": gelu,
    "layer_norm": layer_norm,
    "multi_axis_rope": multi_axis_rope,
    "multi_head_attention": multi_head_attention,
    "merge_rows": merge_rows,
    "replace_rows": replace_rows,
    "embedding_bag": embedding_bag,
    "causal_conv1d": causal_conv1d,
    "gated_delta_net": gated_delta_net,
    "logged_delta_net": logged_delta_net,
    "split_heads": lambda rng, n: plain(
        values(rng, n.b, n.s, 3 * n.group), attrs=SplitHeadsAttributes(n.group, (2, 1))
    ),
    "cast": cast,
    "silu": unary,
    "sigmoid": unary,
    "tanh": unary,
    "add": binary,
    "sub": binary,
    "mul": binary,
    "swiglu": binary,
    "linear": linear,
    "embedding": embedding,
    "lookup": lookup,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "fake_quantize": fake_quantize,
    "rope": rope,
    "cache_update": cache_update,
    "attention": attention,
    "cached_attention": cached_attention,
    "concat": concat,
    "split": lambda rng, n: plain(values(rng, n.b, n.s, 6), attrs=SplitAttributes(2, (1, 3, 2))),
    "slice": lambda rng, n: plain(values(rng, n.b, n.s, 6), attrs=SliceAttributes(2, 1, 4)),
    "tail": lambda rng, n: plain(
        values(rng, n.b, n.s + 2, 3), values(rng, n.b, n.s), attrs=AxisAttributes(1)
    ),
    "take_rows": take_rows,
    "pad": lambda rng, n: plain(values(rng, n.b, n.s), attrs=PadAttributes(n.causal, n.group, -3)),
    "unsqueeze": lambda rng, n: plain(values(rng, n.b, n.s), attrs=AxisAttributes(n.kv_heads - 1)),
    "squeeze": lambda rng, n: plain(values(rng, n.b, 1, n.s), attrs=AxisAttributes(1)),
    "position_ids": lengths,
    "advance": lengths,
    "argmax": lambda rng, n: plain(values(rng, n.b, n.s, 6), attrs=ArgmaxAttributes(5)),
    "markov_chain": markov_chain,
}


@on_devices
@pytest.mark.parametrize("op", RANDOM)
@given(n=sizes, seed=st.integers(0, 99))
def test_any_shape(op, device, n, seed):
    case = RANDOM[op](np.random.default_rng(seed), n)
    for dtype, tolerance in ((np.float32, 3e-6), (np.float64, 1e-13)):
        found, expected = (
            run_op(op, case.operands, case.weights, case.attrs, **options)
            for options in (
                {"dtype": dtype, "evaluator": oracle(device)},
                {"dtype": np.float64},
            )
        )
        assert all(f.dtype in (dtype, np.int64) for f in found)
        named = [{str(i): a for i, a in enumerate(arrays)} for arrays in (found, expected)]
        assert_close(*named, tolerance)


@on_devices
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_attention_reads_only_valid_rows(causal, garbage, device):
    rng = np.random.default_rng(5)
    operands = CASES["attention-grouped"](rng).operands
    attrs, run = AttentionAttributes(4, 2, 0.5, causal), oracle(device)
    expected = run_op("attention", operands, attrs=attrs, evaluator=run)
    for rows in operands[1:3]:
        rows[0, :, 3:] = garbage
    assert_same_bits(run_op("attention", operands, attrs=attrs, evaluator=run), expected)


@on_devices
@pytest.mark.parametrize("rows", [63, 64, 65, 150])
def test_chunks_of_the_delta_rule_give_the_rows_of_the_walk(rows, device):
    case = gated_delta_net(np.random.default_rng(7), Sizes(2, 0, 2, 2, True), rows)
    options = {"weights": case.weights, "attrs": case.attrs, "dtype": np.float64}
    found, expected = (
        run_op("gated_delta_net", case.operands, **options, **more)
        for more in ({"evaluator": oracle(device)}, {})
    )
    for have, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-12 * np.abs(want).max())


@on_devices
def test_first_on_a_tie(device):
    x = np.zeros((3, 1000))
    x[0, [7, 3, 999]] = 1
    x[1, :] = -np.inf
    (found,) = run_op("argmax", [x], attrs=ArgmaxAttributes(1000), evaluator=oracle(device))
    assert found.tolist() == [3, 0, 0]


@on_devices
def test_large_scores_do_not_overflow(device):
    cache_ = np.array([[[[1e4, 1e4], [-1e4, -1e4]]]])
    operands = [np.full((1, 1, 2), 1e4), cache_, cache_, np.array([2])]
    attrs = AttentionAttributes(1, 1, 1.0)
    (y,) = run_op("attention", operands, attrs=attrs, evaluator=oracle(device))
    assert y.tolist() == [[[1e4, 1e4]]]


def table(rows: int) -> list:
    return [dense(np.ones((rows, 1)))] * 2


ROWS, SMALL = np.ones((1, 2, 2)), np.ones((1, 1, 8, 2))


@pytest.mark.parametrize(
    ("op", "operands", "weights", "attrs"),
    [
        ("embedding", [np.array([[0, 5]])], [dense(np.ones((5, 4)))], None),
        ("embedding", [np.array([[-1]])], [dense(np.ones((5, 4)))], None),
        ("lookup", [np.array([[0, 5]])], [dense(np.arange(5))], None),
        ("lookup", [np.array([-1])], [dense(np.arange(5))], None),
        ("take_rows", [np.zeros((1, 3, 2)), np.array([0, 3])], [], None),
        ("take_rows", [np.zeros((1, 3, 2)), np.array([-1])], [], None),
        ("rope", [ROWS, np.array([[0, 4]])], table(4), RopeAttributes(1)),
        ("cache_update", [SMALL, ROWS, np.array([7])], [], None),
        ("cache_update", [SMALL, ROWS, np.array([-1])], [], None),
        ("attention", [ROWS, SMALL, SMALL, np.array([1])], [], AttentionAttributes(1, 1, 1.0)),
        ("attention", [ROWS, SMALL, SMALL, np.array([9])], [], AttentionAttributes(1, 1, 1.0)),
        (
            "cached_attention",
            [ROWS, ROWS, ROWS, SMALL, SMALL, np.array([3])],
            table(4),
            AttentionAttributes(1, 1, 1.0),
        ),
        ("replace_rows", [ROWS, np.zeros((1, 2)), np.array([[0, 1]])], [], None),
        ("replace_rows", [ROWS, np.zeros((1, 2)), np.array([[0, -2]])], [], None),
        (
            "multi_axis_rope",
            [ROWS, np.array([[[0, 4]], [[0, 0]]])],
            table(4),
            MultiAxisRopeAttributes(1, (1,)),
        ),
        ("embedding_bag", [np.array([[5]]), np.ones((1, 1))], [dense(np.ones((5, 4)))], None),
        (
            "markov_chain",
            [np.zeros((1, 2, 3)), np.array([3])],
            [dense(np.ones((3, 2)))] * 2,
            MarkovChainAttributes(2, 3),
        ),
    ],
)
def test_a_call_is_refused_in_the_words_of_the_interpreter(op, operands, weights, attrs):
    messages = []
    for options in ({}, {"evaluator": oracle("cpu")}):
        with pytest.raises(RequestError) as caught:
            run_op(op, operands, weights, attrs, **options)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_operands_are_values_not_buffers():
    case = CASES["cached_attention-rotary"](np.random.default_rng(1))
    before = [o.copy() for o in case.operands]
    run_op("cached_attention", case.operands, case.weights, case.attrs, evaluator=oracle("cpu"))
    assert_same_bits(case.operands, before)
