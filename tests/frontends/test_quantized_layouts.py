"""Weights in other producers' layouts: values as their own libraries compute them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.quantization import read_quantization
from edgecc.ir.core import Module
from edgecc.ir.encodings import FP8, MXFP4, NVFP4, Encoding, Int4
from edgecc.ir.types import DType
from helpers.checkpoints import edit_json, edit_tensors, read_tensors, write_target
from helpers.quantized_layouts import AWQ, GPTQ, LAYOUTS, group, tensors_config

GOLDENS = Path(__file__).parents[1] / "data" / "quantization"
GPTQ_16 = {**GPTQ, "group_size": 16}
INT4 = group(4, "int", "group", group_size=32)
CONFIGS: Mapping[str, tuple[dict[str, object], Encoding]] = {
    "nvfp4": (
        tensors_config("nvfp4-pack-quantized", g=group(4, "float", "tensor_group", group_size=16)),
        NVFP4(divisor=True),
    ),
    "fp8-tensor-f32": (tensors_config("float-quantized", g=group(8, "float", "tensor")), FP8()),
    "fp8-channel-f32": (
        tensors_config("float-quantized", g=group(8, "float", "channel")),
        FP8("channel"),
    ),
    "fp8-channel": (
        tensors_config("float-quantized", g=group(8, "float", "channel")),
        FP8("channel", scale_dtype=DType.BF16),
    ),
    "fp8-block-f32": (
        tensors_config("float-quantized", g=group(8, "float", "block", block_structure=[128, 128])),
        FP8("block"),
    ),
    "mxfp4": (
        tensors_config("mxfp4-pack-quantized", g=group(4, "float", "group", group_size=32)),
        MXFP4(),
    ),
    "mxfp8": (
        tensors_config("mxfp8-quantized", g=group(8, "float", "group", group_size=32)),
        FP8("block", (1, 32), scale_dtype=DType.F8E8M0),
    ),
    "int4-f32": (tensors_config("pack-quantized", g=INT4), Int4(32)),
    "int4": (tensors_config("pack-quantized", g=INT4), Int4(32, scale_dtype=DType.BF16)),
    "int4-channel-f32": (tensors_config("pack-quantized", g=group(4, "int", "channel")), Int4(64)),
    "int4-zeros-f32": (
        tensors_config(
            "pack-quantized", g=group(4, "int", "group", group_size=32, symmetric=False)
        ),
        Int4(32, zero_point=True),
    ),
    "int4-zeros": (
        tensors_config(
            "pack-quantized", g=group(4, "int", "group", group_size=32, symmetric=False)
        ),
        Int4(32, zero_point=True, scale_dtype=DType.BF16),
    ),
    "awq": (AWQ, Int4(32, zero_point=True, scale_dtype=DType.F16)),
    "awq-f32": (AWQ, Int4(32, zero_point=True)),
    "gptq-v1": (GPTQ_16, Int4(16, zero_point=True, scale_dtype=DType.F16)),
    "gptq-v2": (
        {**GPTQ_16, "checkpoint_format": "gptq_v2"},
        Int4(16, zero_point=True, scale_dtype=DType.F16),
    ),
    "gptq-v1-symmetric": ({**GPTQ_16, "sym": True}, Int4(16, scale_dtype=DType.F16)),
    "gptq-v2-symmetric": (
        {**GPTQ_16, "sym": True, "checkpoint_format": "gptq_v2"},
        Int4(16, scale_dtype=DType.F16),
    ),
    "gptq-v1-order": (
        {**GPTQ_16, "desc_act": True},
        Int4(16, zero_point=True, ordered=True, scale_dtype=DType.F16),
    ),
    "fine-grained-f32": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        FP8("block"),
    ),
    "fine-grained-bf16": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        FP8("block", scale_dtype=DType.BF16),
    ),
    "gpt-oss": ({"quant_method": "mxfp4"}, MXFP4()),
}


@pytest.fixture(scope="module")
def goldens() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, array in read_tensors(GOLDENS).items():
        case, _, tensor = name.partition("/")
        found.setdefault(case, {})[tensor] = array
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_target(tmp_path / "t", layers=0, tokenizer=False, quantized=False)


def weights(path: Path) -> ModuleWeights:
    checkpoint = Checkpoint.open(path, role="target")
    return ModuleWeights(Module("m"), checkpoint, read_quantization(checkpoint))


def test_every_golden_is_looked_at(goldens: dict[str, dict[str, Any]]) -> None:
    assert set(CONFIGS) == set(goldens)


@pytest.mark.parametrize("case", CONFIGS)
def test_values_are_those_of_the_library(
    case: str, folder: Path, goldens: dict[str, dict[str, Any]]
) -> None:
    """Bit for bit after the library's own last rounding, to the type that it returns."""
    tensors = dict(goldens[case])
    values = tensors.pop("values")
    config, encoding = CONFIGS[case]
    edit_tensors(folder, lambda t: t | tensors)
    edit_json(folder / "config.json", quantization_config=config)
    found = weights(folder)
    rows, columns = values.shape
    symbol = found.matrix("x", rows, columns)
    found.errors.raise_found()
    table = found.module.weights
    assert table[symbol].encoding == encoding
    assert found.size("x.weight") == (rows, columns)
    got = table.dense(symbol).astype(values.dtype)
    np.testing.assert_array_equal(got, values)
    some = slice(rows // 2 - 1, rows - 1)
    np.testing.assert_array_equal(
        table.dense(symbol, some.start, some.stop), table.dense(symbol)[some]
    )
    assert found.unused(()) == [name for name in found.checkpoint.tensors if name[0] != "x"]
    assert [f.id for f in found.quantization.findings] == []


@given(
    st.sampled_from(list(LAYOUTS)), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1)
)
def test_values_are_those_of_the_definition(
    tmp_path_factory: pytest.TempPathFactory, case: str, high: int, wide: int, seed: int
) -> None:
    """Packed by the tests, in every layout, whatever the size."""
    rows, columns = 8 * high, 32 * wide
    rng = np.random.default_rng(seed)
    weight = (rng.standard_normal((rows, columns)) * rng.uniform(0.01, 2)).astype(np.float32)
    tensors, values = LAYOUTS[case].pack(weight)
    path = write_target(
        tmp_path_factory.mktemp("w") / "t", layers=0, tokenizer=False, quantized=False
    )
    edit_tensors(path, lambda t: t | {f"x{ending}": array for ending, array in tensors.items()})
    edit_json(path / "config.json", quantization_config=LAYOUTS[case].config)
    found = weights(path)
    symbol = found.matrix("x", rows, columns)
    found.errors.raise_found()
    np.testing.assert_array_equal(found.module.weights.dense(symbol), values)
    assert found.module.weights[symbol].encoding.kind == LAYOUTS[case].kind
    # The packing of the tests is no rounding to nothing.
    assert np.abs(values - weight).max() <= 0.3 * np.abs(weight).max()


@pytest.mark.parametrize("case", ["gptq", "gptq-symmetric", "gptq-order", "awq", "fp8-block"])
def test_packed_modules_that_are_declared_unquantized(case: str, folder: Path) -> None:
    """Only the metadata tells how zero points are meant: that of all other modules."""
    weight = np.random.default_rng(1).standard_normal((16, 64)).astype(np.float32)
    layout = LAYOUTS[case]
    tensors, values = layout.pack(weight)
    config = {**layout.config, "lm_head": False, "modules_to_not_convert": ["lm_head"]}
    edit_json(folder / "config.json", quantization_config=config)
    edit_tensors(
        folder,
        lambda t: (
            {n: a for n, a in t.items() if n != "lm_head.weight"}
            | {f"lm_head{e}": a for e, a in tensors.items()}
        ),
    )
    found = weights(folder)
    symbol = found.matrix("lm_head", 16, 64)
    found.errors.raise_found()
    np.testing.assert_array_equal(found.module.weights.dense(symbol), values)
    assert [f.id for f in found.quantization.findings] == ["quant/stored-not-declared"]


def test_the_goldens_of_the_facts(folder: Path) -> None:
    """compressed-tensors NVFP4, INT4 and MX of an independent export, byte by byte."""
    i = np.arange(32)
    values = np.stack([((37 * i + 11) % 97 - 48) / 64, ((53 * i + 5) % 89 - 44) / 1024])
    packed = "0ed6f46a1ec7f4693db7e5604dafe6724f6df9d3a63f6e7ae2b5275e7ce1c517"
    tensors = {
        "x.weight_packed": np.frombuffer(bytes.fromhex(packed), np.uint8).reshape(2, 16),
        "x.weight_scale": np.frombuffer(bytes.fromhex("7e7e5d5d"), ml_dtypes.float8_e4m3fn).reshape(
            2, 2
        ),
        "x.weight_global_scale": np.array([0x4564C415], np.uint32).view(np.float32),
    }
    expected = (
        "befb0000 00000000 3efb0000 bebc0000 3e7b0000 bf3c0000 bdfb0000 3efb0000 befb0000 3d7b0000"
    )
    edit_tensors(folder, lambda t: t | tensors)
    edit_json(folder / "config.json", quantization_config=CONFIGS["nvfp4"][0])
    found = weights(folder)
    got = found.module.weights.dense(found.matrix("x", 2, 32)).astype(ml_dtypes.bfloat16)
    bits = (got.astype(np.float32) + np.float32(0)).view(np.uint32)[0, :10]
    assert [f"{word:08x}" for word in bits] == expected.split()
    assert np.abs(got.astype(np.float64) - values).max() < 0.13
