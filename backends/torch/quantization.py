"""Quantization of activations, written from the fields of the formats."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.encodings import NVFP4
from edgecc.ir.ops.quantization import FakeQuantizeAttributes, activation_encoding


def fake_quantize(call: Call[FakeQuantizeAttributes]) -> Tensor:
    """Rounded to the format and widened; 16-bit values are divided and multiplied in float32."""
    (x,) = call.operands
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = call.weights[0].dense().to(wide.dtype)
    encoding = activation_encoding(call.attrs.encoding)
    if isinstance(encoding, NVFP4):
        rounded = _nvfp4(wide, scale, encoding.block)
    else:
        rounded = _e4m3(wide / scale) * scale
    return (rounded + 0.0).to(x.dtype)


def _nvfp4(x: Tensor, scale: Tensor, block: int) -> Tensor:
    """Blocks along the last axis, each with a scale of its own."""
    blocks = torch.unflatten(x, -1, (x.shape[-1] // block, block))
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    inner = _e4m3((largest / (6 * scale)).clamp(min=2.0**-9))
    factor = torch.where(largest == 0, 1.0, inner) * scale
    return (_e2m1(blocks / factor) * factor).flatten(-2)


def _e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, 1/2, 1, 3/2, 2, 3, 4, 6: steps double at 2 and at 4."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).to(x.dtype)
    return torch.copysign((torch.round(size / step) * step).clamp(max=6), x)


def _e4m3(x: Tensor) -> Tensor:
    """Nearest number of 4 significant bits, in steps of at least 2^-9, up to 448."""
    exponent = torch.frexp(x).exponent.clamp(min=-5) - 4
    step = torch.ldexp(torch.ones_like(x), exponent)
    return (torch.round(x / step) * step).clamp(-448, 448)


KERNELS: Mapping[str, Kernel] = {"fake_quantize": fake_quantize}
