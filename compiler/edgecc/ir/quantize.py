"""From values to any encoding that can be made by rounding: one function for each.

The arithmetic is in `edgecc.nvfp4`, `edgecc.fp8` and `edgecc.integers`; here encodings are mapped
to it. Everything works on a block of rows that starts at a row group, given the largest magnitude
of the whole weight where the encoding has a scale for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from edgecc import fp8, integers, nvfp4
from edgecc.ir.encodings import FP8, NVFP4, Array, Encoding, Int4, Int8, parse_encoding
from edgecc.ir.types import DType

_AS_STORED = ("input_scale", "divisor", "zero_point", "ordered")
"""Variants of encodings that are read and not made."""

Largest: TypeAlias = Callable[[], np.floating[Any]]
"""Gives the largest magnitude of a weight; called only where it is needed, for it reads it all."""


def target_encoding(text: str) -> Encoding:
    """The encoding to quantize to.

    Raises:
        ValueError: No such encoding, or values cannot be quantized to it: it has activation scales
            (they need calibration), scales of 16 bits, a divisor, zero points or an order.
    """
    encoding = parse_encoding(text)
    if (
        type(encoding) not in _QUANTIZERS
        or any(getattr(encoding, flag, False) for flag in _AS_STORED)
        or getattr(encoding, "scale_dtype", DType.F32) is not DType.F32
    ):
        raise ValueError(f"weights cannot be quantized to {encoding}")
    return encoding


def has_global_scale(encoding: Encoding) -> bool:
    """Whether one scale is shared by all rows, so that all of them must be read to find it."""
    return any(not c.rows for c in encoding.components((256, 256)).values())


def quantize(encoding: Encoding, values: Array, largest: Largest) -> dict[str, Array]:
    """Component arrays of rows.

    Args:
        encoding: One that `target_encoding` gives.
        values: f32 `[rows, K]`, finite.
        largest: Largest magnitude of the whole weight (and of those that share its scale).
    """
    return _QUANTIZERS[type(encoding)](encoding, values, largest)


def _nvfp4(encoding: NVFP4, values: Array, largest: Largest) -> dict[str, Array]:
    scale = nvfp4.global_scale(largest())
    codes, block_scales = nvfp4.quantize(values, scale, encoding.block)
    return {"weight": codes, "weight_scale": block_scales, "weight_scale_2": np.array(scale)}


def _fp8(encoding: FP8, values: Array, largest: Largest) -> dict[str, Array]:
    block = None
    if encoding.scaling == "tensor":
        scale = fp8.scale_of(np.array(largest()))
    elif encoding.scaling == "channel":
        scale = fp8.scale_of(np.max(np.abs(values), axis=1, initial=0))
    else:
        block = encoding.block
        scale = fp8.block_scales(values, block)
    return {"weight": fp8.quantize(values, scale, block), "weight_scale": scale}


def _int8(encoding: Int8, values: Array, largest: Largest) -> dict[str, Array]:
    codes, scale = integers.quantize_int8(values)
    return {"weight": codes, "weight_scale": scale}


def _int4(encoding: Int4, values: Array, largest: Largest) -> dict[str, Array]:
    codes, scale = integers.quantize_int4(values, encoding.group)
    return {"weight": codes, "weight_scale": scale}


_QUANTIZERS: Mapping[type[Encoding], Callable[..., dict[str, Array]]] = {
    NVFP4: _nvfp4,
    FP8: _fp8,
    Int8: _int8,
    Int4: _int4,
}
