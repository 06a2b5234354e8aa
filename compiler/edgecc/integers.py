"""Integer weight formats on NumPy arrays: symmetric INT8 and INT4, weights only.

NumPy only: the IR and the runtime's loader both use it. Layouts as NVIDIA ModelOpt 0.47 writes
them: INT4 is packed along the rows of a weight, unlike NVFP4.
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


def dequantize_int4(packed: NDArray[np.uint8], scale: NDArray[Any]) -> NDArray[np.float32]:
    """Exact values `q * scale` of groups of columns, the product in float32.

    Args:
        packed: u8 `[N/2, K]`, see `unpack_int4`.
        scale: f32 `[N, K/group]`.

    Returns:
        f32 `[N, K]`.
    """
    values = unpack_int4(packed).astype(np.float32)
    rows, columns = values.shape
    blocked = values.reshape(rows, scale.shape[1], columns // max(1, scale.shape[1]))
    blocked *= scale[:, :, None]
    return values


def dequantize_int8(values: NDArray[np.int8], scale: NDArray[Any]) -> NDArray[np.float32]:
    """Exact values `q * float32(scale)`, the product in float32: i8 `[N, K]`, scale `[N]`."""
    out = values.astype(np.float32)
    return np.multiply(out, scale.astype(np.float32)[:, None], out=out)
