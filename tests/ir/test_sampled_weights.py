"""Stand-ins of large weights: valid, repeated, equal where the weights are, and cheap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import NVFP4, Dense, DType, Encoding, Int8Block, Module, Stored, StoredPart, Weight
from edgecc.ir.ops.base import WeightView
from edgecc.ir.ops.matmul import product
from edgecc.ir.random_weights import random_parts
from edgecc.ir.sampled_weights import TILE_ROWS, SampledWeights
from helpers.weights import MemoryReader, dense, packed, store

ENCODINGS = (
    Dense(DType.F32),
    Dense(DType.BF16),
    Dense(DType.F16),
    Dense(DType.F8E4M3),
    Dense(DType.F8E8M0),
    Dense(DType.I8),
    Dense(DType.U8),
    Dense(DType.BOOL),
    NVFP4(16),
    NVFP4(16, input_scale=True),
    Int8Block(16),
)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("shape", [(40, 64), (3, 16)])
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
