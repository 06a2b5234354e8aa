"""Reading every unquantized value once: a NaN or an infinity would silently become NaN logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.ir.types import DType

_CHUNK = 1 << 20
"""Values looked at together: few enough to stay in a cache."""

_EXPONENTS: Mapping[DType, int] = {
    DType.BF16: 0x7F80,
    DType.F16: 0x7C00,
    DType.F32: 0x7F80_0000,
    DType.F64: 0x7FF0_0000_0000_0000,
}
"""The exponent bits of each dtype: all of them are set in a NaN or an infinity, and only there."""


def check_finite(checkpoint: Checkpoint, key: str) -> None:
    """Check that a tensor of floating-point numbers has no NaN and no infinity.

    Tensors of other dtypes have neither, or are checked with their scales.

    Raises:
        InputError: It has one; its place is named.
    """
    info = checkpoint.info(key)
    exponent = _EXPONENTS.get(info.dtype)
    if exponent is None or 0 in info.shape:
        return
    if not info.shape:
        _check(checkpoint, key, checkpoint.read(key).reshape(1), exponent, 0)
        return
    rows = info.shape[0]
    step = max(1, _CHUNK * rows // max(1, int(np.prod(info.shape))))
    for start in range(0, rows, step):
        values = checkpoint.read(key, start, min(start + step, rows))
        _check(checkpoint, key, values, exponent, start)


def _check(
    checkpoint: Checkpoint, key: str, values: NDArray[Any], exponent: int, start: int
) -> None:
    bits = values.view(f"u{values.itemsize}")
    mask = bits.dtype.type(exponent)
    masked = bits & mask
    if masked.max() != mask:
        return
    bad = np.argwhere(masked == mask)
    place = [int(i) for i in bad[0]]
    place[0] += start
    value = float(values[tuple(bad[0])])
    raise InputError(
        "checkpoint/not-finite",
        f"the value at {place} is {'NaN' if np.isnan(value) else 'infinite'}",
        where=checkpoint.location(key),
        notes=(f"{len(bad)} such values in rows {start}..{start + len(values) - 1}",),
        help="the file is damaged, or training failed: fetch or export the checkpoint again",
    )
