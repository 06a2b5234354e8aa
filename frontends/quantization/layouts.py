"""Recognizing stored layouts, by tensor names, dtypes and the shapes of scales.

A module's layout is decided from its own tensors only. The names are those of ModelOpt 0.47,
compressed-tensors 0.20, AutoAWQ 0.2, GPTQModel 7.7, gpt-oss, transformers 5.24 and bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from edgecc.errors import UnsupportedError
from edgecc.frontends.safetensors_file import TensorInfo
from edgecc.ir.types import DType

SUPPORTED = (
    "supported now: unquantized weights; ModelOpt NVFP4, W4A16_NVFP4, FP8, "
    "FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP4, MXFP8, alone or mixed; compressed-tensors NVFP4, "
    "FP8, MXFP4, MXFP8 and 4-bit integers; FP8 in blocks (weight_scale_inv); AWQ (gemm) and GPTQ "
    "with 4 bits; MXFP4 of gpt-oss"
)

EXPONENTS = (DType.U8, DType.F8E8M0)
"""What scales that are powers of two are stored in."""


@dataclass(frozen=True, slots=True)
class Sidecar:
    """A tensor whose name alone shows that weights are quantized.

    Attributes:
        producer: Who writes such a tensor.
        tensor: Its name.
        count: How many end like this.
        is_read: Whether the layout is one that is read.
    """

    producer: str
    tensor: str
    count: int
    is_read: bool


# Suffix after the module name -> who writes such a tensor.
_READ: Mapping[str, str] = {
    ".qweight": "AWQ or GPTQ",
    ".g_idx": "GPTQ",
    ".weight_packed": "compressed-tensors",
    ".weight_global_scale": "compressed-tensors NVFP4",
    ".weight_scale_inv": "fine-grained FP8 (weight_scale_inv)",
    "_blocks": "MXFP4",
}
_NOT_READ: Mapping[str, str] = {
    ".weight.absmax": "bitsandbytes 4-bit",
    ".weight.quant_map": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes 8-bit",
    ".pre_quant_scale": "ModelOpt AWQ",
    ".svdquant_lora_a": "ModelOpt NVFP4_SVD",
    ".bitmask": "compressed-tensors sparse-bitmask (sparse weights)",
    ".meta": "compressed-tensors marlin-24 (sparse weights)",
}


def foreign_layout(
    tensors: Mapping[str, TensorInfo], module: str, shape: tuple[int, ...]
) -> str | None:
    """Name of the unsupported layout a module is stored in, or None.

    Args:
        tensors: All tensors of the checkpoint.
        module: Module name.
        shape: Logical shape the model needs.
    """
    for suffix, producer in _NOT_READ.items():
        if module + suffix in tensors:
            return producer
    weight = tensors.get(f"{module}.weight")
    decide = _BY_DTYPE.get(weight.dtype) if weight else None
    if weight is None or decide is None:
        return None
    return decide(weight, tensors.get(f"{module}.weight_scale"), shape)


def first_sidecar(names: Iterable[str]) -> Sidecar | None:
    """The first tensor that gives a quantized layout away, and how many there are like it."""
    every = {**_NOT_READ, **_READ}
    found = [(suffix, name) for name in names for suffix in every if name.endswith(suffix)]
    if not found:
        return None
    suffix, name = min(found, key=lambda item: list(every).index(item[0]))
    return Sidecar(every[suffix], name, sum(s == suffix for s, _ in found), suffix in _READ)


def unsupported(method: str, where: str, *notes: str) -> UnsupportedError:
    """The error for a quantization method or layout that is not supported."""
    return UnsupportedError(
        "quant/unsupported-method",
        f"weights quantized with {method} are not supported",
        where=where,
        notes=notes,
        help=SUPPORTED,
    )


def _bytes(weight: TensorInfo, scale: TensorInfo | None, shape: tuple[int, ...]) -> str | None:
    """U8 holds FP4 (packed along columns) or something else: its scale tells which."""
    if scale is None or len(shape) != 2:
        return None
    rows, columns = shape
    if scale.dtype not in (*EXPONENTS, DType.F8E4M3) and weight.shape == (rows // 2, columns):
        return "ModelOpt INT4"
    if weight.shape == (rows, columns // 2) and scale.shape == (rows, columns // 32):
        return None if scale.dtype in EXPONENTS else "W4A8_NVFP4_FP8 (FP4 in blocks of 32)"
    return None


_BY_DTYPE: Mapping[
    DType, Callable[[TensorInfo, TensorInfo | None, tuple[int, ...]], str | None]
] = {
    DType.F8E5M2: lambda *_: "FP8 E5M2",
    DType.U8: _bytes,
    DType.I8: lambda *_: "INT8",
    DType.I32: lambda *_: "packed 32-bit integers",
    DType.U32: lambda *_: "MLX",
}
