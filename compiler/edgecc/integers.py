"""Integer weight formats on NumPy arrays: INT8 and INT4, weights only.

NumPy only: the IR and the runtime's loader both use it. Layouts as NVIDIA ModelOpt 0.47 writes
them: INT4 is packed along the rows of a weight, unlike NVFP4. How AutoAWQ, GPTQ and
compressed-tensors pack 4 bits into 32-bit words is in `edgecc.ir.words`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unpack_int4(packed: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Signed values of packed bytes, low nibble first: u8 `[N/2, K]` to i8 `[N, K]`.

    Byte row r holds row 2r in the low and row 2r+1 in the high nibble, in two's complement.
    """
    rows, columns = packed.shape
    out = np.empty((rows, 2, columns), dtype=np.int8)
    signed = packed.view(np.int8)
    out[:, 0] = (signed << 4) >> 4
    out[:, 1] = signed >> 4
    return out.reshape(2 * rows, columns)


def pack_int4(values: NDArray[np.int8]) -> NDArray[np.uint8]:
    """The inverse of `unpack_int4`: i8 `[N, K]` within -8..7 to u8 `[N/2, K]`; N is even."""
    rows, columns = values.shape
    pairs = values.reshape(rows // 2, 2, columns).view(np.uint8)
    packed: NDArray[np.uint8] = np.bitwise_or(pairs[:, 0] & 15, pairs[:, 1] << 4, dtype=np.uint8)
    return packed


def dequantize_int4(
    packed: NDArray[np.uint8],
    scale: NDArray[Any],
    zero_point: NDArray[np.int8] | None = None,
    group_index: NDArray[np.int32] | None = None,
) -> NDArray[np.float32]:
    """Exact values `(q - zero) * float32(scale)` of groups of columns, the product in float32.

    Args:
        packed: u8 `[N/2, K]`, see `unpack_int4`.
        scale: f32, bf16 or f16 `[N, groups]`.
        zero_point: `[N, groups]`; zero if it is not given.
        group_index: `[K]`, the group of each column; groups are equally many neighbours if it is
            not given.

    Returns:
        f32 `[N, K]`.
    """
    values = unpack_int4(packed).astype(np.float32)
    factors = scale.astype(np.float32)
    if group_index is not None:
        if zero_point is not None:
            values -= zero_point[:, group_index]
        values *= factors[:, group_index]
        return values
    rows, columns = values.shape
    blocked = values.reshape(rows, scale.shape[1], columns // max(1, scale.shape[1]))
    if zero_point is not None:
        blocked -= zero_point[:, :, None]
    blocked *= factors[:, :, None]
    return values


def dequantize_int8(values: NDArray[np.int8], scale: NDArray[Any]) -> NDArray[np.float32]:
    """Exact values `q * float32(scale)`, the product in float32: i8 `[N, K]`, scale `[N]`."""
    out = values.astype(np.float32)
    return np.multiply(out, scale.astype(np.float32)[:, None], out=out)


def quantize_int4(
    values: NDArray[np.float32], group: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Symmetric 4-bit values: scale = largest magnitude of a group / 7, nearest, ties to even.

    Args:
        values: f32 `[N, K]`, finite; N even, K a multiple of the group.
        group: Columns of a group.

    Returns:
        Packed values u8 `[N/2, K]`, see `unpack_int4`, and scales f32 `[N, K/group]`.
    """
    rows, columns = values.shape
    blocked = values.reshape(rows, columns // group, group)
    scale = _scale(np.max(np.abs(blocked), axis=2), 7)
    rounded = np.clip(np.rint(blocked / scale[:, :, None]), -8, 7).astype(np.int8)
    return pack_int4(rounded.reshape(rows, columns)), scale


def quantize_int8(
    values: NDArray[np.float32],
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Symmetric 8-bit values: scale = largest magnitude of a row / 127, nearest, ties to even.

    Returns:
        Values i8 `[N, K]` and scales f32 `[N]`.
    """
    scale = _scale(np.max(np.abs(values), axis=1, initial=0), 127)
    return np.clip(np.rint(values / scale[:, None]), -128, 127).astype(np.int8), scale


def _scale(largest: NDArray[np.float32], steps: int) -> NDArray[np.float32]:
    """Largest / steps; 1 where all values are zero, and never subnormal."""
    scale = np.maximum(largest / np.float32(steps), np.finfo(np.float32).tiny)
    return np.where(largest == 0, np.float32(1), scale)
