"""FP4 arithmetic on NumPy arrays: the one place that knows E2M1 codes and how scales combine.

NumPy only: the IR and the runtime's loader both use it. NVFP4 as NVIDIA ModelOpt 0.47 writes it,
and quantization bit for bit as it does, and as compressed-tensors 0.20 stores it, whose global
scale is a divisor; MXFP4, E2M1, E4M3 and E8M0 as in the OCP Microscaling specification.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

E2M1_VALUES: NDArray[np.float32] = np.array(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0],
    dtype=np.float32,
)
"""Value of each of the 16 E2M1 codes: one sign, two exponent and one mantissa bit, bias 1.

Code 8, minus zero, reads as +0 like in ModelOpt, so that 8-bit integer codes can carry it as well.
"""

_BYTES = np.arange(256)
_INT8_CODES = (128 + 2 * E2M1_VALUES).astype(np.uint8)


def _words(values: NDArray[Any], word: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """Both elements of each byte as one word: faster to look up than rows of a table."""
    return np.stack([values[_BYTES & 15], values[_BYTES >> 4]], axis=1).view(word)[:, 0]


_PAIRS = _words(E2M1_VALUES, np.uint64)
_INT8_PAIRS = _words(_INT8_CODES, np.uint16)


def unpack_e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """E2M1 values of packed bytes, low nibble first: u8 `[N, K/2]` to f32 `[N, K]`."""
    return _PAIRS[np.ascontiguousarray(packed)].view(np.float32)


def block_scales(
    scale: NDArray[Any], global_scale: NDArray[Any] | np.float32, *, divisor: bool = False
) -> NDArray[np.float32]:
    """`float32(scale) * global`: the factor of each block, f32 `[N, K/block]`.

    With `divisor` it is `float32(scale) / global`: a product with the reciprocal would round twice.
    """
    combine = np.divide if divisor else np.multiply
    factors: NDArray[np.float32] = combine(
        scale.astype(np.float32), np.float32(global_scale), dtype=np.float32
    )
    return factors


def dequantize(
    packed: NDArray[np.uint8],
    scale: NDArray[Any],
    global_scale: NDArray[Any],
    *,
    divisor: bool = False,
) -> NDArray[np.float32]:
    """Exact values `e2m1(code) * (float32(scale) * global)`, both products in float32.

    Args:
        packed: u8 `[N, K/2]`, element 2j in the low nibble of byte j.
        scale: f8e4m3 `[N, K/block]`.
        global_scale: f32 scalar.
        divisor: Whether scales are divided by the global one, as in compressed-tensors.

    Returns:
        f32 `[N, K]`, bit for bit what the producer's dequantization gives in float32.
    """
    return _scaled(packed, block_scales(scale, global_scale, divisor=divisor))


def dequantize_mx(packed: NDArray[np.uint8], scale: NDArray[Any]) -> NDArray[np.float32]:
    """Exact values of MXFP4, `e2m1(code) * 2^(byte - 127)`.

    Args:
        packed: u8 `[N, K/2]`, element 2j in the low nibble of byte j.
        scale: f8e8m0 `[N, K/block]`.

    Returns:
        f32 `[N, K]`.
    """
    return _scaled(packed, scale.astype(np.float32))


def _scaled(packed: NDArray[np.uint8], factors: NDArray[np.float32]) -> NDArray[np.float32]:
    """E2M1 values times the factors of their blocks."""
    values = unpack_e2m1(packed)
    rows, columns = values.shape
    blocked = values.reshape(rows, factors.shape[1], columns // max(1, factors.shape[1]))
    return np.multiply(blocked, factors[:, :, None], out=blocked).reshape(rows, columns)


def int8_codes(
    packed: NDArray[np.uint8],
    scale: NDArray[Any],
    global_scale: NDArray[Any],
    *,
    divisor: bool = False,
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The same values as `(code - 128) * scale`, exactly.

    Doubling E2M1 gives integers, and halving a float32 is exact.

    Returns:
        Codes u8 `[N, K]` and scales f32 `[N, K/block]`.
    """
    codes = _INT8_PAIRS[np.ascontiguousarray(packed)].view(np.uint8)
    return codes, block_scales(scale, global_scale, divisor=divisor) * np.float32(0.5)


E2M1_MAX, E4M3_MAX = np.float32(6), np.float32(448)
_E4M3_MIN = np.float32(2.0**-9)
_ONE = np.float32(1)


def global_scale(largest: np.floating[Any] | float) -> np.float32:
    """`weight_scale_2` of a weight whose largest magnitude is given: largest / (6 * 448).

    A weight of zeros gets 1, and no scale is subnormal: a loader must find a positive number.
    """
    if largest == 0:
        return _ONE
    scale = np.float32(largest) / (E2M1_MAX * E4M3_MAX)
    return max(scale, np.float32(np.finfo(np.float32).tiny))


def quantize(
    values: NDArray[np.float32], global_scale: np.float32, block: int = 16
) -> tuple[NDArray[np.uint8], NDArray[Any]]:
    """Codes and block scales of rows, given the scale of the whole weight.

    The scale of a block is its largest magnitude / (6 * global), clamped to [2^-9, 448] and rounded
    to E4M3; 1 for a block of zeros. Codes are nearest to value / (scale * global), ties to the even
    mantissa, and saturate at 6. All steps in float32.

    Args:
        values: f32 `[N, K]`, finite; K even and a multiple of the block.
        global_scale: See the function of that name.
        block: Columns of a block.

    Returns:
        Packed codes u8 `[N, K/2]` and scales f8e4m3 `[N, K/block]`.
    """
    rows, columns = values.shape
    stored, rounded = _round(values.reshape(rows, columns // block, block), global_scale)
    codes = rounded.view(np.uint8).reshape(rows, columns)
    codes[values == 0] = 0  # ModelOpt takes the sign from `value < 0`: minus zero has none
    return np.bitwise_or(codes[:, 0::2], codes[:, 1::2] << 4, dtype=np.uint8), stored[..., 0]


def fake_quantize(
    values: NDArray[np.floating[Any]], global_scale: np.floating[Any], block: int = 16
) -> NDArray[np.floating[Any]]:
    """Values rounded as `quantize` does and widened again: `e2m1(code) * (scale * global)`.

    Args:
        values: Float32 or float64 `[..., K]`, K a multiple of the block; quotients and products
            are in this type.
        global_scale: Of the same type: `input_scale` of ModelOpt.
        block: Columns of a block.

    Returns:
        `[..., K]` of the same type, never -0.
    """
    blocked = values.reshape(*values.shape[:-1], values.shape[-1] // block, block)
    with np.errstate(invalid="ignore"):  # NaN goes through
        stored, codes = _round(blocked, global_scale)
        factors = stored.astype(values.dtype) * global_scale
        wide: NDArray[Any] = codes.astype(values.dtype) * factors + 0
    return wide.reshape(values.shape)


def _round(
    blocked: NDArray[np.floating[Any]], global_scale: np.floating[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scale f8e4m3 `[..., 1]` and codes f4e2m1 `[..., block]` of each block, the last axis."""
    largest = np.max(np.abs(blocked), axis=-1, keepdims=True)
    scale = largest / (E2M1_MAX * global_scale)
    scale[largest == 0] = _ONE
    stored = np.clip(scale, _E4M3_MIN, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    factors = stored.astype(blocked.dtype) * global_scale
    return stored, (blocked / factors).astype(ml_dtypes.float4_e2m1fn)
