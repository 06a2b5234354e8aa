"""Checkpoints in the layouts of other producers, packed from the definitions with NumPy alone.

`pack` gives the tensors of one weight and the values they stand for; `requantize` rewrites a small
checkpoint with them. No code is shared with edgecc: values are computed in float64 and rounded
where the format says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from helpers.checkpoints import read_tensors

Array = NDArray[Any]
Packed = tuple[dict[str, Array], Array]
"""Tensors by what follows the module's name, and values in float32."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
GROUP = 32


@dataclass(frozen=True)
class Layout:
    """How a producer stores weights.

    Attributes:
        config: `quantization_config`.
        pack: Tensors and values of a weight.
        head: Whether the producer can quantize a head.
        bits: Of each element, scales included: an upper bound for those of a bundle.
        kind: Of the encoding.
    """

    config: Mapping[str, object]
    pack: Callable[[Array], Packed]
    kind: str
    head: bool = True
    bits: float = 5.2


def words(codes: Array, axis: int, order: tuple[int, ...] = tuple(range(8))) -> Array:
    """Codes 0..15 as 32-bit words of eight along an axis; nibble i holds neighbour `order[i]`."""
    moved = np.moveaxis(codes.astype(np.uint64), axis, -1)
    eights = moved.reshape(*moved.shape[:-1], -1, 8)
    packed = sum(eights[..., order[i]] << np.uint64(4 * i) for i in range(8))
    return np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32), -1, axis)).view(np.int32)


def grouped(values: Array, size: int) -> Array:
    return values.reshape(len(values), -1, size)


def spread(of_groups: Array, size: int) -> Array:
    return of_groups.astype(np.float64).repeat(size, axis=1)


def integers(weight: Array, dtype: Any, size: int = GROUP) -> tuple[Array, Array, Array]:
    """Codes 0..15 `[N, K]`, scales and zero points `[N, K/size]` of an asymmetric rounding."""
    groups = grouped(weight.astype(np.float64), size)
    low, high = np.minimum(groups.min(2), 0), np.maximum(groups.max(2), 0)
    scale = (np.maximum(high - low, 1e-3) / 15).astype(dtype)
    zero = np.clip(np.rint(-low / scale.astype(np.float64)), 0, 15).astype(np.int64)
    codes = np.rint(weight / spread(scale, size)) + zero.repeat(size, axis=1)
    return np.clip(codes, 0, 15).astype(np.int64), scale, zero


def values_of(codes: Array, scale: Array, zero: Array, size: int = GROUP) -> Array:
    return ((codes - zero.repeat(size, axis=1)) * spread(scale, size)).astype(np.float32)


def awq(weight: Array) -> Packed:
    codes, scale, zero = integers(weight, np.float16)
    tensors = {
        ".qweight": words(codes.T, 1, AWQ_ORDER),
        ".qzeros": words(zero.T, 1, AWQ_ORDER),
        ".scales": np.ascontiguousarray(scale.T),
    }
    return tensors, values_of(codes, scale, zero)


def gptq(weight: Array, *, v1: bool = True, order: bool = False) -> Packed:
    """With an order, the columns of each group lie apart."""
    columns = weight.shape[1]
    place = np.arange(columns)
    index = (place * 7 % columns // GROUP if order else place // GROUP).astype(np.int32)
    by_group = np.argsort(index, kind="stable")
    codes, scale, zero = integers(weight[:, by_group], np.float16)
    zero = np.maximum(zero, 1)  # one less is stored, and there is nothing below zero
    values = values_of(codes, scale, zero)[:, np.argsort(by_group)]
    tensors = {
        ".qweight": words(codes[:, np.argsort(by_group)].T, 0),
        ".qzeros": words((zero - v1).T, 1),
        ".scales": np.ascontiguousarray(scale.T),
        ".g_idx": index,
    }
    return tensors, values


def gptq_symmetric(weight: Array) -> Packed:
    groups = grouped(weight.astype(np.float64), GROUP)
    scale = (np.abs(groups).max(2) / 7 + 1e-4).astype(np.float16)
    codes = np.clip(np.rint(weight / spread(scale, GROUP)) + 8, 0, 15).astype(np.int64)
    zero = np.full(scale.shape, 8)
    tensors = {
        ".qweight": words(codes.T, 0),
        ".qzeros": words((zero - 1).T, 1),
        ".scales": np.ascontiguousarray(scale.T),
        ".g_idx": (np.arange(weight.shape[1]) // GROUP).astype(np.int32),
    }
    return tensors, values_of(codes, scale, zero)


def packed_int4(weight: Array, *, symmetric: bool = True, order: bool = False) -> Packed:
    """With an order, the columns of each group lie apart."""
    place = np.arange(weight.shape[1])
    index = (place * 5 % len(place) // GROUP if order else place // GROUP).astype(np.int32)
    by_group = np.argsort(index, kind="stable")
    together = weight[:, by_group]
    codes, scale, zero = integers(together, BF16)
    if symmetric:
        groups = grouped(together.astype(np.float64), GROUP)
        scale = (np.abs(groups).max(2) / 7 + 1e-4).astype(BF16)
        codes = np.clip(np.rint(together / spread(scale, GROUP)) + 8, 0, 15).astype(np.int64)
        zero = np.full(scale.shape, 8)
    back = np.argsort(by_group)
    tensors = {
        ".weight_packed": words(codes[:, back], 1),
        ".weight_scale": scale,
        ".weight_shape": np.array(weight.shape, np.int64),
    }
    if not symmetric:
        tensors[".weight_zero_point"] = words(zero, 0)
    if order:
        tensors[".weight_g_idx"] = index
    return tensors, values_of(codes, scale, zero)[:, back]


def e2m1(units: Array) -> tuple[Array, Array]:
    """Nearest codes of values, and packed bytes, low nibble first."""
    codes = np.abs(units[..., None] - E2M1).argmin(-1).astype(np.uint8)
    return codes, codes[:, 0::2] | codes[:, 1::2] << 4


def nvfp4(weight: Array) -> Packed:
    """compressed-tensors: the global scale divides. Queries, keys and values share one."""
    divisor = np.array([1000.0 / 3], np.float32)
    blocks = grouped(weight.astype(np.float64), 16)
    scale = np.clip(np.abs(blocks).max(2) / 6 * divisor, 2.0**-9, 448).astype(E4M3)
    factor = (scale.astype(np.float32) / divisor).astype(np.float64)
    codes, packed = e2m1(weight / factor.repeat(16, axis=1))
    tensors = {
        ".weight_packed": packed,
        ".weight_scale": scale,
        ".weight_global_scale": divisor,
        ".input_global_scale": np.array([500.0], np.float32),
    }
    return tensors, (E2M1[codes] * factor.repeat(16, axis=1)).astype(np.float32)


def powers(weight: Array, largest: float) -> tuple[Array, Array]:
    """E8M0 bytes of blocks of 32 columns, and the powers of two they stand for."""
    blocks = np.abs(grouped(weight.astype(np.float64), 32)).max(2)
    exponent = np.ceil(np.log2(np.maximum(blocks, 1e-6) / largest)).astype(int)
    return (exponent + 127).astype(np.uint8), 2.0**exponent


def mxfp4(weight: Array, *, names: tuple[str, str] = (".weight_packed", ".weight_scale")) -> Packed:
    stored, factor = powers(weight, 6)
    codes, packed = e2m1(weight / factor.repeat(32, axis=1))
    if names[0] == "_blocks":
        packed = packed.reshape(len(weight), -1, 16)
    values = (E2M1[codes] * factor.repeat(32, axis=1)).astype(np.float32)
    return {names[0]: packed, names[1]: stored}, values


def mxfp8(weight: Array) -> Packed:
    stored, factor = powers(weight, 448)
    wide = factor.repeat(32, axis=1)
    elements = (weight / wide).astype(np.float32).astype(E4M3)
    values = (elements.astype(np.float64) * wide).astype(np.float32)
    return {".weight": elements, ".weight_scale": stored}, values


def fp8(weight: Array, *, scaling: str, dtype: Any = np.float32, name: str = "_scale") -> Packed:
    rows, columns = weight.shape
    blocks = (-(-rows // 128), -(-columns // 128))
    padded = np.zeros((blocks[0] * 128, blocks[1] * 128))
    padded[:rows, :columns] = np.abs(weight)
    largest = {
        "tensor": lambda: np.abs(weight).max().reshape(1),
        "channel": lambda: np.abs(weight).max(1, keepdims=True),
        "block": lambda: padded.reshape(blocks[0], 128, blocks[1], 128).max((1, 3)),
    }[scaling]()
    scale = (largest / 440 + 1e-6).astype(dtype)
    wide = scale.astype(np.float64)
    if scaling == "block":
        wide = wide.repeat(128, axis=0).repeat(128, axis=1)[:rows, :columns]
    elements = (weight / wide).astype(np.float32).astype(E4M3)
    values = (elements.astype(np.float64) * wide).astype(np.float32)
    return {".weight": elements, f".weight{name}": scale}, values


def group(bits: int, kind: str, strategy: str, **more: object) -> dict[str, object]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | more
    return {"targets": ["Linear"], "weights": weights, "input_activations": None}


def tensors_config(format_: str, **groups: object) -> dict[str, object]:
    """A `quantization_config` of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["re:.*embed_tokens.*"],
        "kv_cache_scheme": None,
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "lm_head": True}
_INT4 = group(4, "int", "group", group_size=GROUP)
_STATIC = {"dynamic": "local", "num_bits": 4, "type": "float"}
_NVFP4 = {**group(4, "float", "tensor_group", group_size=16), "input_activations": _STATIC}
_FP8_BLOCK = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}

LAYOUTS: Mapping[str, Layout] = {
    "compressed-tensors-nvfp4": Layout(
        tensors_config("nvfp4-pack-quantized", group_0=_NVFP4), nvfp4, "nvfp4"
    ),
    "compressed-tensors-int4": Layout(
        tensors_config("pack-quantized", group_0=_INT4), packed_int4, "int4"
    ),
    "compressed-tensors-int4-zeros": Layout(
        tensors_config(
            "pack-quantized",
            group_0=group(4, "int", "group", group_size=GROUP, symmetric=False),
        ),
        lambda w: packed_int4(w, symmetric=False),
        "int4",
    ),
    "compressed-tensors-int4-order": Layout(
        tensors_config("pack-quantized", group_0=_INT4),
        lambda w: packed_int4(w, order=True),
        "int4",
    ),
    "compressed-tensors-fp8-channel": Layout(
        tensors_config("float-quantized", group_0=group(8, "float", "channel")),
        lambda w: fp8(w, scaling="channel", dtype=BF16),
        "fp8",
        bits=8.6,
    ),
    "compressed-tensors-fp8-tensor": Layout(
        tensors_config("float-quantized", group_0=group(8, "float", "tensor")),
        lambda w: fp8(w, scaling="tensor", dtype=BF16),
        "fp8",
        bits=8.6,
    ),
    "compressed-tensors-mxfp4": Layout(
        tensors_config("mxfp4-pack-quantized", group_0=group(4, "float", "group", group_size=32)),
        mxfp4,
        "mxfp4",
    ),
    "compressed-tensors-mxfp8": Layout(
        tensors_config("mxfp8-quantized", group_0=group(8, "float", "group", group_size=32)),
        mxfp8,
        "fp8",
        bits=8.6,
    ),
    "fp8-block": Layout(
        _FP8_BLOCK, lambda w: fp8(w, scaling="block", name="_scale_inv"), "fp8", False, 8.6
    ),
    "awq": Layout(AWQ, awq, "int4", head=False),
    "gptq": Layout(GPTQ, gptq, "int4"),
    "gptq-order": Layout(
        {**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, v1=False, order=True),
        "int4",
    ),
    "gptq-symmetric": Layout({**GPTQ, "sym": True}, gptq_symmetric, "int4"),
    "modelopt-mxfp4": Layout(
        {"quant_method": "modelopt", "quant_algo": "mxfp4", "ignore": ["model.embed_tokens"]},
        lambda w: mxfp4(w, names=(".weight", ".weight_scale")),
        "mxfp4",
    ),
    "gpt-oss-mxfp4": Layout(
        {"quant_method": "mxfp4"},
        lambda w: mxfp4(w, names=("_blocks", "_scales")),
        "mxfp4",
        head=False,
    ),
}


def is_linear(name: str, array: Array) -> bool:
    return array.ndim == 2 and name.endswith(("_proj.weight", "lm_head.weight", "fc.weight"))


def requantize(
    dense: Path, out: Path, layout: Layout, *, head: bool = True, skip: str = ""
) -> tuple[Path, Path]:
    """A small unquantized checkpoint in a layout, and its values, unquantized in float32.

    Args:
        dense: Folder of the checkpoint.
        out: Folder for the two.
        layout: How linear layers are stored.
        head: Whether that goes for the head, where the producer can.
        skip: Modules with this in their name stay as they are.

    Returns:
        The quantized checkpoint and the one with its values.
    """
    stored: dict[str, Array] = {}
    values: dict[str, Array] = {}
    for name, array in read_tensors(dense).items():
        packs = is_linear(name, array) and ((head and layout.head) or "lm_head" not in name)
        if not packs or (skip and skip in name):
            stored[name] = values[name] = array
            continue
        module = name.removesuffix(".weight")
        tensors, exact = layout.pack(array.astype(np.float32))
        stored |= {module + ending: tensor for ending, tensor in tensors.items()}
        values[name] = exact
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    paths = out / "packed", out / "values"
    for path, tensors, more in zip(
        paths, (stored, values), ({"quantization_config": layout.config}, {}), strict=True
    ):
        path.mkdir(parents=True)
        for file in dense.iterdir():
            if file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                (path / file.name).write_bytes(file.read_bytes())
        (path / "config.json").write_text(json.dumps({**config, **more}), encoding="utf-8")
        save_file(
            {n: np.ascontiguousarray(t) for n, t in tensors.items()}, path / "model.safetensors"
        )
    return paths
