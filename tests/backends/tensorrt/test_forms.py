"""Forms of weights against a decoding of the bits in float64 that shares nothing with them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgecc.backends.tensorrt import forms

BF16, F8, E8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def e2m1(packed: NDArray) -> NDArray:
    """Float64 values by sign, exponent and mantissa: bias 1, low nibble first, one zero only."""
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1).astype(int)
    sign, exponent, mantissa = 1 - 2 * (codes >> 3), codes >> 1 & 3, codes & 1
    return sign * np.where(exponent, (1 + mantissa / 2) * 2.0 ** (exponent - 1), mantissa / 2) + 0.0


def e4m3(stored: NDArray) -> NDArray:
    """Float64 values by sign, exponent and mantissa: bias 7."""
    bits = stored.view(np.uint8).astype(int)
    sign, exponent, mantissa = 1 - 2 * (bits >> 7), bits >> 3 & 15, bits & 7
    return sign * np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa * 2.0**-9)


def int4(packed: NDArray) -> NDArray:
    """Float64 values: row 2r in the low nibble of byte row r, 2r + 1 in the high one."""
    nibbles = np.stack([packed & 15, packed >> 4], axis=1).reshape(2 * len(packed), -1).astype(int)
    return np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.float64)


def bf16(values: NDArray) -> NDArray:
    """Float64 to float32 to bf16, to nearest with ties to even, by integer arithmetic."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return rounded.astype(np.uint16)


def stored(seed: int, layout: str, rows: int, columns: int, block=(4, 8)) -> dict[str, NDArray]:
    random = np.random.default_rng(seed)
    scale = random.uniform(0.001, 2, rows).astype(np.float32)
    codes = random.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[codes & 127 == 127] = 0  # E4M3 has a NaN there
    grid = -(-rows // block[0]), -(-columns // block[1])
    return {
        "dense": {"weight": random.standard_normal((rows, columns)).astype(np.float32)},
        "nvfp4": {
            "weight": random.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
            "weight_scale": (codes[:, : columns // 16] & 127).view(F8),
            "weight_scale_2": np.array(random.uniform(1e-4, 1), np.float32),
        },
        "fp8": {"weight": codes.view(F8), "weight_scale": scale},
        "fp8-block": {
            "weight": codes.view(F8),
            "weight_scale": random.uniform(0.001, 2, grid).astype(np.float32),
        },
        "int8": {"weight": codes.view(np.int8), "weight_scale": scale},
        "int4": {
            "weight": codes[: rows // 2],
            "weight_scale": random.uniform(0.001, 2, (rows, columns // 8)).astype(np.float32),
        },
        "nvfp4-divided": {
            "weight": random.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
            "weight_scale": (codes[:, : columns // 16] & 127).view(F8),
            "weight_global_scale": np.array(random.uniform(1, 1e4), np.float32),
        },
        "mxfp4": {
            "weight": random.integers(0, 256, (rows, columns // 2), dtype=np.uint8),
            "weight_scale": (codes[:, : columns // 16] // 8 + 110).view(E8),
        },
        "int4-ordered": {
            "weight": codes[: rows // 2],
            "weight_scale": random.uniform(0.001, 2, (rows, columns // 8)).astype(np.float16),
            "weight_zero_point": random.integers(-8, 8, (rows, columns // 8)).astype(np.int8),
            "group_index": random.integers(0, max(1, columns // 8), columns).astype(np.int32),
        },
    }[layout]


def values(layout: str, parts: dict[str, NDArray], block=(4, 8)) -> NDArray:
    """Exact products rounded where the encoding says float32: 8 by 24 bits fit into float64."""
    weight, scale = parts["weight"], parts.get("weight_scale")
    if layout == "dense":
        return weight.astype(np.float64)
    if layout == "nvfp4":
        factors = (e4m3(scale) * np.float64(parts["weight_scale_2"])).astype(np.float32)
        return e2m1(weight) * factors.astype(np.float64).repeat(16, axis=1)
    if layout == "nvfp4-divided":
        factors = (e4m3(scale) / np.float64(parts["weight_global_scale"])).astype(np.float32)
        return e2m1(weight) * factors.astype(np.float64).repeat(16, axis=1)
    if layout == "mxfp4":
        return e2m1(weight) * (2.0 ** (scale.view(np.uint8).astype(int) - 127)).repeat(16, axis=1)
    scale = scale.astype(np.float64)
    if layout == "int4-ordered":
        index = parts["group_index"]
        return (int4(weight) - parts["weight_zero_point"][:, index]) * scale[:, index]
    if layout == "fp8":
        return e4m3(weight) * scale[:, None]
    if layout == "fp8-block":
        spread = scale.repeat(block[0], axis=0).repeat(block[1], axis=1)
        return e4m3(weight) * spread[: weight.shape[0], : weight.shape[1]]
    if layout == "int8":
        return weight.astype(np.float64) * scale[:, None]
    return int4(weight) * scale.repeat(8, axis=1)


def whole(form: str, parts, dtype: str, block=()) -> NDArray:
    return np.concatenate([a for _, a in forms.row_blocks(form, parts, dtype, block)])


NAMES = {"nvfp4-divided": "nvfp4", "int4-ordered": "int4"}
"""Variants of a layout, told by their components."""
LAYOUTS = ("dense", "nvfp4", "fp8", "fp8-block", "int8", "int4", "mxfp4", *NAMES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_rounded_once(layout: str) -> None:
    parts = stored(3, layout, 10, 48)
    block = (4, 8) if layout == "fp8-block" else ()
    exact = values(layout, parts)
    form = f"values-{NAMES.get(layout, layout)}"
    made = whole(form, parts, "bf16", block)
    assert made.dtype == BF16
    np.testing.assert_array_equal(made.view(np.uint16), bf16(exact))
    wide = whole(form, parts, "f32", block)
    np.testing.assert_array_equal(wide, exact.astype(np.float32))


def test_the_8_bit_form_of_nvfp4_loses_nothing() -> None:
    parts = stored(1, "nvfp4", 64, 512)
    parts["weight_scale"][0, 0] = np.array(448, F8)  # the largest and the smallest
    parts["weight_scale"][0, 1] = np.array(2.0**-9, F8)
    codes = whole("doubled", {"weight": parts["weight"]}, "i8")
    assert codes.dtype == np.int8
    np.testing.assert_array_equal(codes, 2 * e2m1(parts["weight"]))
    exact = e2m1(parts["weight"]) * e4m3(parts["weight_scale"]).repeat(16, axis=1)
    for dtype in ("bf16", "f16"):
        scale = whole("halved", {"weight_scale": parts["weight_scale"]}, dtype)
        assert scale.dtype == forms.NUMPY[dtype]
        product = codes.astype(np.float64) * scale.astype(np.float64).repeat(16, axis=1)
        np.testing.assert_array_equal(product, exact)
        np.testing.assert_array_equal(product.astype(BF16).astype(np.float64), exact)


def test_4_bit_integers_lie_two_columns_a_byte() -> None:
    parts = stored(2, "int4", 12, 48)
    packed = whole("int4", {"weight": parts["weight"]}, "i4")
    assert packed.shape == (12, 24)
    assert forms.shape_of("int4", {"weight": parts["weight"]}, "i4") == (12, 48)
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(12, 48).astype(int)
    np.testing.assert_array_equal((nibbles ^ 8) - 8, int4(parts["weight"]))
    with pytest.raises(ValueError, match="3 columns cannot lie two a byte"):
        forms.shape_of("int4", {"weight": parts["weight"][:, :3]}, "i4")
    with pytest.raises(ValueError, match="stored in another order"):
        forms.shape_of("stored", {"weight": parts["weight"]}, "i4")


def test_factors() -> None:
    scale = np.arange(5, dtype=np.float32)
    assert whole("factor", {"weight_scale_2": np.array(3, np.float32)}, "f32").shape == (1, 1)
    np.testing.assert_array_equal(whole("factor", {"weight_scale": scale}, "f32"), scale[None])
    np.testing.assert_array_equal(
        whole("factor", {"weight_scale": scale.astype(BF16)}, "f32"), scale[None]
    )


def test_divisors_and_scales_of_16_bits() -> None:
    divisor = np.array(3000, np.float32)
    made = whole("reciprocal", {"weight_global_scale": divisor}, "f32")
    assert made.tolist() == [[np.float32(1) / np.float32(3000)]]
    scales = np.array([[0.1, 2], [3, 4]], np.float16)
    wide = whole("widened", {"weight_scale": scales}, "f32")
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(wide, scales.astype(np.float64))


def test_stored_elements_are_those_of_the_file() -> None:
    packed = np.arange(32, dtype=np.uint8).reshape(2, 16)
    assert forms.shape_of("stored", {"weight": packed}, "f4e2m1") == (2, 32)
    assert whole("stored", {"weight": packed}, "f4e2m1").tobytes() == packed.tobytes()


@given(
    st.sampled_from(LAYOUTS), st.integers(1, 9), st.integers(1, 3), st.integers(1, 2000), st.data()
)
def test_blocks_of_rows_are_the_whole(layout, rows, width, size, data) -> None:
    """Whatever the size of blocks, also where several rows lie together in the file."""
    rows = 2 * rows if layout.startswith("int4") else rows
    parts = stored(rows, layout, rows, 16 * width)
    form, dtype = f"values-{NAMES.get(layout, layout)}", "bf16"
    block = (4, 8) if layout == "fp8-block" else ()
    if layout == "nvfp4":
        form = data.draw(st.sampled_from([form, "doubled", "halved"]))
        chosen = {"doubled": ["weight"], "halved": ["weight_scale"]}.get(form, list(parts))
        parts, dtype = {n: parts[n] for n in chosen}, "i8" if form == "doubled" else "bf16"
    want = whole(form, parts, dtype, block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms, "BLOCK_BYTES", size)
        found = list(forms.row_blocks(form, parts, dtype, block))
    assert [start for start, _ in found] == np.cumsum([0] + [len(a) for _, a in found])[
        :-1
    ].tolist()
    assert np.concatenate([a for _, a in found]).tobytes() == want.tobytes()
    assert want.shape == forms.shape_of(form, parts, dtype, block)


BAD = {
    "no component": ("doubled", {}, "i8", ()),
    "two components": ("doubled", {"a": np.zeros((2, 2), np.uint8), "b": np.zeros(1)}, "i8", ()),
    "another component": ("values-dense", {"scale": np.zeros((2, 2), np.float32)}, "bf16", ()),
    "codes that are no bytes": ("doubled", {"weight": np.zeros((2, 2), np.int8)}, "i8", ()),
    "a vector of codes": ("doubled", {"weight": np.zeros(4, np.uint8)}, "i8", ()),
    "scales that are no fp8": ("halved", {"s": np.zeros((2, 2), np.float32)}, "bf16", ()),
    "a type it has not": ("halved", {"s": np.zeros((2, 2), F8)}, "f32", ()),
    "elements of another type": ("stored", {"weight": np.zeros(4, np.int8)}, "f32", ()),
    "a matrix of factors": ("factor", {"s": np.zeros((2, 2), np.float32)}, "f32", ()),
    "integer factors": ("factor", {"s": np.zeros(2, np.int64)}, "f32", ()),
    "blocks of a form without": ("values-dense", stored(0, "dense", 2, 2), "bf16", (4, 8)),
    "no blocks": ("values-fp8-block", stored(0, "fp8-block", 8, 16), "bf16", ()),
    "other blocks": ("values-fp8-block", stored(0, "fp8-block", 8, 16), "bf16", (2, 8)),
    "two global scales": (
        "values-nvfp4",
        {**stored(0, "nvfp4", 8, 32), "weight_global_scale": np.ones((), np.float32)},
        "bf16",
        (),
    ),
    "a group that is not there": (
        "values-int4",
        {**stored(0, "int4-ordered", 8, 32), "group_index": np.full(32, 4, np.int32)},
        "bf16",
        (),
    ),
    "few zero points": (
        "values-int4",
        {**stored(0, "int4-ordered", 8, 32), "weight_zero_point": np.zeros((8, 3), np.int8)},
        "bf16",
        (),
    ),
    "few scales of mxfp4": (
        "values-mxfp4",
        {**stored(0, "mxfp4", 8, 32), "weight_scale": np.zeros((7, 2), np.uint8).view(E8)},
        "bf16",
        (),
    ),
    "few scales": (
        "values-nvfp4",
        {**stored(0, "nvfp4", 8, 32), "weight_scale": np.zeros((8, 1), F8)},
        "bf16",
        (),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_components_that_do_not_fit(case: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (the message differs by form)
        forms.shape_of(*BAD[case])
