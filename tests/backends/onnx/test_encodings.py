"""Every quantized encoding in both dialects: expanded by the engine, or inside the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jsonschema import validate

from edgecc.backends.mapped_weights import WeightFile
from edgecc.backends.onnxruntime import expand as expansion
from edgecc.backends.onnxruntime.expand import expand
from edgecc.devices import ONNX_DEVICES
from edgecc.errors import BundleError
from edgecc.ir import FP8, NVFP4, DType, Encoding, Int4, Int8, sym
from helpers.lowering import Array, GraphBuilder, compare, lowered
from helpers.weights import Sample, sample

ENCODINGS: tuple[Encoding, ...] = (
    NVFP4(16),
    FP8("tensor"),
    FP8("channel"),
    FP8("channel", scale_dtype=DType.BF16),
    FP8("block", (4, 16)),
    FP8("block", (3, 20), scale_dtype=DType.BF16),
    Int8(),
    Int8(DType.BF16),
    Int4(16),
)
FORMS = (
    *("nvfp4-f32", "fp8-f32", "fp8-f32", "fp8-f32", "fp8-block-f32", "fp8-block-f32"),
    *("int8-f32", "int8-f32", "int4-f32"),
)
SCHEMA = Path(expansion.__file__).with_name("artifact.schema.json")


def random_sample(encoding: Encoding, rows: int = 10, columns: int = 48) -> Sample:
    """A weight whose last blocks are partial."""
    return sample(np.random.default_rng(3), encoding, rows, columns)


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_linear_layers(encoding: Encoding, device: str, tmp_path: Path) -> None:
    """Products with the values of the float64 formula: in the engine, and in the evaluator."""
    made = random_sample(encoding)

    def build(b: GraphBuilder) -> None:
        b.module.weights.add("w", made.weight)
        b.give("y", b.op("linear", b.take("x", (1, sym("t"), 48)), weights=("w",)))

    x = np.random.default_rng(4).standard_normal((1, 3, 48)).astype(np.float32)
    compare(build, device, tmp_path, {"x": x}, {"y": x.astype(np.float64) @ made.values.T})


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_embedding_tables(encoding: Encoding, device: str, tmp_path: Path) -> None:
    """Rows come out bit for bit."""
    made = random_sample(encoding)

    def build(b: GraphBuilder) -> None:
        b.module.weights.add("w", made.weight)
        b.give("y", b.op("embedding", b.take("ids", (1, sym("t")), DType.I64), weights=("w",)))

    ids = np.array([[0, 9, 3, 3, 5]])
    found = lowered(build, device, tmp_path).run({"ids": ids})
    np.testing.assert_array_equal(found["y"], made.values[ids])


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize(("encoding", "form"), list(zip(ENCODINGS, FORMS, strict=True)), ids=str)
def test_packed_bytes_are_stored(
    encoding: Encoding, form: str, device: str, tmp_path: Path
) -> None:
    """The weight file holds the components, nothing wider; the manifest fits its schema."""
    made = random_sample(encoding)

    def build(b: GraphBuilder) -> None:
        b.module.weights.add("w", made.weight)
        b.give("y", b.op("linear", b.take("x", (1, sym("t"), 48)), weights=("w",)))

    result = lowered(build, device, tmp_path)
    stored = result.artifact.manifest["tensors"]
    file = WeightFile(result.weights.path, stored)
    assert len(stored) == len(made.parts)
    for name, array in made.parts.items():
        assert file.tensor("w" if name == "weight" else f"w.{name}").tobytes() == array.tobytes()
    (model,) = result.artifact.manifest["models"].values()
    assert [item["form"] for item in model["expand"]] == ([form] if device == "cpu" else [])
    validate(json.loads(json.dumps(result.artifact.manifest)), json.loads(SCHEMA.read_text()))
    for item in model["expand"]:
        np.testing.assert_array_equal(expand(item, file)["w.f32"], made.values)


# Expansion alone

SIZES = [(2, 16), (38, 48), (6, 1 << 19)]
"""Two rows; partial blocks; rows of 2 MB, which are several blocks to read."""


def memory_file(parts: dict[str, Array]) -> Any:
    """A weight file in memory."""

    class Memory:
        path = Path("weights.safetensors")

        def tensor(self, name: str) -> Array:
            return parts[name]

    return Memory()


@pytest.mark.parametrize(("rows", "columns"), SIZES)
@pytest.mark.parametrize(
    ("encoding", "form"),
    [
        (FP8("tensor"), "fp8-f32"),
        (FP8("channel"), "fp8-f32"),
        (FP8("block", (4, 128)), "fp8-block-f32"),
        (Int8(), "int8-f32"),
        (Int4(16), "int4-f32"),
    ],
    ids=str,
)
def test_expansion_is_exact_in_every_block(
    encoding: Encoding, form: str, rows: int, columns: int
) -> None:
    made = random_sample(encoding, rows, columns)
    item = {"form": form, "initializers": ["w"], "parts": {n: n for n in made.parts}}
    found = expand(item | {"block": [4, 128]}, memory_file(dict(made.parts)))["w"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, made.values)


F8 = np.zeros((6, 16), ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("form", "weight", "scale", "block"),
    [
        ("fp8-f32", F8, np.ones(5, np.float32), None),
        ("fp8-f32", F8, np.ones((6, 1), np.float32), None),
        ("fp8-block-f32", F8, np.ones((2, 2), np.float32), None),
        ("fp8-block-f32", F8, np.ones((2, 2), np.float32), [4]),
        ("fp8-block-f32", F8, np.ones((2, 2), np.float32), [4, 4]),
        ("fp8-block-f32", F8, np.ones((2, 2), np.float32), [0, 8]),
        ("fp8-block-f32", F8, np.ones((2, 2), np.float32), "no"),
        ("int8-f32", np.zeros((6, 16), np.int8), np.ones(16, np.float32), None),
        ("int4-f32", np.zeros((3, 16), np.uint8), np.ones((3, 2), np.float32), None),
        ("int4-f32", np.zeros((3, 16), np.uint8), np.ones((6, 3), np.float32), None),
        ("int4-f32", np.zeros((3, 16), np.uint8), np.ones(6, np.float32), None),
    ],
)
def test_parts_that_do_not_belong_together(
    form: str, weight: Array, scale: Array, block: object
) -> None:
    item: dict[str, Any] = {"form": form, "initializers": ["w"], "parts": {}}
    item["parts"] = {"weight": "weight", "weight_scale": "weight_scale"}
    if block is not None:
        item["block"] = block
    with pytest.raises(BundleError) as caught:
        expand(item, memory_file({"weight": weight, "weight_scale": scale}))
    assert caught.value.id == "bundle/expansion"
