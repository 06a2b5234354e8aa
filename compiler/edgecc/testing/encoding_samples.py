"""Random weights of every encoding.

`ENCODINGS` lists, for each class of encodings, the instances that are drawn. A class without a line
here fails a test; its component arrays need no code of their own as long as random numbers in
components whose name says `scale` may be any positive ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from math import prod

import numpy as np

from edgecc.ir.encodings import (
    FP8,
    MXFP4,
    NVFP4,
    Component,
    Dense,
    Encoding,
    Int4,
    Int8,
    Int8Block,
    IntShape,
)
from edgecc.ir.encodings.base import Array
from edgecc.ir.types import DType
from edgecc.ir.weights import Inline

ENCODINGS: Mapping[type[Encoding], tuple[Encoding, ...]] = {
    Dense: tuple(
        Dense(d) for d in (DType.F32, DType.BF16, DType.F16, DType.F64, DType.F8E4M3, DType.F8E5M2)
    ),
    NVFP4: (
        NVFP4(4),
        NVFP4(2),
        NVFP4(4, input_scale=True),
        NVFP4(4, divisor=True, input_scale=True),
    ),
    MXFP4: (MXFP4(4), MXFP4(2)),
    FP8: (
        FP8("tensor"),
        FP8("channel", scale_dtype=DType.BF16),
        FP8("block", (2, 2)),
        FP8("block", (1, 4), scale_dtype=DType.F8E8M0),
        FP8("tensor", input_scale=True),
    ),
    Int8: (Int8(), Int8(DType.BF16)),
    Int4: (
        Int4(4),
        Int4(1),
        Int4(4, scale_dtype=DType.F16),
        Int4(2, zero_point=True, scale_dtype=DType.BF16),
        Int4(2, zero_point=True, ordered=True),
        Int4(2, ordered=True),
    ),
    Int8Block: (Int8Block(4), Int8Block(3), Int8Block(1)),
}
"""Small blocks, so that small matrices have several."""


@functools.cache
def encodings_of(shape: IntShape) -> tuple[Encoding, ...]:
    """The listed encodings that can hold a weight of this shape, dense ones first."""
    return tuple(e for listed in ENCODINGS.values() for e in listed if _fits(e, shape))


def _fits(encoding: Encoding, shape: IntShape) -> bool:
    try:
        encoding.components(shape)
    except ValueError:
        return False
    return True


def random_weight(encoding: Encoding, shape: IntShape, seed: int) -> Inline:
    """Bytes of a weight, fixed by the arguments.

    Scalars are equal for seeds 0 and 1, so that those weights can be stacked, and others for 2.
    """
    rng = np.random.default_rng([seed, *shape, *str(encoding).encode()])
    parts = encoding.components(shape).items()
    return Inline(tuple((name, _fill(rng, name, c, seed).tobytes()) for name, c in parts))


def _fill(rng: np.random.Generator, name: str, component: Component, seed: int) -> Array:
    dtype, shape = component.dtype, component.shape
    if component.below is not None:
        steps = np.arange(prod(shape)) % max(1, component.below)
        chosen = component.below - 1 - steps if seed == 2 else steps
        return chosen.reshape(shape).astype(dtype.numpy)
    if "scale" in name:
        if prod(shape) == 1 and not component.rows:
            return np.full(shape, 0.125 if seed == 2 else 0.0625).astype(dtype.numpy)
        return rng.uniform(0.25, 2, shape).astype(dtype.numpy)
    if dtype.is_float:
        return (rng.standard_normal(shape) / 2).astype(dtype.numpy)
    bits = rng.integers(0, 256, (*shape, dtype.numpy.itemsize), dtype=np.uint8)
    if dtype.bits < 8:
        bits &= (1 << dtype.bits) - 1
    return bits.view(np.uint8).reshape(*shape, dtype.numpy.itemsize).view(dtype.numpy)[..., 0]
