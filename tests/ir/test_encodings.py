from __future__ import annotations

import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import InternalError
from edgecc.ir import FP8, NVFP4, Dense, DType, Int4, Int8, Int8Block, Module, WeightTable
from edgecc.ir.encodings import Array
from helpers.weights import SMALL_ENCODINGS, MemoryReader, Packed, Sample, sample, store

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


# every encoding


@given(
    seed=st.integers(0, 1 << 32),
    encoding=st.sampled_from(SMALL_ENCODINGS),
    rows=st.integers(0, 5).map(lambda n: 2 * n),
    columns=st.integers(1, 3).map(lambda n: 8 * n),
)
def test_values(seed, encoding, rows, columns):
    """Against products in float64, for shapes whose last blocks are partial as well."""
    made = sample(np.random.default_rng(seed), encoding, rows, columns)
    components = encoding.components((rows, columns))
    assert {n: (c.dtype.numpy, c.shape) for n, c in components.items()} == {
        n: (a.dtype, a.shape) for n, a in made.parts.items()
    }
    assert encoding.nbytes((rows, columns)) == sum(a.nbytes for a in made.parts.values())
    found = encoding.dequantize(made.parts)
    assert found.dtype == np.float32
    assert np.array_equal(found, made.values)


def stored_table(made: Sample) -> WeightTable:
    module = Module("m")
    store(module, "target", "w", made.weight)
    return module.weights


@given(
    seed=st.integers(0, 99),
    encoding=st.sampled_from(SMALL_ENCODINGS),
    cut=st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted),
    kept=st.booleans(),
)
def test_a_block_of_rows_has_the_values_of_those_rows(seed, encoding, cut, kept):
    """Any range, from a file or from bytes in the module: row groups are no business of readers."""
    made = sample(np.random.default_rng(seed), encoding, 12, 8)
    table = stored_table(made)
    if kept:
        table.rebind("w", made.weight)
    low, high = cut
    assert np.array_equal(table.dense("w", low, high), made.values[low:high])


@given(
    seed=st.integers(0, 99),
    encoding=st.sampled_from(SMALL_ENCODINGS),
    rows=st.integers(0, 7).map(lambda n: 2 * n),
    block_bytes=st.sampled_from([1, 100, 200, 10_000]),
)
def test_row_blocks_are_the_whole_weight(seed, encoding, rows, block_bytes):
    """Joined, the blocks are the components, and each block has the values of its rows."""
    made = sample(np.random.default_rng(seed), encoding, rows, 8)
    table = stored_table(made)
    joined: dict[str, list[Array]] = {n: [a[:0]] for n, a in made.parts.items() if a.shape}
    end = 0
    for start, stop, parts in table.row_blocks("w", block_bytes):
        assert start == end
        end = stop
        assert np.array_equal(encoding.dequantize(parts), made.values[start:stop])
        for name in joined:
            joined[name].append(parts[name])
    assert end == rows
    for name, blocks in joined.items():
        if encoding.components((rows, 8))[name].rows:
            assert np.concatenate(blocks).tobytes() == made.parts[name].tobytes()


@pytest.mark.parametrize(("encoding", "start"), [(Int4(4), 1), (FP8("block", (4, 4)), 6)])
def test_reading_starts_at_a_row_group(encoding, start):
    table = stored_table(sample(np.random.default_rng(0), encoding, 12, 8))
    with pytest.raises(InternalError, match=r"groups of \d rows, not from"):
        table.read("w", start)


def test_only_the_rows_asked_for_are_read():
    made = sample(np.random.default_rng(0), FP8("block", (4, 4)), 10, 8)
    parts = stored_table(made).read("w", 4, 5)
    assert {n: a.shape for n, a in parts.items()} == {"weight": (4, 8), "weight_scale": (1, 2)}
    last = stored_table(made).read("w", 8)
    assert {n: a.shape for n, a in last.items()} == {"weight": (2, 8), "weight_scale": (1, 2)}


@pytest.mark.parametrize(
    ("encoding", "shape"),
    [
        (FP8("channel"), (6, 1)),
        (FP8("block", (4, 4)), (2, 1, 2, 1)),
        (FP8("tensor"), (1,)),
        (Int8(), (6, 1)),
    ],
)
def test_scales_may_be_stored_with_axes_of_size_one(encoding, shape):
    made = sample(np.random.default_rng(0), encoding, 6, 8)
    table = stored_table(made)
    reader = table.readers["target"]
    assert isinstance(reader, MemoryReader)
    reader.tensors["w.weight_scale"] = reader.tensors["w.weight_scale"].reshape(shape)
    assert np.array_equal(table.dense("w", 4, 6), made.values[4:6])
    assert np.array_equal(table.dense("w"), made.values)


@given(
    seed=st.integers(0, 99),
    encoding=st.sampled_from(SMALL_ENCODINGS),
    counts=st.lists(st.sampled_from([2, 4, 12]), min_size=1, max_size=3),
    cut=st.tuples(st.integers(0, 36), st.integers(0, 36)).map(sorted),
)
def test_stacking(seed, encoding, counts, cut):
    """`concat_rows` of any encoding, or the reason why a group of rows would be torn apart."""
    rng = np.random.default_rng(seed)
    made = [sample(rng, encoding, rows, 8) for rows in counts]
    table = WeightTable()
    for i, part in enumerate(made):
        table.add(f"w{i}", part.weight)
    symbols = tuple(table)
    group = encoding.row_group((2, 8))
    if any(rows % group for rows in counts[:-1]):
        with pytest.raises(ValueError, match=f"stores {group} rows together"):
            table.derive("all", "concat_rows", symbols)
        return
    table.derive("all", "concat_rows", symbols)
    scalars = [n for n, c in encoding.components((2, 8)).items() if not c.rows]
    if all(made[0].parts[n].tobytes() == m.parts[n].tobytes() for n in scalars for m in made):
        low, high = cut
        expected = np.concatenate([m.values for m in made])[low:high]
        assert np.array_equal(table.dense("all", low, high), expected)


# components and shapes


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


def test_fp8_components():
    shapes = {
        FP8("tensor"): (),
        FP8("channel"): (200,),
        FP8("block"): (2, 3),
        FP8("block", (200, 1)): (1, 300),
    }
    for encoding, shape in shapes.items():
        parts = encoding.components((200, 300))
        assert (parts["weight"].dtype, parts["weight"].shape) == (DType.F8E4M3, (200, 300))
        scale = parts["weight_scale"]
        assert (scale.dtype, scale.shape) == (DType.F32, shape)
        assert scale.rows is (shape != ())
    assert FP8("block").row_group((200, 300)) == 128
    assert FP8("channel").row_group((200, 300)) == 1
    more = FP8(input_scale=True, scale_dtype=DType.BF16).components((2, 2))
    assert [(n, c.dtype, c.shape) for n, c in more.items()][1:] == [
        ("weight_scale", DType.BF16, ()),
        ("input_scale", DType.BF16, ()),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FP8("row"), "scaling must be one of"),
        (lambda: FP8("tensor", (64, 64)), "scaling tensor has no block"),
        (lambda: FP8("block", (0, 64)), "block must be positive, found 0"),
        (lambda: FP8(scale_dtype=DType.I8), "scales cannot be i8"),
        (lambda: Int8(DType.F8E4M3), "scales cannot be f8e4m3"),
        (lambda: Int4(0), "group must be positive, found 0"),
    ],
)
def test_encodings_refuse_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("encoding", "shape", "message"),
    [
        (FP8(), (4,), r"fp8 needs a \[N, K\] weight, found \[4\]"),
        (FP8("block"), (1, 2, 3), r"fp8 needs a \[N, K\] weight, found"),
        (Int8(), (), r"int8 needs a \[N, K\] weight, found \[\]"),
        (Int4(8), (3, 8), r"int4 needs .* with N a multiple of 2 and K a multiple of 8"),
        (Int4(8), (4, 12), r"found \[4, 12\]"),
    ],
)
def test_encodings_refuse_shapes(encoding, shape, message):
    with pytest.raises(ValueError, match=message):
        encoding.components(shape)


def golden_b() -> Array:
    """The input of ModelOpt's FP8 golden, f32 `[2, 32]`."""
    i = np.arange(32)
    rows = [((37 * i + 11) % 97 - 48) / 64, ((53 * i + 5) % 89 - 44) / 1024]
    return np.array(rows, np.float32)


def test_fp8_golden():
    """Bytes and scale of ModelOpt 0.47 (row 0); its values are within half a step of the input."""
    row = "fb007bf670feeb78fa647df373fce27af86c7eef76fb527bf571fdea79f9667d"
    parts = {
        "weight": np.frombuffer(bytes.fromhex(row), F8)[None],
        "weight_scale": np.array(floats("3ad6db6e")[0], np.float32),
    }
    found = FP8().dequantize(parts)
    assert found[0, 0] == np.float32(-352) * np.float32(0.0016392299439758062)
    assert np.max(np.abs(found[0] - golden_b()[0]) / np.maximum(np.abs(found[0]), 0.01)) < 1 / 16


def test_int4_golden():
    """Bytes and scales of ModelOpt 0.47: row 2r is in the low nibbles."""
    packed_rows = ["a90d6296fb4197ea", "1e73a90d6297fc51"]
    scale = [[1 / 7, 0.75 / 7], [0.75 / 7, 0.125], [1 / 7, 0.125], [0.75 / 7, 0.75 / 7]]
    parts = {
        "weight": np.array([list(bytes.fromhex(r)) for r in packed_rows], np.uint8),
        "weight_scale": np.array(scale, np.float32),
    }
    found = Int4(4).dequantize(parts)
    row, column = np.indices((4, 8))
    expected = ((5 * column + 3 * row) % 16 - 8) / 8
    assert found[0, 0] == np.float32(-7) * np.float32(1 / 7)
    assert found[1, 0] == np.float32(-6) * np.float32(0.75 / 7)
    steps = np.repeat(np.array(scale), 4, axis=1)
    assert np.all(np.abs(found - expected) <= steps * (0.5 + 1e-6))


def test_spelling_and_equality():
    spelled = {
        Dense(DType.BF16): "dense<bf16>",
        NVFP4(): "nvfp4<block=16>",
        NVFP4(32, input_scale=True): "nvfp4<block=32, input_scale>",
        Int8Block(): "int8_block<block=16>",
        FP8(): "fp8<tensor>",
        FP8("channel", scale_dtype=DType.BF16): "fp8<channel, scale=bf16>",
        FP8("block", input_scale=True): "fp8<block=128x128, input_scale>",
        Int8(): "int8<channel>",
        Int8(DType.BF16): "int8<channel, scale=bf16>",
        Int4(): "int4<group=128>",
    }
    assert {e: str(e) for e in spelled} == spelled
    assert NVFP4(16) == NVFP4()
    assert NVFP4() != Int8Block()
    kinds = ["dense", "nvfp4", "nvfp4", "int8_block", "fp8", "fp8", "fp8", "int8", "int8", "int4"]
    assert [e.kind for e in spelled] == kinds
