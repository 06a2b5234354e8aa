"""Quantized activations against the formats' tables: the nearest entry, by search."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc import fp8, nvfp4
from edgecc.ir import DType
from edgecc.ir.ops import Trait, TypeRuleError, get_op, quantization
from edgecc.ir.ops.quantization import FakeQuantizeAttributes
from helpers.ops import Array, Cases, check_reference, check_rows, family, infer, run_op, values
from helpers.ops import Case as C
from helpers.weights import dense

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E4M3 = [m * 2.0**-9 for m in range(8)]
E4M3 += [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
"""Magnitudes by code; the last code of E4M3 is NaN."""


def nearest(table: list[float], x: float) -> float:
    """The entry next to x, ties to the even code, saturating."""
    size = abs(x)
    code = min(range(len(table)), key=lambda c: (abs(table[c] - size), c % 2))
    return table[code] if x >= 0 else -table[code]


def nvfp4_by_hand(x: Array, g: float, block: int) -> Array:
    out = np.empty_like(x)
    for index in np.ndindex(*x.shape[:-1]):
        for start in range(0, x.shape[-1], block):
            part = x[index][start : start + block]
            largest = max(abs(v) for v in part)
            s = nearest(E4M3, min(max(largest / (6 * g), 2.0**-9), 448)) if largest else 1
            out[index][start : start + block] = [nearest(E2M1, v / (s * g)) * s * g for v in part]
    return out + 0.0


def fp8_by_hand(x: Array, g: float) -> Array:
    return np.vectorize(lambda v: nearest(E4M3, v / g) * g)(x) + 0.0


def fake_quantize(rng: np.random.Generator) -> C:
    x, g = values(rng, 2, 3, 32), np.float32(0.013)
    x[0, 0, :16], x[0, 1, :3] = 0, 100  # a block of zeros, a block that saturates
    return C(
        (x,),
        (nvfp4_by_hand(x, float(g), 16),),
        (dense(g),),
        FakeQuantizeAttributes("nvfp4<block=16>"),
        types=("f32[b, t, 32]",),
        results=("f32[b, t, 32]",),
    )


def fake_quantize_small_blocks(rng: np.random.Generator) -> C:
    x, g = values(rng, 3, 8, scale=1e-3), np.float32(7e-5)
    return C(
        (x,),
        (nvfp4_by_hand(x, float(g), 4),),
        (dense(g),),
        FakeQuantizeAttributes("nvfp4<block=4>"),
        types=("f32[t, 8]",),
        results=("f32[t, 8]",),
    )


def fake_quantize_fp8(rng: np.random.Generator) -> C:
    x, g = values(rng, 2, 3, 5), np.float32(0.0021)
    x[0, 0] = [0, 1e-7, -1e-7, 5, -5]
    return C(
        (x,),
        (fp8_by_hand(x, float(g)),),
        (dense(g),),
        FakeQuantizeAttributes("fp8<tensor>"),
        types=("f32[b, t, 5]",),
        results=("f32[b, t, 5]",),
    )


CASES: Cases = {
    "fake_quantize": fake_quantize,
    "fake_quantize-small-blocks": fake_quantize_small_blocks,
    "fake_quantize-fp8": fake_quantize_fp8,
}


def test_every_op_has_a_case():
    assert {name.split("-")[0] for name in CASES} == family(quantization.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference(name.split("-")[0], CASES[name](np.random.default_rng(1)))


def rounded(x: Array, encoding: str, scale: float = 1.0) -> list[float]:
    (found,) = run_op("fake_quantize", [x], [dense(scale)], FakeQuantizeAttributes(encoding))
    assert not np.any(np.signbit(found) & (found == 0))
    return found.ravel().tolist()


def test_ties_go_to_the_even_code():
    """The golden row of facts about ModelOpt: every tie of E2M1, with a block scale of one."""
    row = [0, 0.25, -0.25, 0.5, -0.75, 1, -1.25, 1.5, -1.75, 2, -2.5, 3, -3.5, 4, -5, 6]
    expected = [0, 0, 0, 0.5, -1, 1, -1, 1.5, -2, 2, -2, 3, -4, 4, -4, 6]
    assert rounded(np.array([row]), "nvfp4<block=16>") == expected


def test_ties_of_fp8():
    x = np.array([1 + 1 / 16, 1 + 3 / 16, 2.0**-10, 3 * 2.0**-10, 448.0, 460, -464, 1e30])
    assert rounded(x, "fp8<tensor>") == [1, 1.25, 0, 2.0**-8, 448, 448, -448, 448]


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (0.0, 0.0),
        (6 * 448.0, 6 * 448.0),
        (6 * 449.0, 6 * 448.0),  # the scale of the block saturates
        (1e30, 6 * 448.0),
        (6 * 2.0**-9, 6 * 2.0**-9),
        (6 * 2.0**-11, 1.5 * 2.0**-9),  # the smallest scale
        (2.0**-12, 0.0),
    ],
)
def test_scales_of_blocks_are_clamped(largest, expected):
    x = np.zeros((1, 4))
    x[0, 2] = largest
    assert rounded(x, "nvfp4<block=4>") == [0, 0, expected, 0]


def test_a_block_does_not_see_its_neighbours():
    x = np.concatenate([np.full(4, 0.01), np.full(4, 100.0)])[None]
    assert rounded(x, "nvfp4<block=4>")[:4] == rounded(x[:, :4], "nvfp4<block=4>")


def test_not_a_number():
    x = np.array([[1.0, np.nan, 1, 1, 2, 2, 2, 2]])
    assert np.isnan(rounded(x, "nvfp4<block=4>")).tolist() == [True] * 4 + [False] * 4
    assert np.isnan(rounded(x, "fp8<tensor>")).tolist() == [False, True] + [False] * 6
    assert rounded(np.array([np.inf, -np.inf]), "fp8<tensor>") == [448, -448]


@pytest.mark.parametrize("encoding", ["nvfp4<block=16>", "fp8<tensor>"])
def test_rows_do_not_depend_on_each_other(encoding):
    x = values(np.random.default_rng(2), 6, 48)
    check_rows("fake_quantize", [x], [dense(0.01)], FakeQuantizeAttributes(encoding))


@given(
    scale=st.floats(2.0**-20, 2.0**4, width=32),
    seed=st.integers(0, 99),
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
)
def test_is_what_weights_are_rounded_to(scale, seed, spread):
    """Codes and scales of ModelOpt's weights, given the global scale; the same values come out."""
    x = values(np.random.default_rng(seed), 3, 32, scale=spread).astype(np.float32)
    g = np.float32(scale)
    packed, scales = nvfp4.quantize(x, g)
    expected = nvfp4.dequantize(packed, scales, np.asarray(g))
    np.testing.assert_array_equal(nvfp4.fake_quantize(x, g), expected)
    codes = fp8.quantize(x, np.asarray(g))
    np.testing.assert_array_equal(fp8.fake_quantize(x, g), fp8.dequantize(codes, np.asarray(g)))


@given(seed=st.integers(0, 99))
def test_loses_what_the_format_loses(seed):
    x = values(np.random.default_rng(seed), 4, 16).astype(np.float32)
    largest = np.abs(x).max(axis=1, keepdims=True)
    g = np.float32(largest.max() / 2688)
    assert np.all(np.abs(nvfp4.fake_quantize(x, g) - x) <= largest * (17 / 96 + 1e-6))
    narrow = fp8.fake_quantize(x, np.float32(largest.max() / 448))
    assert np.all(np.abs(narrow - x) <= np.maximum(np.abs(x) / 16, largest.max() / 448 * 2.0**-9))


def test_traits():
    assert get_op("fake_quantize").traits == Trait.ROWWISE | Trait.STEPWISE


SCALE = dense(0.5)


@pytest.mark.parametrize(
    ("type", "weights", "encoding", "message"),
    [
        ("i64[4]", [SCALE], "fp8<tensor>", "x must be floating-point"),
        ("f32[]", [SCALE], "fp8<tensor>", "x must have at least one axis"),
        ("f32[t, 24]", [SCALE], "nvfp4<block=16>", "must be a multiple of 16"),
        ("f32[t, t]", [SCALE], "nvfp4<block=16>", "must be a multiple of 16"),
        ("f32[16]", [dense([0.5])], "fp8<tensor>", "shape of the scale"),
        ("f32[16]", [dense(0.5, DType.BF16)], "fp8<tensor>", "encoding of the scale"),
        ("f32[16]", [SCALE], "fp8<channel>", "rounded to nvfp4<block=N> or fp8<tensor>"),
        ("f32[16]", [SCALE], "nvfp4<block=16, input_scale>", "rounded to nvfp4<block=N>"),
        ("f32[16]", [SCALE], "int8<channel>", "rounded to nvfp4<block=N> or fp8<tensor>"),
        ("f32[16]", [SCALE], "fp4", "unknown encoding 'fp4'"),
        ("f32[16]", [], "fp8<tensor>", "expects weights"),
    ],
)
def test_refused(type, weights, encoding, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("fake_quantize", [type], weights, FakeQuantizeAttributes(encoding))


def test_16_bit_values_are_rounded_to_their_type():
    assert infer(
        "fake_quantize", ["bf16[t, 16]"], [SCALE], FakeQuantizeAttributes("nvfp4<block=16>")
    ) == ["bf16[t, 16]"]


def test_the_tables_are_those_of_the_formats():
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert codes.tolist() == E4M3
    assert np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(float).tolist() == E2M1
