"""Recognizing stored layouts edgecc cannot read yet, by tensor names and dtypes.

A module's layout is decided from its own tensors only: names, dtypes and the shapes of scales. The
names are those of ModelOpt 0.47, compressed-tensors 0.20, AutoAWQ, GPTQ and bitsandbytes exports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from edgecc.errors import UnsupportedError
from edgecc.frontends.safetensors_file import TensorInfo
from edgecc.ir.types import DType

SUPPORTED = (
    "supported now: unquantized weights, and ModelOpt NVFP4, W4A16_NVFP4, FP8, "
    "FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, alone or mixed"
)

# Suffix after the module name -> who writes such a tensor.
_SIDECARS: Mapping[str, str] = {
    ".g_idx": "GPTQ",
    ".qweight": "AWQ or GPTQ",
    ".weight_packed": "compressed-tensors",
    ".weight_global_scale": "compressed-tensors NVFP4",
    ".weight_scale_inv": "fine-grained FP8 (weight_scale_inv)",
    ".weight.absmax": "bitsandbytes 4-bit",
    ".weight.quant_map": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes 8-bit",
    "_blocks": "MXFP4",
    ".pre_quant_scale": "ModelOpt AWQ",
    ".svdquant_lora_a": "ModelOpt NVFP4_SVD",
}
_SCALE_BYTES = (DType.U8, DType.F8E8M0)


def foreign_layout(
    tensors: Mapping[str, TensorInfo], module: str, shape: tuple[int, ...]
) -> str | None:
    """Name of the unsupported layout a module is stored in, or None.

    Args:
        tensors: All tensors of the checkpoint.
        module: Module name; its weight is `module + ".weight"`.
        shape: Logical shape the model needs.
    """
    for suffix, producer in _SIDECARS.items():
        if module + suffix in tensors:
            return producer
    weight = tensors.get(f"{module}.weight")
    decide = _BY_DTYPE.get(weight.dtype) if weight else None
    if weight is None or decide is None:
        return None
    return decide(weight, tensors.get(f"{module}.weight_scale"), shape)


def foreign_tensors(names: Iterable[str]) -> tuple[str, str, int] | None:
    """Producer, first name and count of tensors whose name alone shows an unsupported layout."""
    found = [(producer, n) for n in names for s, producer in _SIDECARS.items() if n.endswith(s)]
    return (*found[0], len(found)) if found else None


def unsupported(method: str, where: str, *notes: str) -> UnsupportedError:
    """The error for a quantization method or layout that is not supported."""
    return UnsupportedError(
        "quant/unsupported-method",
        f"weights quantized with {method} are not supported",
        where=where,
        notes=notes,
        help=SUPPORTED,
    )


def _fp8(_: TensorInfo, scale: TensorInfo | None, shape: tuple[int, ...]) -> str | None:
    return "MXFP8" if scale is not None and scale.dtype in _SCALE_BYTES else None


def _bytes(weight: TensorInfo, scale: TensorInfo | None, shape: tuple[int, ...]) -> str | None:
    """U8 holds NVFP4 (packed along columns) or something else: its scale tells which."""
    if scale is None or len(shape) != 2:
        return None
    rows, columns = shape
    if scale.dtype in _SCALE_BYTES:
        return "MXFP4"
    if scale.dtype is not DType.F8E4M3 and weight.shape == (rows // 2, columns):
        return "ModelOpt INT4"
    if weight.shape == (rows, columns // 2) and scale.shape == (rows, columns // 32):
        return "W4A8_NVFP4_FP8 (FP4 in blocks of 32)"
    return None


_BY_DTYPE: Mapping[
    DType, Callable[[TensorInfo, TensorInfo | None, tuple[int, ...]], str | None]
] = {
    DType.F8E4M3: _fp8,
    DType.F8E5M2: lambda *_: "FP8 E5M2",
    DType.U8: _bytes,
    DType.I8: lambda *_: "INT8",
    DType.I32: lambda *_: "packed 32-bit integers",
    DType.U32: lambda *_: "MLX",
}
