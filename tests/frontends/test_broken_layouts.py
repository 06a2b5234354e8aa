"""Broken weights of other producers: what was found, expected, where, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from edgecc.driver import compile
from edgecc.errors import EdgeccError, InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.quantization import read_quantization
from edgecc.ir.core import Module
from helpers.checkpoints import edit_json, edit_tensors, write_target
from helpers.quantized_layouts import LAYOUTS, group, requantize, tensors_config

SHAPE = (16, 64)
Change = Callable[[Any], Any] | None
"""What becomes of a tensor; None: it is not there."""


def narrower(array: Any) -> Any:
    return np.ascontiguousarray(array[..., :-1])


def as_type(dtype: Any) -> Callable[[Any], Any]:
    return lambda array: array.astype(dtype)


def full(value: float) -> Callable[[Any], Any]:
    return lambda array: np.full_like(array, value)


def put(value: int, index: tuple[int, ...] = (0,)) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        changed = array.copy()
        changed[index] = value
        return changed

    return change


CT, BAD_SCALE, BAD_SHAPE = "compressed-tensors-", "quant/bad-scale", "quant/bad-shape"
NVFP4, INT4, ZEROS, ORDER = f"{CT}nvfp4", f"{CT}int4", f"{CT}int4-zeros", f"{CT}int4-order"
PLAIN_NAME = (
    *(f"{CT}fp8-channel", f"{CT}fp8-tensor", f"{CT}mxfp8", "fp8-block", "modelopt-mxfp4"),
)
"""Layouts whose values are in `weight`."""
CASES: Mapping[str, tuple[str, str, Change, str, str]] = {
    "nvfp4: no global scale": (
        *(NVFP4, ".weight_global_scale", None, "quant/missing-scale"),
        "its weight_global_scale is missing",
    ),
    "nvfp4: a global scale of zero": (
        *(NVFP4, ".weight_global_scale", full(0), BAD_SCALE),
        "0.0, expected a finite positive number",
    ),
    "nvfp4: a global scale that is NaN": (
        *(NVFP4, ".weight_global_scale", full(np.nan), BAD_SCALE),
        "the scale is nan",
    ),
    "nvfp4: a global scale that is too small for a divisor": (
        *(NVFP4, ".weight_global_scale", full(1e-36), BAD_SCALE),
        "expected 7.9e-36 to",
    ),
    "fp8: a scale that is too large": (
        *(f"{CT}fp8-tensor", ".weight_scale", full(1e36), BAD_SCALE),
        "up to 448 times the scale",
    ),
    "nvfp4: no block scales": (
        *(NVFP4, ".weight_scale", None, "quant/missing-scale"),
        "its weight_scale is missing",
    ),
    "nvfp4: block scales in f32": (
        *(NVFP4, ".weight_scale", as_type(np.float32), BAD_SCALE),
        "f32 [16, 4], expected f8e4m3 [16, 4] (one per 16 columns)",
    ),
    "nvfp4: few block scales": (*(NVFP4, ".weight_scale", narrower, BAD_SCALE), "[16, 3]"),
    "nvfp4: few codes": (
        *(NVFP4, ".weight_packed", narrower, BAD_SHAPE),
        "holds [16, 62] values, expected [16, 64]",
    ),
    "nvfp4: an input scale of zero": (
        *(NVFP4, ".input_global_scale", full(0), BAD_SCALE),
        "0.0",
    ),
    "int4: no scales": (*(INT4, ".weight_scale", None, "quant/missing-scale"), "weight_scale"),
    "int4: integer scales": (
        *(INT4, ".weight_scale", as_type(np.int32), BAD_SCALE),
        "i32 [16, 2], expected floating-point numbers [16, groups]",
    ),
    "int4: few codes": (
        *(INT4, ".weight_packed", narrower, BAD_SHAPE),
        "[16, 7], expected [16, 8]",
    ),
    "int4: long codes": (
        *(INT4, ".weight_packed", as_type(np.int64), "quant/bad-dtype"),
        "i64, expected i32",
    ),
    "int4: another shape": (
        *(INT4, ".weight_shape", put(15), BAD_SHAPE),
        "weight_shape is [15, 64], expected [16, 64]",
    ),
    "int4: groups that are not equal": (
        *(INT4, ".weight_scale", lambda a: np.ones((16, 3), a.dtype), "quant/partial-block"),
        "64 columns are not a multiple of the block 22",
    ),
    "int4: no zero points": (
        *(ZEROS, ".weight_zero_point", None, "quant/missing-scale"),
        "its weight_zero_point is missing",
    ),
    "int4: few zero points": (
        *(ZEROS, ".weight_zero_point", narrower, BAD_SCALE),
        "the zero points are i32 [2, 1], expected i32 [2, 2]",
    ),
    "int4: a group that is not there": (
        *(ORDER, ".weight_g_idx", put(2, (3,)), "quant/bad-groups"),
        "column 3 is of group 2, expected 0 to 1",
    ),
    "int4: a negative group": (
        *(ORDER, ".weight_g_idx", put(-1, (5,)), "quant/bad-groups"),
        "column 5 is of group -1",
    ),
    "int4: groups of few columns": (
        *(ORDER, ".weight_g_idx", narrower, "quant/bad-groups"),
        "i32 [63], expected",
    ),
    "awq: no scales": (*("awq", ".scales", None, "quant/missing-scale"), "AWQ (qweight"),
    "awq: no zero points": (*("awq", ".qzeros", None, "quant/missing-scale"), "qzeros is missing"),
    "awq: few zero points": (*("awq", ".qzeros", narrower, BAD_SCALE), "i32 [2, 1], expected"),
    "awq: words in GPTQ's order": (
        *("awq", ".qweight", lambda a: np.zeros((8, 16), np.int32), BAD_SHAPE),
        "words [8, 16], expected [64, 2]",
    ),
    "awq: eight bits": (
        *("awq", ".qweight", lambda a: np.zeros((64, 4), np.int32), "quant/unsupported-method"),
        "AWQ with 8 bits",
    ),
    "gptq: no scales": (*("gptq", ".scales", None, "quant/missing-scale"), "GPTQ (qweight"),
    "gptq: no zero points": (*("gptq", ".qzeros", None, "quant/missing-scale"), "qzeros"),
    "gptq: scales by column": (
        *("gptq", ".scales", lambda a: np.ascontiguousarray(a.T), BAD_SCALE),
        "f16 [16, 2], expected floating-point numbers [groups, 16]",
    ),
    "gptq: a group that is not there": (
        *("gptq-order", ".g_idx", put(9), "quant/bad-groups"),
        "column 0 is of group 9, expected 0 to 1",
    ),
    "gptq: zero points that differ": (
        *("gptq-symmetric", ".qzeros", put(0x55555555, (1, 0)), "quant/zero-points"),
        "the word at [1, 0] is 0x55555555, and those of the first group 0x77777777",
    ),
    "gptq: zero points of a symmetric weight that are elsewhere": (
        *("gptq-symmetric", ".qzeros", full(0x11111111), "quant/zero-points"),
        "the word at [0, 0] is 0x11111111, expected 0x77777777",
    ),
    "gptq: a group that has no columns": (
        *("gptq-order", ".g_idx", full(0), "quant/bad-groups"),
        "group 1 has 0 columns and group 0 has 64, expected equally many",
    ),
    "int4: groups of several sizes": (
        *(ORDER, ".weight_g_idx", full(1), "quant/bad-groups"),
        "group 0 has 0 columns",
    ),
    "gptq: an order that is not told": (
        *("gptq-order", ".g_idx", None, "quant/missing-scale"),
        "its g_idx is missing",
    ),
    "gptq: eight bits": (
        *("gptq", ".qweight", lambda a: np.zeros((16, 16), np.int32), "quant/unsupported-method"),
        "GPTQ with 8 bits",
    ),
    "mxfp4: few scales": (
        *(f"{CT}mxfp4", ".weight_scale", narrower, BAD_SCALE),
        "u8 [16, 1], expected u8 or f8e8m0 [16, 2] (one per 32 columns)",
    ),
    "mxfp8: few scales": (
        *(f"{CT}mxfp8", ".weight_scale", narrower, BAD_SCALE),
        "expected [16, 2] (one per 32 columns)",
    ),
    "gpt-oss: no scales": (
        *("gpt-oss-mxfp4", "_scales", None, "quant/missing-scale"),
        "x_scales is missing",
    ),
    "gpt-oss: flat blocks": (
        *("gpt-oss-mxfp4", "_blocks", lambda a: a.reshape(16, 32), BAD_SHAPE),
        "u8 [16, 32], expected u8 [16, 2, 16]",
    ),
    "gpt-oss: signed blocks": (
        *("gpt-oss-mxfp4", "_blocks", lambda a: a.view(np.int8), BAD_SHAPE),
        "i8 [16, 2, 16], expected u8 [16, 2, 16]",
    ),
    "gpt-oss: blocks in f32": (
        *("gpt-oss-mxfp4", "_blocks", as_type(np.float32), BAD_SHAPE),
        "f32 [16, 2, 16], expected u8",
    ),
    "fp8: no scale": (*("fp8-block", ".weight_scale_inv", None, "quant/missing-scale"), "missing"),
    "fp8: scales of other blocks": (
        *("fp8-block", ".weight_scale_inv", lambda a: np.ones((2, 2), np.float32), BAD_SCALE),
        "[1, 1] (one per 128 x 128 block)",
    ),
    "fp8: integer scales": (
        *("fp8-block", ".weight_scale_inv", as_type(np.int64), BAD_SCALE),
        "the scales are i64 [1, 1]",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_target(tmp_path / "t", layers=0, tokenizer=False, quantized=False)


def read(path: Path, shape: tuple[int, int] = SHAPE) -> str:
    checkpoint = Checkpoint.open(path, role="target")
    found = ModuleWeights(Module("m"), checkpoint, read_quantization(checkpoint))
    symbol = found.matrix("x", *shape)
    found.errors.raise_found()
    return symbol


def store(path: Path, layout: str, tensor: str = "", change: Change = None) -> Path:
    weight = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    tensors, _ = LAYOUTS[layout].pack(weight)
    if tensor:
        old = tensors.pop(tensor)
        if change is not None:
            tensors[tensor] = change(old)
    edit_tensors(path, lambda t: t | {f"x{ending}": array for ending, array in tensors.items()})
    return edit_json(path / "config.json", quantization_config=LAYOUTS[layout].config).parent


@pytest.mark.parametrize("case", CASES)
def test_broken(case: str, folder: Path) -> None:
    layout, tensor, change, id, words = CASES[case]
    store(folder, layout)
    read(folder)  # it is as it should be
    unread = id in ("quant/unsupported-method", "quant/partial-block")
    kind = UnsupportedError if unread else InputError
    with pytest.raises(kind) as caught:
        read(store(folder, layout, tensor, change)) if change else read(without(folder, tensor))
    assert caught.value.id == id
    assert words in str(caught.value)
    (found,) = caught.value.diagnostics
    assert found.where.startswith("target/model.safetensors: x")
    assert found.help


def without(path: Path, tensor: str) -> Path:
    return edit_tensors(path, lambda t: {n: a for n, a in t.items() if n != f"x{tensor}"})


METADATA: Mapping[str, tuple[dict[str, object], str]] = {
    "bits are missing": ({"quant_method": "gptq", "group_size": 32}, "bits is missing"),
    "bits are text": ({"quant_method": "awq", "bits": "4"}, "bits is '4', expected an integer"),
    "groups are missing": ({"quant_method": "awq", "bits": 4}, "group_size"),
    "a group of nothing": (
        {"quant_method": "gptq", "bits": 4, "group_size": 0},
        "group_size is 0, expected -1 or a positive integer",
    ),
    "a block of one size": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        "weight_block_size is [128], expected rows and columns of a block",
    ),
    "targets are text": (
        tensors_config("x", g={**group(4, "int", "channel"), "targets": "Linear"}),
        "targets is 'Linear', expected a list of strings",
    ),
    "groups are a list": ({"quant_method": "compressed-tensors", "config_groups": []}, "an object"),
    "no number of bits": (
        tensors_config("x", g={"targets": ["Linear"], "weights": {"type": "int"}}),
        "num_bits is missing",
    ),
}


@pytest.mark.parametrize("case", METADATA)
def test_broken_metadata(case: str, folder: Path) -> None:
    config, words = METADATA[case]
    edit_json(folder / "config.json", quantization_config=config)
    with pytest.raises(InputError) as caught:
        read_quantization(Checkpoint.open(folder, role="target"))
    assert words in str(caught.value)
    assert "target/config.json: quantization_config" in caught.value.diagnostics[0].where


@pytest.mark.parametrize(
    ("bits", "kind", "strategy", "more"),
    [
        (8, "int", "channel", {}),
        (3, "int", "group", {"group_size": 32}),
        (4, "int", "tensor", {}),
        (4, "float", "group", {"group_size": 64}),
        (6, "float", "group", {"group_size": 32}),
        (8, "float", "token", {}),
        (8, "float", "tensor", {"symmetric": False}),
    ],
)
def test_schemes_of_compressed_tensors_that_are_not_read(
    folder: Path, bits: int, kind: str, strategy: str, more: dict[str, object]
) -> None:
    scheme = tensors_config("some-format", g=group(bits, kind, strategy, **more))
    edit_json(folder / "config.json", quantization_config=scheme)
    with pytest.raises(UnsupportedError, match=f"some-format: {kind}{bits}, {strategy}"):
        read_quantization(Checkpoint.open(folder, role="target"))


def test_words_that_are_partly_filled(folder: Path) -> None:
    """60 columns are 7 words and a half."""
    tensors = {
        "x.weight_packed": np.zeros((16, 8), np.int32),
        "x.weight_scale": np.ones((16, 1), np.float32),
    }
    edit_tensors(folder, lambda t: t | tensors)
    edit_json(folder / "config.json", quantization_config=LAYOUTS[INT4].config)
    with pytest.raises(UnsupportedError, match="60 values along a packed axis"):
        read(folder, (16, 60))


def test_a_file_of_the_second_format_that_says_it_is_of_the_first(folder: Path) -> None:
    """Zero points of 8 throughout: the middle of the second format, and none of the first."""
    store(folder, "gptq-symmetric", ".qzeros", full(0x88888888 - 2**32))
    checkpoint = Checkpoint.open(folder, role="target")
    found = ModuleWeights(Module("m"), checkpoint, read_quantization(checkpoint))
    symbol = found.matrix("x", *SHAPE)
    assert str(found.module.weights[symbol].encoding) == "int4<group=32, scale=f16>"
    weight = np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32)
    _, values = LAYOUTS["gptq-symmetric"].pack(weight)
    np.testing.assert_array_equal(found.module.weights.dense(symbol), values)


@pytest.mark.parametrize(
    ("layout", "ending", "byte", "words"),
    [
        (NVFP4, ".weight_scale", 0x7F, "is NaN (byte 0x7f)"),
        (
            f"{CT}mxfp4",
            ".weight_scale",
            0xFF,
            "NaN (byte 0xff), expected a power of two",
        ),
        (
            f"{CT}mxfp4",
            ".weight_scale",
            0xFD,
            "2^126 (byte 0xfd), expected a power of two",
        ),
        (
            f"{CT}mxfp8",
            ".weight_scale",
            0xF7,
            "(byte 0xf7), expected a power of two up to 2^119",
        ),
        (f"{CT}mxfp8", ".weight_scale", 0xFF, "NaN (byte 0xff), expected a power of two"),
        (f"{CT}mxfp8", ".weight", 0x7F, "is NaN"),
        ("awq", ".scales", 0x7E, "is nan, expected a number that is not zero"),
        ("awq", ".scales", 0, "is 0, expected a number that is not zero"),
        (INT4, ".weight_scale", 0xFF, "is nan, expected"),
        (INT4, ".weight_scale", 0x7F, "expected a number that is not zero, up to 2.3e+37"),
        ("gptq", ".scales", 0, "is 0, expected"),
    ],
)
def test_numbers_that_are_none_are_found_when_compiling(
    tmp_path: Path, layout: str, ending: str, byte: int, words: str
) -> None:
    dense = write_target(tmp_path / "dense", layers=1, hidden=128, quantized=False)
    target, _ = requantize(dense, tmp_path, LAYOUTS[layout])
    key = f"model.layers.0.mlp.down_proj{ending}"

    def damage(tensors: Any) -> None:
        tensors[key].reshape(-1)[:1].view(np.uint8)[:] = byte

    edit_tensors(target, damage)
    with pytest.raises(EdgeccError) as caught:
        compile(target, out=tmp_path / "b", max_model_len=32)
    assert caught.value.exit_code == 3
    assert words in str(caught.value)
    assert f"target/model.safetensors: {key}" in str(caught.value)
    assert caught.value.diagnostics[0].help
    assert not (tmp_path / "b").exists()


def test_exponents_in_their_own_type(folder: Path) -> None:
    """The same bytes under the name that safetensors has for them."""
    store(
        folder,
        f"{CT}mxfp4",
        ".weight_scale",
        lambda array: array.view(ml_dtypes.float8_e8m0fnu),
    )
    read(folder)


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_weight_that_is_stored_twice(layout: str, folder: Path) -> None:
    """Which of the two a model had is not known: zeros, or what is packed."""
    store(folder, layout)
    other = ".weight_packed" if layout in PLAIN_NAME else ".weight"
    tensors = {f"x{other}": np.zeros(SHAPE, ml_dtypes.bfloat16)}
    edit_tensors(folder, lambda t: t | tensors)
    with pytest.raises(InputError) as caught:
        read(folder)
    assert caught.value.id == "quant/two-weights"
    assert f"x{other}" in str(caught.value)


@pytest.mark.parametrize("layout", ["awq", INT4])
def test_a_last_group_that_is_not_whole(layout: str, folder: Path) -> None:
    """Two scales for 64 columns: groups of 48 and 16 as declared, or of 32 and 32."""
    path = store(folder, layout) / "config.json"
    ints = group(4, "int", "group", group_size=48)
    config = tensors_config("pack-quantized", g=ints)
    if layout == "awq":
        config = {**LAYOUTS[layout].config, "group_size": 48}
    edit_json(path, quantization_config=config)
    with pytest.raises(UnsupportedError) as caught:
        read(folder)
    assert caught.value.id == "quant/partial-block"
    assert "64 columns are not a multiple of the block 48" in str(caught.value)


@pytest.mark.parametrize("order", ["group", "dynamic", True])
def test_an_order_of_columns_that_is_not_stored(order: object, folder: Path) -> None:
    path = store(folder, INT4) / "config.json"
    ints = group(4, "int", "group", group_size=32, actorder=order)
    edit_json(path, quantization_config=tensors_config("pack-quantized", g=ints))
    with pytest.raises(InputError, match="its weight_g_idx is missing"):
        read(folder)
    ints["weights"]["actorder"] = "weight"  # type: ignore[index]
    edit_json(path, quantization_config=tensors_config("pack-quantized", g=ints))
    read(folder)


def test_zero_points_of_the_first_format_below_the_name_of_the_second(folder: Path) -> None:
    path = store(folder, "gptq-symmetric") / "config.json"
    config = {**LAYOUTS["gptq-symmetric"].config, "checkpoint_format": "gptq_v2"}
    edit_json(path, quantization_config=config)
    with pytest.raises(InputError, match="all zero points are 7") as caught:
        read(folder)
    assert caught.value.id == "quant/zero-points"


def test_awq_in_the_order_of_another_backend(folder: Path) -> None:
    path = store(folder, "awq") / "config.json"
    edit_json(path, quantization_config={**LAYOUTS["awq"].config, "backend": "llm-awq"})
    with pytest.raises(UnsupportedError, match="AWQ in the order of llm-awq"):
        read(folder)
