"""FP8 (E4M3) arithmetic on NumPy arrays: how scales of a tensor, its rows or its blocks combine.

NumPy only: the IR and the runtime's loader both use it. A scale is a factor in every producer's
files, `weight_scale_inv` included: value = fp8 * scale.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def dequantize(
    values: NDArray[Any], scale: NDArray[Any], block: tuple[int, int] | None = None
) -> NDArray[np.float32]:
    """Exact values `float32(fp8) * float32(scale)`, the product in float32.

    Args:
        values: f8e4m3 `[N, K]`.
        scale: Any float: scalar; `[N]`, one factor a row; or with `block` `[cdiv(N, R), cdiv(K,
            C)]`, one factor a block.
        block: Rows R and columns C of one block; the last ones may be partial.

    Returns:
        f32 `[N, K]`.
    """
    out = values.astype(np.float32)
    factors = scale.astype(np.float32)
    if block is None:
        return np.multiply(out, factors.reshape(-1, 1) if factors.ndim else factors, out=out)
    rows, columns = out.shape
    by_row = np.repeat(factors, block[0], axis=0)[:rows]
    for index, start in enumerate(range(0, columns, block[1])):
        out[:, start : start + block[1]] *= by_row[:, index, None]
    return out
