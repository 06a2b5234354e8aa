from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import NVFP4, Dense, DType, Int8Block
from edgecc.ir.encodings import Array
from helpers.weights import Packed, packed

F8 = ml_dtypes.float8_e4m3fn


def floats(bits: str) -> list[float]:
    """Float32 values from their bits, big-endian hex."""
    return [struct.unpack(">f", bytes.fromhex(word))[0] for word in bits.split()]


def golden(packed_rows: list[str], scale_rows: list[str], scale_2: str) -> dict[str, Array]:
    return {
        "weight": np.array([list(bytes.fromhex(row)) for row in packed_rows], np.uint8),
        "weight_scale": np.array([list(bytes.fromhex(r)) for r in scale_rows], np.uint8).view(F8),
        "weight_scale_2": np.array(floats(scale_2)[0], np.float32),
    }


# What ModelOpt 0.47 stored for two inputs, and what it read back.
GOLDEN_A = (
    golden(["00182a3a4c5c6e7e", "0000000000000000"], ["7e", "38"], "3b124925"),
    [0, 0, 0, 0.5, -1, 1, -1, 1.5, -2, 2, -2, 3, -4, 4, -4, 6],
    [0.0] * 16,
)
GOLDEN_B = (
    golden(
        ["0ed6f46a1ec7f4693db7e5604dafe672", "4f6df9d3a63f6e7ae2b5275e7ce1c517"],
        ["7e7e", "5d5d"],
        "398f3cf4",
    ),
    floats(
        "befaaaab 00000000 3efaaaab bebc0000 3e7aaaab bf3c0000 bdfaaaab 3efaaaab befaaaab 3d7aaaab "
        "3f3c0000 be7aaaab 3e7aaaab bf3c0000 bd7aaaab 3efaaaab bebc0000 3e3c0000 3f3c0000 be3c0000 "
        "3ebc0000 befaaaab 00000000 3efaaaab bebc0000 3e7aaaab bf3c0000 bdfaaaab 3efaaaab befaaaab "
        "3dfaaaab 3f3c0000"
    ),
    floats(
        "bd2e9249 3c68c30c bcae9249 3ce8c30c bb68c30c bd2e9249 3c2e9249 bcae9249 3ce8c30c bbe8c30c "
        "bd2e9249 3c2e9249 bce8c30c 3ce8c30c bbe8c30c 3d2e9249 3be8c30c bce8c30c 3cae9249 bc2e9249 "
        "3d2e9249 3be8c30c bce8c30c 3cae9249 bc68c30c 3d2e9249 3b68c30c bce8c30c 3cae9249 bc68c30c "
        "3d2e9249 3b68c30c"
    ),
)


@pytest.mark.parametrize(("parts", "row0", "row1"), [GOLDEN_A, GOLDEN_B])
def test_nvfp4_goldens(parts, row0, row1):
    found = NVFP4().dequantize(parts)
    assert found.dtype == np.float32
    assert found.tobytes() == np.array([row0, row1], np.float32).tobytes()


def test_nvfp4_codes_and_their_order():
    """All 16 codes with scale 1: the low nibble comes first, minus zero reads as zero."""
    codes = np.arange(16, dtype=np.uint8)[None]
    made = Packed(codes, np.ones((1, 1), F8), np.float32(1))
    assert made.parts["weight"][0, 0] == 0x10
    found = NVFP4().dequantize(made.parts)[0]
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert found.tolist() == magnitudes + [-m for m in magnitudes]
    assert np.signbit(found).tolist() == [False] * 9 + [True] * 7


@given(seed=st.integers(0, 1 << 32), block=st.sampled_from([2, 4, 16]), blocks=st.integers(1, 3))
def test_nvfp4_values(seed, block, blocks):
    """Scales over the whole range of E4M3, both products rounded to float32 in this order."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (3, block * blocks), dtype=np.uint8)
    scale = rng.integers(0, 0x7F, (3, blocks), dtype=np.uint8).view(F8)
    made = Packed(codes, scale, np.float32(10.0 ** rng.uniform(-6, 2)), block)
    found = NVFP4(block).dequantize(made.parts)
    assert np.array_equal(found, made.values)


@given(
    seed=st.integers(0, 99),
    encoding=st.sampled_from([NVFP4(4), Int8Block(4), Dense(DType.BF16)]),
    cut=st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted),
)
def test_a_block_of_rows_has_the_values_of_those_rows(seed, encoding, cut):
    rng = np.random.default_rng(seed)
    parts = packed(rng, 5, 8).parts
    if isinstance(encoding, Int8Block):
        parts = {
            "weight": rng.integers(0, 256, (5, 8), dtype=np.uint8),
            "weight_scale": rng.uniform(0, 2, (5, 2)).astype(np.float32),
        }
    elif isinstance(encoding, Dense):
        parts = {"weight": rng.standard_normal((5, 8)).astype(ml_dtypes.bfloat16)}
    low, high = cut
    components = encoding.components((5, 8))
    some = {n: a[low:high] if components[n].rows else a for n, a in parts.items()}
    whole = encoding.dequantize(parts)
    assert encoding.dequantize(some).tobytes() == whole[low:high].tobytes()


def test_nvfp4_components():
    parts = NVFP4().components((6, 64))
    assert [(n, c.dtype, c.shape, c.rows) for n, c in parts.items()] == [
        ("weight", DType.U8, (6, 32), True),
        ("weight_scale", DType.F8E4M3, (6, 4), True),
        ("weight_scale_2", DType.F32, (), False),
    ]
    more = NVFP4(32, input_scale=True).components((6, 64))
    assert list(more) == [*parts, "input_scale"]
    assert (more["input_scale"].dtype, more["input_scale"].rows) == (DType.F32, False)
    assert more["weight_scale"].shape == (6, 2)
    assert NVFP4().nbytes((6, 64)) == 6 * 32 + 6 * 4 + 4
    assert NVFP4(input_scale=True).nbytes((6, 64)) == NVFP4().nbytes((6, 64)) + 4


@pytest.mark.parametrize("shape", [(64,), (6, 65), (6, 8), (2, 6, 16), ()])
def test_nvfp4_refuses_shapes(shape):
    with pytest.raises(ValueError, match=r"nvfp4 needs a \[N, K\] weight with K even and a mult"):
        NVFP4().components(shape)


def test_nvfp4_refuses_odd_blocks_that_give_odd_widths():
    with pytest.raises(ValueError, match=r"found \[2, 3\]"):
        NVFP4(3).components((2, 3))
    assert NVFP4(3).components((2, 6))["weight_scale"].shape == (2, 2)


def test_int8_block_components():
    parts = Int8Block(16).components((6, 64))
    assert [(n, c.dtype, c.shape, c.rows) for n, c in parts.items()] == [
        ("weight", DType.U8, (6, 64), True),
        ("weight_scale", DType.F32, (6, 4), True),
    ]
    assert Int8Block(16).nbytes((6, 64)) == 6 * 64 + 6 * 4 * 4


@pytest.mark.parametrize("shape", [(64,), (6, 24), (1, 1, 16)])
def test_int8_block_refuses_shapes(shape):
    with pytest.raises(ValueError, match=r"int8_block needs a \[N, K\] weight with K a multiple"):
        Int8Block(16).components(shape)


@pytest.mark.parametrize("block", [0, -4])
@pytest.mark.parametrize("encoding", [NVFP4, Int8Block])
def test_blocks_are_positive(encoding, block):
    with pytest.raises(ValueError, match=f"block must be positive, found {block}"):
        encoding(block)


def test_int8_block_values():
    parts = {
        "weight": np.array([[0, 128, 255, 129]], np.uint8),
        "weight_scale": np.array([[0.5, 2.0]], np.float32),
    }
    found = Int8Block(2).dequantize(parts)
    assert found.dtype == np.float32
    assert found.tolist() == [[-64, 0, 254, 2]]


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_float])
def test_dense_floats_widen_exactly(dtype):
    bits = np.arange(1 << min(dtype.bits, 8), dtype=np.uint8)
    if dtype.bits <= 8:
        stored = bits.astype(np.uint8).view(dtype.numpy)
    else:
        stored = np.random.default_rng(0).standard_normal(64).astype(dtype.numpy)
    found = Dense(dtype).dequantize({"weight": stored})
    assert found.dtype == (np.float64 if dtype is DType.F64 else np.float32)
    expected = np.array([float(v) for v in stored])
    assert np.array_equal(found.astype(np.float64), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.bool_])
def test_dense_integers_stay(dtype):
    stored = np.array([0, 1, 1], dtype)
    found = Dense(DType.of(np.dtype(dtype))).dequantize({"weight": stored})
    assert found.dtype == dtype
    assert np.array_equal(found, stored)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 5)])
def test_dense_components(shape):
    (part,) = Dense(DType.BF16).components(shape).values()
    assert (part.dtype, part.shape, part.rows) == (DType.BF16, shape, shape != ())
    assert Dense(DType.BF16).nbytes(shape) == 2 * int(np.prod(shape))


def test_spelling_and_equality():
    spelled = {
        Dense(DType.BF16): "dense<bf16>",
        NVFP4(): "nvfp4<block=16>",
        NVFP4(32, input_scale=True): "nvfp4<block=32, input_scale>",
        Int8Block(): "int8_block<block=16>",
    }
    assert {e: str(e) for e in spelled} == spelled
    assert NVFP4(16) == NVFP4()
    assert NVFP4() != Int8Block()
    assert [e.kind for e in spelled] == ["dense", "nvfp4", "nvfp4", "int8_block"]
