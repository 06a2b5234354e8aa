"""FP8 (E4M3) arithmetic on NumPy arrays: how scales of a tensor, its rows or its blocks combine.

NumPy only: the IR and the runtime's loader both use it. A scale is a factor in every producer's
files, `weight_scale_inv` included: value = fp8 * scale. Quantization is that of ModelOpt 0.47.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_E4M3_VALUES: NDArray[np.float32] = (
    np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
)


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
    out: NDArray[np.float32] = _E4M3_VALUES[values.view(np.uint8)]  # faster than converting
    return np.multiply(out, _spread(scale.astype(np.float32), out.shape, block), out=out)


E4M3_MAX = np.float32(448)


def scale_of(largest: NDArray[Any]) -> NDArray[np.float32]:
    """The scale for each largest magnitude: largest / 448; 1 where all values are zero."""
    found = np.asarray(largest, np.float32)
    scale = np.maximum(found / E4M3_MAX, np.finfo(np.float32).tiny)
    return np.where(found == 0, np.float32(1), scale)


def quantize(
    values: NDArray[np.float32], scale: NDArray[Any], block: tuple[int, int] | None = None
) -> NDArray[Any]:
    """`value / scale` rounded to nearest even in E4M3, saturating: f32 `[N, K]` to f8e4m3.

    Args:
        values: Finite values.
        scale: See `dequantize`.
        block: See `dequantize`.
    """
    scaled = values / _spread(scale.astype(np.float32), values.shape, block)
    rounded: NDArray[Any] = np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    return rounded


def fake_quantize(
    values: NDArray[np.floating[Any]], scale: np.floating[Any]
) -> NDArray[np.floating[Any]]:
    """Values rounded to E4M3 with a static scale, saturating, and widened: `e4m3(x / s) * s`.

    Args:
        values: Float32 or float64, any shape; the quotient and the product are in this type.
        scale: Of the same type: `input_scale` of ModelOpt.

    Returns:
        The same shape and type, never -0.
    """
    with np.errstate(invalid="ignore"):  # NaN goes through
        codes = np.clip(values / scale, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    wide: NDArray[Any] = codes.astype(values.dtype) * scale + 0
    return wide


def block_scales(values: NDArray[np.float32], block: tuple[int, int]) -> NDArray[np.float32]:
    """Scales `[cdiv(N, R), cdiv(K, C)]` of blocks of R x C, from each block's largest magnitude."""
    rows, columns = values.shape
    largest = np.zeros((-(-rows // block[0]), -(-columns // block[1])), np.float32)
    for i, j in np.ndindex(*largest.shape):
        part = values[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        largest[i, j] = np.max(np.abs(part))
    return scale_of(largest)


def _spread(
    scale: NDArray[np.float32], shape: tuple[int, ...], block: tuple[int, int] | None
) -> NDArray[np.float32]:
    """Scales in a shape that broadcasts over `[N, K]`."""
    if block is None:
        return scale.reshape(-1, 1) if scale.ndim else scale
    by_row = np.repeat(scale, block[0], axis=0)[: shape[0]]
    return np.repeat(by_row, block[1], axis=1)[:, : shape[1]]
