"""Stand-ins of large weights: valid, repeated, equal where the weights are, and cheap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Dense, DType, Encoding, Inline, Module, Stored, StoredPart, Weight
from edgecc.ir.encodings import parse_encoding
from edgecc.ir.ops.base import WeightView
from edgecc.ir.ops.matmul import product
from edgecc.ir.random_weights import random_parts
from edgecc.ir.sampled_weights import TILE_ROWS, SampledWeights
from helpers.weights import MemoryReader, dense, packed, store

DENSE = ("f32", "bf16", "f16", "f8e4m3", "f8e8m0", "i8", "u8", "bool")
ENCODINGS = (
    *(Dense(DType(name)) for name in DENSE),
    *map(
        parse_encoding,
        (
            "nvfp4<block=16>",
            "nvfp4<block=16, input_scale>",
            "int8_block<block=16>",
            "int8<channel>",
            "int4<group=16>",
            "fp8<tensor>",
            "fp8<channel>",
            "fp8<block=4x16>",
        ),
    ),
)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("shape", [(40, 64), (4, 16)])
def test_random_parts_are_valid_and_sane(encoding: Encoding, shape: tuple[int, int]) -> None:
    parts = random_parts(np.random.default_rng(0), shape, encoding)
    components = encoding.components(shape)
    assert {n: (a.dtype, a.shape) for n, a in parts.items()} == {
        n: (c.dtype.numpy, c.shape) for n, c in components.items()
    }
    values = encoding.dequantize(parts).astype(float)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 1
    for name, array in parts.items():
        if "scale" in name:
            assert (array.astype(float) > 0).all()
    if not isinstance(encoding, Dense) or encoding.dtype in (DType.F32, DType.BF16, DType.F16):
        assert 0.5 < np.sqrt(np.mean(values**2)) * shape[1] ** 0.5 < 2


def large(module: Module, checkpoint: str, name: str, rows: int = 100, seed: int = 0) -> str:
    made = packed(np.random.default_rng(seed), rows, 32, block=16).weight
    return store(module, checkpoint, name, made)


def test_large_weights_are_not_read_but_for_their_scalars() -> None:
    module = Module("m")
    large(module, "target", "w")
    small = store(module, "target", "small", dense(np.arange(4.0), DType.F32))
    reader = module.weights.readers["target"]
    assert isinstance(reader, MemoryReader)
    table = SampledWeights(module.weights, limit=64)
    values = table.dense("w")
    assert values.shape == (100, 32)
    assert reader.reads == ["w.weight_scale_2"]
    np.testing.assert_array_equal(table.dense(small), np.arange(4.0))
    np.testing.assert_array_equal(values[TILE_ROWS:], values[: 100 - TILE_ROWS])
    assert not np.array_equal(values[0], values[1])
    np.testing.assert_array_equal(table.dense("w", 40, 45), values[40:45])


def test_equal_weights_stay_equal_by_hash_and_others_differ() -> None:
    module = Module("m")
    large(module, "target", "a")
    large(module, "draft", "b")
    large(module, "draft", "c", seed=1)
    before = SampledWeights(module.weights, limit=64)
    assert not np.array_equal(before.dense("a"), before.dense("b"))
    assert module.weights.digest("a") == module.weights.digest("b") != module.weights.digest("c")
    table = SampledWeights(module.weights, limit=64)
    np.testing.assert_array_equal(table.dense("a"), table.dense("b"))
    assert not np.array_equal(table.dense("a"), table.dense("c"))


def test_one_place_in_a_checkpoint_has_one_sample() -> None:
    """The same tensors under another symbol, as after a pass that adds one."""
    module = Module("m")
    large(module, "target", "a")
    module.weights.add("again", module.weights["a"])
    table = SampledWeights(module.weights, limit=64)
    np.testing.assert_array_equal(table.dense("a"), table.dense("again"))
    fresh = SampledWeights(module.weights, limit=64)
    np.testing.assert_array_equal(table.dense("a"), fresh.dense("a"))


@given(st.integers(0, 5), st.booleans(), st.sampled_from(["", "dequantize", "int8_codes"]))
def test_products_are_those_of_the_whole_sample(seed: int, stacked: bool, recipe: str) -> None:
    """Short blocks that repeat give the bits of the same rows written out in full."""
    module = Module("m")
    table = module.weights
    name = large(module, "target", "a", rows=70)
    large(module, "target", "b", rows=45, seed=1)
    small = store(module, "target", "s", packed(np.random.default_rng(2), 3, 32, block=16).weight)
    if stacked:
        name = table.derive("stack", "concat_rows", ("a", small, "b"))
    if recipe:
        name = table.derive("derived", recipe, (name,))
    sampled = SampledWeights(table, limit=256)
    view = WeightView(sampled, name, np.dtype(np.float64))
    x = np.random.default_rng(seed).standard_normal((2, 32))
    full = sampled.dense(name).astype(np.float64)
    found = product(x, view)
    assert found.shape == (2, full.shape[0])
    np.testing.assert_allclose(found, x @ full.T, rtol=1e-12, atol=1e-12)
    assert sum(len(block) for _, _, block in view.blocks()) < full.shape[0]


def test_stacked_rows_have_the_bits_they_have_alone() -> None:
    module = Module("m")
    a, b = large(module, "target", "a", rows=70), large(module, "target", "b", rows=33, seed=1)
    stack = module.weights.derive("stack", "concat_rows", (a, b))
    sampled = SampledWeights(module.weights, limit=64)
    x = np.random.default_rng(0).standard_normal((3, 32))
    alone = [product(x, WeightView(sampled, s, np.dtype(np.float64))) for s in (a, b)]
    together = product(x, WeightView(sampled, stack, np.dtype(np.float64)))
    assert together.tobytes() == np.concatenate(alone, axis=1).tobytes()


@pytest.mark.parametrize("text", ["fp8<block=4x16>", "int4<group=16>", "fp8<channel>"])
def test_rows_that_are_stored_together_repeat_together(text: str) -> None:
    module = Module("m")
    encoding = parse_encoding(text)
    shape = (102, 32) if text.startswith("int4") else (101, 32)
    parts = random_parts(np.random.default_rng(0), shape, encoding)
    data = tuple((n, a.tobytes()) for n, a in parts.items())
    store(module, "target", "w", Weight(shape, encoding, Inline(data)))
    assert SampledWeights(module.weights).dense("w").shape == shape
    np.testing.assert_array_equal(
        SampledWeights(module.weights).dense("w"), encoding.dequantize(parts)[: shape[0]]
    )
    table = SampledWeights(module.weights, limit=64)
    values = table.dense("w")
    assert values.shape == shape
    ((start, stop, block),) = WeightView(table, "w", np.dtype(np.float64)).blocks()
    assert (start, stop) == (0, shape[0])
    assert TILE_ROWS <= len(block) < shape[0]
    np.testing.assert_array_equal(np.resize(block, shape), values)
    np.testing.assert_array_equal(table.dense("w", 40, 50), values[40:50])


def test_tables_of_ids_are_read() -> None:
    module = Module("m")
    store(module, "draft", "d2t", dense(np.arange(1000), DType.I64))
    table = SampledWeights(module.weights, limit=64)
    np.testing.assert_array_equal(table.dense("d2t"), np.arange(1000))


@pytest.mark.parametrize("encoding", ["nvfp4<block=16>", "int8<channel>", "fp8<block=16x16>"])
def test_weights_quantized_at_load_time_follow(encoding: str) -> None:
    module = Module("m")
    store(module, "target", "w", dense(np.ones((96, 32)), DType.BF16))
    name = module.weights.derive("q", "quantize", ("w",), encoding=encoding)
    table = SampledWeights(module.weights, limit=64)
    full = table.dense(name).astype(np.float64)
    assert len(np.unique(full)) > 5
    x = np.random.default_rng(0).standard_normal((2, 32))
    found = product(x, WeightView(table, name, np.dtype(np.float64)))
    np.testing.assert_allclose(found, x @ full.T, rtol=1e-12, atol=1e-12)


def test_no_rows_and_no_axes() -> None:
    module = Module("m")
    store(module, "target", "scalar", dense(np.array(2.0), DType.F32))
    source = Stored("target", (StoredPart("weight", "f", "none"),))
    module.weights.add("none", Weight((0, 8), Dense(DType.F32), source))
    reader = module.weights.readers["target"]
    assert isinstance(reader, MemoryReader)
    reader.tensors["none"] = np.zeros((0, 8), np.float32)
    table = SampledWeights(module.weights, limit=-1)
    assert table.dense("scalar") == 2.0
    assert list(table.row_blocks("none")) == []
    assert replace(module.weights["none"]) == table["none"]
