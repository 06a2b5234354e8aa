"""From tensors of a checkpoint to entries of a weight table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.quantization import read_quantization
from edgecc.ir.core import Module
from edgecc.ir.encodings import NVFP4, Dense
from edgecc.ir.rope import RopeParams, rope_tables
from edgecc.ir.types import DType
from edgecc.ir.weights import Derived, Stored, Unbound
from helpers.checkpoints import Tensors, edit_tensors, write_draft, write_target
from helpers.reference import Target


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("weights") / "t", layers=1, tokenizer=False)


def open_weights(
    path: Path, names: Mapping[str, str] | None = None, role: str = "target"
) -> ModuleWeights:
    checkpoint = Checkpoint.open(path, role=role)
    return ModuleWeights(Module("m"), checkpoint, read_quantization(checkpoint), names)


def test_a_packed_matrix(path: Path) -> None:
    weights = open_weights(path)
    symbol = weights.matrix("model.layers.0.mlp.up_proj", 128, 64)
    assert symbol == "target.model.layers.0.mlp.up_proj.weight"
    weight = weights.module.weights[symbol]
    assert weight.shape == (128, 64)
    assert isinstance(weight.encoding, NVFP4)
    assert isinstance(weight.source, Stored)
    found = weights.module.weights.dense(symbol)
    expected = Target(path).matrix("model.layers.0.mlp.up_proj")
    assert np.allclose(found, expected, rtol=1e-6, atol=0)


def test_a_dense_matrix(path: Path) -> None:
    weights = open_weights(path)
    symbol = weights.matrix("model.embed_tokens", 288, 64)
    assert weights.module.weights[symbol].encoding == Dense(DType.BF16)
    assert np.array_equal(
        weights.module.weights.dense(symbol, 3, 5), Target(path).embedding[3:5].astype(np.float32)
    )


def test_asking_twice_is_asking_once(path: Path) -> None:
    weights = open_weights(path)
    first = weights.matrix("lm_head", 288, 64)
    assert weights.matrix("lm_head", 288, 64) == first
    assert list(weights.module.weights) == [first]


def test_a_vector(path: Path) -> None:
    weights = open_weights(path)
    symbol = weights.vector("model.norm.weight", 64)
    expected = Target(path).tensor("model.norm.weight")
    assert np.array_equal(weights.module.weights.dense(symbol), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (np.ones(63, dtype=np.float32), r"f32 \[63\]"),
        (np.ones((1, 64), dtype=np.float32), r"f32 \[1, 64\]"),
        (np.ones(64, dtype=np.int64), r"i64 \[64\]"),
        (np.ones(0, dtype=np.float32), r"f32 \[0\]"),
    ],
)
def test_a_vector_of_another_kind(tmp_path: Path, value: np.ndarray, found: str) -> None:
    path = write_target(tmp_path / "t", layers=1, tokenizer=False)

    def change(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = value

    weights = open_weights(edit_tensors(path, change))
    weights.vector("model.norm.weight", 64)
    with pytest.raises(InputError, match=rf"shape \[64\], found {found}") as caught:
        weights.errors.raise_found()
    assert caught.value.id == "checkpoint/shape"
    assert caught.value.diagnostics[0].where == "target/model.safetensors: model.norm.weight"


def test_a_missing_vector(path: Path) -> None:
    weights = open_weights(path)
    symbol = weights.vector("model.nrm.weight", 64)
    assert isinstance(weights.module.weights[symbol].source, Unbound)
    with pytest.raises(InputError, match=r"no tensor model.nrm.weight") as caught:
        weights.errors.raise_found()
    assert "model.norm.weight" in caught.value.diagnostics[0].help


def test_every_fault_is_told(path: Path) -> None:
    """Of the fifth missing tensor no name is suggested: that would take seconds for hundreds."""
    weights = open_weights(path)
    for i in range(6):
        weights.vector(f"model.layers.{i}.nrm.weight", 64)
    weights.vector("model.norm.weight", 63)
    with pytest.raises(InputError) as caught:
        weights.errors.raise_found()
    missing, shape = caught.value.diagnostics
    assert "model.layers.0.nrm.weight" in missing.message
    assert shape.id == "checkpoint/shape"
    helps = [bool(e.diagnostics[0].help) for e in weights.errors.errors[:6]]
    assert helps == [True, True, True, True, False, False]


def test_has(path: Path) -> None:
    weights = open_weights(path)
    assert weights.has("lm_head.weight")
    assert weights.has("model.norm.weight")
    assert not weights.has("lm_head")
    assert not weights.has("lm_head.bias")


def test_has_knows_other_layouts_too(tmp_path: Path) -> None:
    """A head that exists in another layout must not be taken for a missing one."""
    path = write_target(tmp_path / "t", layers=1, tokenizer=False)

    def repack(tensors: Tensors) -> None:
        tensors["lm_head.weight_packed"] = tensors.pop("lm_head.weight")

    weights = open_weights(edit_tensors(path, repack))
    assert weights.has("lm_head.weight")
    assert weights.stored_name("lm_head.weight") == "lm_head.weight_packed"
    weights.matrix("lm_head", 288, 64)
    with pytest.raises(InputError, match="its weight_global_scale is missing") as caught:
        weights.errors.raise_found()
    assert "assumed format: compressed-tensors NVFP4" in str(caught.value)


def test_other_names(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "d")
    names = {"projection.weight": "fc.weight", "scale": "norm.weight"}
    weights = open_weights(path, names, role="draft")
    assert weights.has("projection.weight")
    assert weights.matrix("projection", 64, 128) == "draft.projection.weight"
    assert weights.vector("scale", 64) == "draft.scale"
    assert weights.names() == names
    assert "fc.weight" not in weights.unused(())
    assert "norm.weight" not in weights.unused(())


def test_unbound(path: Path) -> None:
    weights = open_weights(path)
    symbol = weights.unbound("lm_head.weight", 288, 64, "lm_head")
    weight = weights.module.weights[symbol]
    assert weight.source == Unbound("lm_head", ("target: lm_head.weight",))
    assert weight.shape == (288, 64)


def test_rope_tables(path: Path) -> None:
    weights = open_weights(path)
    rope = RopeParams(1e4, 16, "linear", 4.0)
    symbols = weights.rope_tables(rope, 10)
    assert symbols == ("target.rope.cos", "target.rope.sin")
    for symbol, expected in zip(symbols, rope_tables(rope, 10), strict=True):
        weight = weights.module.weights[symbol]
        assert weight.shape == (10, 8)
        assert isinstance(weight.source, Derived)
        assert np.array_equal(weights.module.weights.dense(symbol), expected)


def test_unused(path: Path) -> None:
    weights = open_weights(path)
    everything = set(weights.checkpoint.tensors)
    assert set(weights.unused(())) == everything
    weights.matrix("lm_head", 288, 64)
    weights.vector("model.norm.weight", 64)
    left = set(weights.unused(()))
    assert everything - left == {
        "lm_head.weight",
        "lm_head.weight_scale",
        "lm_head.weight_scale_2",
        "lm_head.input_scale",
        "model.norm.weight",
    }
    assert set(weights.unused(("model.layers.*",))) == {"model.embed_tokens.weight"}
