from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from edgecc import fp8, integers, nvfp4
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.ir import (
    FP8,
    NVFP4,
    Dense,
    DType,
    Encoding,
    Int4,
    Int8,
    Stored,
    StoredPart,
    WeightTable,
)
from edgecc.ir.encodings import Array
from edgecc.ir.weights import Inline, Weight
from helpers.weights import E2M1, dense, inline, sample

F8 = ml_dtypes.float8_e4m3fn
DATA = Path(__file__).parents[1] / "data"

ENCODINGS: tuple[Encoding, ...] = (
    NVFP4(16),
    NVFP4(4),
    FP8("tensor"),
    FP8("channel"),
    FP8("block", (4, 8)),
    Int8(),
    Int4(8),
)


def quantized(values: Array, encoding: Encoding, *siblings: Array) -> WeightTable:
    """A table with `w` and `q`, which is `w` quantized together with its siblings."""
    table = WeightTable()
    table.add("w", dense(values, DType.of(values.dtype)))
    for i, other in enumerate(siblings):
        table.add(f"s{i}", dense(other))
    inputs = ("w", *(f"s{i}" for i in range(len(siblings))))
    table.derive("q", "quantize", inputs, encoding=str(encoding))
    return table


def rows_of(parts: dict[str, Array], name: str) -> list[str]:
    """Bytes of each row, in hex."""
    return [row.tobytes().hex() for row in parts[name]]


# What ModelOpt 0.47 wrote

INPUT_A = np.zeros((2, 16), np.float32)
INPUT_A[0] = [0, 0.25, -0.25, 0.5, -0.75, 1, -1.25, 1.5, -1.75, 2, -2.5, 3, -3.5, 4, -5, 6]
_I = np.arange(32)
INPUT_B = np.array(
    [((37 * _I + 11) % 97 - 48) / 64, ((53 * _I + 5) % 89 - 44) / 1024], dtype=np.float32
)


def test_nvfp4_golden_with_every_tie_and_a_block_of_zeros():
    parts = quantized(INPUT_A, NVFP4()).read("q")
    assert rows_of(parts, "weight") == ["00182a3a4c5c6e7e", "0000000000000000"]
    assert rows_of(parts, "weight_scale") == ["7e", "38"]
    assert parts["weight_scale_2"].view(np.uint32) == 0x3B124925


def test_nvfp4_golden_of_mixed_magnitudes():
    parts = quantized(INPUT_B, NVFP4()).read("q")
    assert rows_of(parts, "weight") == [
        "0ed6f46a1ec7f4693db7e5604dafe672",
        "4f6df9d3a63f6e7ae2b5275e7ce1c517",
    ]
    assert rows_of(parts, "weight_scale") == ["7e7e", "5d5d"]
    assert parts["weight_scale_2"].view(np.uint32) == 0x398F3CF4


def test_fp8_golden():
    parts = quantized(INPUT_B, FP8()).read("q")
    assert rows_of(parts, "weight")[0] == (
        "fb007bf670feeb78fa647df373fce27af86c7eef76fb527bf571fdea79f9667d"
    )
    assert parts["weight_scale"].view(np.uint32) == 0x3AD6DB6E


def test_int4_golden():
    row, column = np.indices((4, 8))
    values = (((5 * column + 3 * row) % 16 - 8) / 8).astype(np.float32)
    parts = quantized(values, Int4(4)).read("q")
    assert rows_of(parts, "weight") == ["a90d6296fb4197ea", "1e73a90d6297fc51"]
    one, three_quarters = np.float32(1) / np.float32(7), np.float32(0.75) / np.float32(7)
    assert parts["weight_scale"].tolist() == [
        [one, three_quarters],
        [three_quarters, 0.125],
        [one, 0.125],
        [three_quarters, three_quarters],
    ]


def test_nvfp4_of_a_trained_matrix_is_what_modelopt_exported():
    """The bf16 matrix the NVFP4 test checkpoint was made from: 221,184 bytes, bit for bit."""
    name = "model.layers.0.mlp.down_proj"
    source = DATA / "reference" / "tiny-qwen3-bf16-down_proj.safetensors"
    with safe_open(source, "np") as file:
        values = file.get_tensor(f"{name}.weight")
    parts = quantized(values, NVFP4()).read("q")
    export = Checkpoint.open(DATA / "pairs" / "tiny-qwen3-nvfp4", role="target")
    for component, array in parts.items():
        assert array.tobytes() == export.read(f"{name}.{component}").tobytes(), component
    export.close()


# Against formulas in float64


def grid(encoding: Encoding) -> Array:
    """All values a code can have, before scaling."""
    if isinstance(encoding, NVFP4):
        return np.unique([*E2M1, *(-v for v in E2M1)])
    if isinstance(encoding, FP8):
        numbers = np.arange(256, dtype=np.uint8).view(F8).astype(np.float64)
        return np.unique(numbers[np.isfinite(numbers)])
    return np.arange(-8, 8) if isinstance(encoding, Int4) else np.arange(-128, 128)


def factors(encoding: Encoding, parts: dict[str, Array], shape: tuple[int, int]) -> Array:
    """The float32 factor of each element, by index arithmetic."""
    row, column = np.indices(shape)
    scale = parts["weight_scale"].astype(np.float64)
    if isinstance(encoding, NVFP4):
        scale = (scale * np.float64(parts["weight_scale_2"])).astype(np.float32)
        return scale[row, column // encoding.block].astype(np.float64)
    if isinstance(encoding, Int4):
        return scale[row, column // encoding.group]
    if isinstance(encoding, FP8) and encoding.scaling == "block":
        return scale[row // encoding.block[0], column // encoding.block[1]]
    return scale[row] if scale.ndim else np.broadcast_to(scale, shape)


def values_of(seed: int, rows: int, columns: int) -> Array:
    """Normal deviates with blocks of zeros, outliers and very small numbers."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-4, 2)
    values[rng.random((rows, columns)) < 0.1] *= 30
    values[:, 8:16] *= rng.choice([0, 1e-6, 1])
    return values.astype(np.float32)


@given(seed=st.integers(0, 1 << 32), encoding=st.sampled_from(ENCODINGS))
def test_every_value_is_rounded_to_the_nearest_code(seed, encoding):
    """No code of the grid is nearer than the one chosen, given the stored scale."""
    values = values_of(seed, 6, 32)
    parts = quantized(values, encoding).read("q")
    steps = factors(encoding, parts, values.shape)
    found = encoding.dequantize(parts).astype(np.float64)
    best = np.min(np.abs(grid(encoding) * steps[..., None] - values[..., None]), axis=-1)
    slack = 1e-6 * np.abs(values)  # float32 quotients may fall on the other side of a tie
    assert np.all(np.abs(found - values) <= best + slack)


@given(seed=st.integers(0, 1 << 32), encoding=st.sampled_from(ENCODINGS))
def test_scales_use_the_whole_range(seed, encoding):
    """Nothing saturates, and the largest magnitude of each scaled group has the largest code."""
    values = values_of(seed, 6, 32)
    values[:, 8:16] = values[:, :8]  # blocks of extreme scales are another test
    parts = quantized(values, encoding).read("q")
    top = {NVFP4: 6, FP8: 448, Int8: 127, Int4: 7}[type(encoding)]
    limit = top * factors(encoding, parts, values.shape)
    tolerance = 1 / 16 if isinstance(encoding, NVFP4) else 1e-6  # block scales are E4M3
    assert np.all(np.abs(values) <= limit * (1 + tolerance))
    found = np.abs(encoding.dequantize(parts))
    assert np.isclose(np.max(found), np.max(np.abs(values)), rtol=tolerance, atol=0)


@given(
    seed=st.integers(0, 1 << 32),
    encoding=st.sampled_from(ENCODINGS),
    cut=st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted),
)
def test_rows_do_not_depend_on_the_block_they_are_read_in(seed, encoding, cut):
    table = quantized(values_of(seed, 12, 32), encoding)
    whole = table.read("q")
    group = encoding.row_group((12, 32))
    low, high = (group * (edge // group) for edge in cut)
    some = table.read("q", low, high)
    for name, component in encoding.components((12, 32)).items():
        expected = whole[name][slice(*component.cut(low, high))] if component.rows else whole[name]
        assert some[name].tobytes() == expected.tobytes()
    assert table.dense("q", *cut).tobytes() == encoding.dequantize(whole)[slice(*cut)].tobytes()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_components_are_as_declared(encoding):
    parts = quantized(values_of(0, 6, 32), encoding).read("q")
    components = encoding.components((6, 32))
    assert list(parts) == list(components)
    for name, component in components.items():
        assert parts[name].dtype == component.dtype.numpy
        assert parts[name].shape == component.shape


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_zeros_stay_zeros(encoding):
    zeros = np.zeros((4, 32), np.float32)
    zeros[1, 3] = -0.0
    parts = quantized(zeros, encoding).read("q")
    assert not encoding.dequantize(parts).any()
    for name in parts.keys() - {"weight"}:
        assert np.all(parts[name].astype(np.float32) == 1), name
    values = values_of(1, 4, 32)
    values[1] = 0
    assert not encoding.dequantize(quantized(values, encoding).read("q"))[1].any()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_extreme_magnitudes_stay_finite(encoding, size):
    values = (np.linspace(-1, 1, 4 * 32) * size).reshape(4, 32).astype(np.float32)
    parts = quantized(values, encoding).read("q")
    for name in parts.keys() - {"weight"}:
        scales = parts[name].astype(np.float64)
        assert np.all(np.isfinite(scales) & (scales > 0)), name
    found = encoding.dequantize(parts)
    assert np.all(np.isfinite(found))
    if size > 1e-37:
        assert np.max(np.abs(found - values)) <= 0.2 * size


# One scale for several weights


@pytest.mark.parametrize("encoding", [NVFP4(16), FP8("tensor")], ids=str)
def test_siblings_share_the_scale_of_the_largest(encoding):
    small, large = values_of(1, 4, 32), 10 * values_of(2, 8, 32)
    table = quantized(small, encoding, large)
    table.derive("q2", "quantize", ("s0", "w"), encoding=str(encoding))
    scalar = next(n for n, c in encoding.components((4, 32)).items() if not c.rows)
    alone = quantized(large, encoding).read("q")[scalar]
    assert (
        table.read("q")[scalar].tobytes() == alone.tobytes() == table.read("q2")[scalar].tobytes()
    )
    assert alone != quantized(small, encoding).read("q")[scalar]
    table.derive("both", "concat_rows", ("q", "q2"))
    expected = np.concatenate([table.dense("q"), table.dense("q2")])
    assert table.dense("both").tobytes() == expected.tobytes()


class CountingReader:
    """A checkpoint that counts the rows that are read."""

    def __init__(self, values: Array) -> None:
        self.values = values
        self.rows = 0
        self.largest = 0

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> Array:
        block = self.values[start:stop]
        self.rows += len(block)
        self.largest = max(self.largest, len(block))
        return block


@pytest.mark.parametrize(("encoding", "passes"), [(NVFP4(16), 2), (Int8(), 1), (Int4(8), 1)])
def test_a_weight_is_read_once_for_its_scale_and_once_for_its_codes(encoding, passes):
    """However many blocks: quantizing streams, and remembers the largest magnitude."""
    rows = 4096
    reader = CountingReader(np.ones((rows, 1024), np.float32))
    table = WeightTable()
    table.readers["target"] = reader
    source = Stored("target", (StoredPart("weight", "f", "w"),))
    table.add("w", Weight((rows, 1024), Dense(DType.F32), source))
    table.derive("q", "quantize", ("w",), encoding=str(encoding))
    assert reader.rows == 0
    for _ in table.row_blocks("q", 1 << 20):
        pass
    assert reader.rows == passes * rows
    assert reader.largest <= rows // 2
    again = table.copy()
    assert again.absolute_maximum("w") == 1
    assert reader.rows <= passes * rows + (rows if passes == 1 else 0)


def test_the_largest_magnitude_follows_the_weight():
    """A rebound symbol is another weight: what was remembered does not count for it."""
    table = WeightTable()
    table.add("w", dense(np.array([[1.0, -3.0]])))
    assert table.absolute_maximum("w") == 3
    table.rebind("w", dense(np.array([[5.0, 0.0]])))
    assert table.absolute_maximum("w") == 5
    table.add("none", dense(np.zeros((0, 4))))
    assert table.absolute_maximum("none") == 0
    table.alias("none", "w")
    assert table.absolute_maximum("none") == 5


# What cannot be quantized


@pytest.mark.parametrize(
    ("weight", "params", "message"),
    [
        (dense(np.ones((4, 16))), {}, "takes the parameter encoding"),
        (dense(np.ones((4, 16))), {"encoding": "nvfp5"}, "unknown encoding"),
        (dense(np.ones((4, 16))), {"encoding": "dense<f16>"}, "cannot be quantized to dense<f16>"),
        (dense(np.ones((4, 16))), {"encoding": "int8_block<block=16>"}, "cannot be quantized to"),
        (dense(np.ones((4, 16))), {"encoding": "fp8<tensor, input_scale>"}, "cannot be quantized"),
        (dense(np.ones((4, 16))), {"encoding": "int8<channel, scale=bf16>"}, "cannot be quantize"),
        (dense(np.ones((4, 12))), {"encoding": "nvfp4<block=16>"}, "K even and a multiple of 16"),
        (dense(np.ones((3, 16))), {"encoding": "int4<group=16>"}, "N a multiple of 2"),
        (dense(np.ones(16)), {"encoding": "int8<channel>"}, r"needs a \[N, K\] weight"),
        (dense(np.ones((4, 16), int)), {"encoding": "int8<channel>"}, "floating-point values"),
    ],
)
def test_quantize_refuses(weight, params, message):
    table = WeightTable()
    table.add("w", weight)
    with pytest.raises(ValueError, match=message):
        table.derive("q", "quantize", ("w",), **params)


def test_only_global_scales_are_shared():
    table = WeightTable()
    for name in "ab":
        table.add(name, dense(np.ones((4, 16))))
    with pytest.raises(ValueError, match=r"int8<channel> has no scale that 2 weights could share"):
        table.derive("q", "quantize", ("a", "b"), encoding="int8<channel>")


# The arithmetic itself


def test_nvfp4_rounds_half_to_the_even_mantissa():
    """Every midpoint of two codes, and its neighbours, with scale 1."""
    magnitudes = np.array(E2M1)
    middles = (magnitudes[:-1] + magnitudes[1:]) / 2
    expected = [0, 2, 2, 4, 4, 6, 6]
    for middle, code in zip(middles, expected, strict=True):
        for sign in (1, -1):
            row = np.zeros((1, 16), np.float32)
            single, zero = np.float32(middle), np.float32(0)
            more, less = np.nextafter(single, np.float32(9)), np.nextafter(single, zero)
            row[0, :4] = [sign * middle, more, less, 6]
            packed, scale = nvfp4.quantize(row, np.float32(1 / 448))
            assert scale.view(np.uint8) == 0x7E
            codes = nvfp4.unpack_e2m1(packed)[0]
            above = magnitudes[np.searchsorted(magnitudes, middle)]
            below = magnitudes[np.searchsorted(magnitudes, middle) - 1]
            assert codes[:4].tolist() == [sign * magnitudes[code], above, below, 6]


def test_fp8_saturates():
    values = np.array([[1000.0, -1000.0, 449.0]], np.float32)
    found = fp8.quantize(values, np.array(1, np.float32))
    assert found.astype(float).tolist() == [[448, -448, 448]]


@given(seed=st.integers(0, 999), rows=st.integers(0, 4), columns=st.integers(0, 9))
def test_int4_packing_is_undone(seed, rows, columns):
    codes = np.random.default_rng(seed).integers(-8, 8, (2 * rows, columns)).astype(np.int8)
    packed = (codes[0::2] & 15).astype(np.uint8) | (codes[1::2] & 15).astype(np.uint8) << 4
    assert np.array_equal(integers.unpack_int4(packed), codes)


@given(seed=st.integers(0, 999), encoding=st.sampled_from(ENCODINGS))
def test_values_of_the_format_come_back(seed, encoding):
    """What is representable stays: quantizing the values of a quantized weight changes none."""
    made = sample(np.random.default_rng(seed), encoding, 8, 32)
    assert isinstance(made.weight.source, Inline)
    once = quantized(made.values.astype(np.float32), encoding)
    twice = quantized(once.dense("q"), encoding)
    found, expected = twice.dense("q"), once.dense("q")
    close = np.isclose(found, expected, rtol=2e-6, atol=0)
    assert close.all()
    assert inline(made.shape, encoding, once.read("q")).nbytes == made.weight.nbytes
