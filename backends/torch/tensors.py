"""Between NumPy arrays and tensors: element types, and copies that keep every bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edgecc.errors import UnsupportedError
from edgecc.ir.encodings import Array
from edgecc.ir.types import DType

DTYPES: Mapping[DType, torch.dtype] = {
    DType.F64: torch.float64,
    DType.F32: torch.float32,
    DType.F16: torch.float16,
    DType.BF16: torch.bfloat16,
    DType.F8E4M3: torch.float8_e4m3fn,
    DType.F8E5M2: torch.float8_e5m2,
    DType.F8E8M0: torch.float8_e8m0fnu,
    DType.I64: torch.int64,
    DType.I32: torch.int32,
    DType.I16: torch.int16,
    DType.I8: torch.int8,
    DType.U64: torch.uint64,
    DType.U32: torch.uint32,
    DType.U16: torch.uint16,
    DType.U8: torch.uint8,
    DType.BOOL: torch.bool,
}
"""PyTorch's name of each element type; 4-bit types have none that computes."""

_FROM_TORCH = {t: d for d, t in DTYPES.items()}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of an IR element type.

    Raises:
        UnsupportedError: PyTorch has none.
    """
    if dtype not in DTYPES:
        raise UnsupportedError("torch/dtype", f"PyTorch has no element type {dtype.value}")
    return DTYPES[dtype]


def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The NumPy dtype of a tensor's elements.

    Raises:
        UnsupportedError: The IR has no such element type (complex, quantized).
    """
    if dtype not in _FROM_TORCH:
        raise UnsupportedError("torch/dtype", f"the IR has no element type for {dtype}")
    return _FROM_TORCH[dtype].numpy


def to_tensor(array: Array, device: torch.device) -> Tensor:
    """A copy of an array, of any dtype the IR and PyTorch share, on a device.

    NumPy's 8- and 16-bit floats are strangers to `torch.from_numpy`: they cross as plain bytes.

    Raises:
        UnsupportedError: PyTorch has no such element type.
    """
    copied = np.array(array, order="C")  # owned, writable, and never made one-dimensional
    dtype = torch_dtype(DType.of(copied.dtype))
    flat = torch.from_numpy(copied.reshape(-1).view(np.uint8))
    return flat.view(dtype).reshape(copied.shape).to(device)


def to_array(tensor: Tensor) -> Array:
    """A copy of a tensor as a NumPy array of the same element type."""
    dtype = numpy_dtype(tensor.dtype)
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # a lone element can keep its stride
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().view(dtype).reshape(tuple(tensor.shape))


def round_to(tensor: Tensor, dtype: DType) -> Tensor:
    """Floats rounded to a narrower type and held as before; other types leave them as they are."""
    if not tensor.is_floating_point() or dtype.bits >= 32:
        return tensor
    return tensor.to(torch_dtype(dtype)).to(tensor.dtype)
