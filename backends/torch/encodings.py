"""Dequantization on tensors, one function for each weight encoding.

Written from the formats and not from `edgecc.ir.encodings`, so that the two can be compared. All
arithmetic is float32 in the documented association; the results are exact. A new encoding is one
function and one row of `DECODERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from edgecc.errors import UnsupportedError
from edgecc.ir.encodings import FP8, MXFP4, NVFP4, Dense, Encoding, Int4, Int8, Int8Block

Parts: TypeAlias = Mapping[str, Tensor]
Decoder: TypeAlias = Callable[[Any, Parts], Tensor]
"""Encoding and component tensors of a block of rows to values of those rows."""


def dense(encoding: Dense, parts: Parts) -> Tensor:
    """The elements: narrow floats widen exactly to float32, float64 and integers stay."""
    weight = parts["weight"]
    narrow = weight.dtype.is_floating_point and weight.dtype != torch.float64
    return weight.to(torch.float32) if narrow else weight


def e2m1(codes: Tensor) -> Tensor:
    """Values of 4-bit codes from their fields: 1 bit sign, 2 bits exponent (bias 1), 1 mantissa.

    Args:
        codes: u8, 0..15, any shape.

    Returns:
        float32. Minus zero, code 8, gives plus zero, as in ModelOpt.
    """
    exponent = ((codes >> 1) & 3).to(torch.float32)
    fraction = (codes & 1).to(torch.float32) / 2
    magnitude = torch.where(exponent == 0, fraction, torch.exp2(exponent - 1) * (1 + fraction))
    return torch.where(codes >= 8, 0 - magnitude, magnitude)


def nvfp4(encoding: NVFP4, parts: Parts) -> Tensor:
    """`e2m1(code) * (float32(block scale) * global scale)`, or divided by it."""
    scale = parts["weight_scale"].to(torch.float32)
    if encoding.divisor:
        scale = scale / parts["weight_global_scale"]
    else:
        scale = scale * parts["weight_scale_2"]
    return _pairs(parts["weight"]) * scale.repeat_interleave(encoding.block, dim=-1)


def mxfp4(encoding: MXFP4, parts: Parts) -> Tensor:
    """`e2m1(code) * 2^(byte - 127)`."""
    scale = parts["weight_scale"].to(torch.float32)
    return _pairs(parts["weight"]) * scale.repeat_interleave(encoding.block, dim=-1)


def _pairs(packed: Tensor) -> Tensor:
    """E2M1 values of packed bytes; the low nibble is the even column."""
    return e2m1(torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2))


def int8_block(encoding: Int8Block, parts: Parts) -> Tensor:
    """`(code - 128) * block scale`."""
    centered = parts["weight"].to(torch.int16) - 128
    return centered * parts["weight_scale"].repeat_interleave(encoding.block, dim=-1)


def fp8(encoding: FP8, parts: Parts) -> Tensor:
    """`float32(element) * float32(scale)` of the weight, the row, or the block."""
    values = parts["weight"].to(torch.float32)
    scale = parts["weight_scale"].to(torch.float32)
    if encoding.scaling == "channel":
        scale = scale[:, None]
    elif encoding.scaling == "block":
        for axis, size in enumerate(encoding.block):  # the last blocks may be partial
            scale = scale.repeat_interleave(size, dim=axis).narrow(axis, 0, values.shape[axis])
    return values * scale


def int8(encoding: Int8, parts: Parts) -> Tensor:
    """`integer * float32(scale of the row)`."""
    return parts["weight"] * parts["weight_scale"].to(torch.float32)[:, None]


def int4(encoding: Int4, parts: Parts) -> Tensor:
    """`(integer - zero point) * scale`; a byte holds a value of two rows, the even row low."""
    packed = parts["weight"].to(torch.int16)
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=1).flatten(0, 1)

    def of_columns(groups: Tensor) -> Tensor:
        if encoding.ordered:
            return groups[:, parts["group_index"].long()]
        return groups.repeat_interleave(encoding.group, dim=-1)

    values = (nibbles ^ 8) - 8
    if encoding.zero_point:
        values = values - of_columns(parts["weight_zero_point"])
    return values * of_columns(parts["weight_scale"].to(torch.float32))


DECODERS: Mapping[str, Decoder] = {
    Dense.kind: dense,
    NVFP4.kind: nvfp4,
    MXFP4.kind: mxfp4,
    Int8Block.kind: int8_block,
    FP8.kind: fp8,
    Int8.kind: int8,
    Int4.kind: int4,
}
"""Decoders by the encoding's `kind`."""


def decode(encoding: Encoding, parts: Parts) -> Tensor:
    """Exact values of a block of rows.

    Args:
        encoding: How they are stored.
        parts: Component tensors; those with rows hold the same block of rows.

    Returns:
        float32 (float64 and integers for dense weights of those types).

    Raises:
        UnsupportedError: There is no decoder for the encoding.
    """
    if encoding.kind not in DECODERS:
        raise UnsupportedError(
            "torch/encoding",
            f"the torch backend cannot decode {encoding}",
            notes=[f"it decodes {', '.join(sorted(DECODERS))}"],
        )
    return DECODERS[encoding.kind](encoding, parts)
