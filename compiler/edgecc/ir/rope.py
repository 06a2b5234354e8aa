"""Rotary position embedding: parameters, inverse frequencies and cos/sin tables.

The formulas and their order of float32 operations are those of transformers 5.24
(`modeling_rope_utils`), because at long positions the float32 rounding of the angle is part of what
a model was trained with: at position 262143 it reaches 0.017 rad. Only powers, cosines and sines
are computed in float64 and rounded, so that tables do not depend on the host's vector library.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgecc.errors import UnsupportedError

Float32Array = NDArray[np.float32]

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types that can be computed; `dynamic` and `longrope` depend on the length at run time."""

AXIAL = "axial"
"""Type of vision towers: half of the dims turn with the row of a patch, half with its column, by
the same frequencies."""


@dataclass(frozen=True, slots=True)
class RopeParams:
    """What fixes the rotation of one model. Names are those of the checkpoint configs.

    Attributes:
        theta: Base of the geometric series of frequencies (`rope_theta`).
        dim: Rotated leading dimensions of each head, even: `int(head_dim * partial_rotary_factor)`.
        rope_type: How frequencies are rescaled for longer contexts, or `axial`.
        factor: Context extension (`linear`, `llama3`, `yarn`).
        original_max_position_embeddings: Context length before extension (`llama3`, `yarn`).
        low_freq_factor: `llama3`: wavelengths above `original / low_freq_factor` are rescaled.
        high_freq_factor: `llama3`: wavelengths below `original / high_freq_factor` are kept.
        beta_fast: `yarn`: rotations over the original context from which a dimension is kept.
        beta_slow: `yarn`: rotations up to which it is fully interpolated.
        truncate: `yarn`: whether the bounds of the ramp are rounded to whole dimensions.
        attention_factor: `yarn`: explicit factor on cos and sin.
        mscale: `yarn`: numerator of the factor, where no explicit one is given.
        mscale_all_dim: `yarn`: denominator of it.

    Raises:
        ValueError: A number is not finite or out of range, or `dim` is odd.
    """

    theta: float
    dim: int
    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"dim must be even and positive, found {self.dim}")
        if self.rope_type == AXIAL and self.dim % 4:
            raise ValueError(f"axial rotation needs a multiple of 4 dims, found {self.dim}")
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ValueError(f"theta must be finite and above 1, found {self.theta}")
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ValueError(f"factor must be finite and at least 1, found {self.factor}")
        original = self.original_max_position_embeddings
        if self.rope_type in ("llama3", "yarn") and (original is None or original < 1):
            raise ValueError(f"{self.rope_type} needs original_max_position_embeddings")
        if not 0 < self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ValueError("low_freq_factor must be positive and below high_freq_factor")
        if not 0 < self.beta_slow <= self.beta_fast < math.inf:
            raise ValueError("beta_slow must be positive and not above beta_fast")
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and positive, found {value}")


def inverse_frequencies(params: RopeParams) -> tuple[Float32Array, float]:
    """Inverse frequencies `[dim/2]` in radians per position, and the factor on cos and sin.

    Raises:
        UnsupportedError: The type is not in `ROPE_TYPES`.
    """
    rescale = _RESCALE.get(params.rope_type)
    if rescale is None:
        raise UnsupportedError(
            "rope/unsupported-type",
            f"rotary embedding of type {params.rope_type!r} is not supported",
            help=f"supported: {', '.join(ROPE_TYPES)}",
        )
    return rescale(params, _powers(params))


def rope_tables(params: RopeParams, length: int) -> tuple[Float32Array, Float32Array]:
    """Cosine and sine of every position below `length`, f32 `[length, dim/2]` each.

    `x = [x1 | x2]` (halves of the rotated dimensions) becomes
    `[x1*cos - x2*sin | x2*cos + x1*sin]`. The attention factor is already in both tables.

    Raises:
        UnsupportedError: The type is not in `ROPE_TYPES`.
        ValueError: `length` is negative.
    """
    if length < 0:
        raise ValueError(f"length must not be negative, found {length}")
    inverse, attention_factor = inverse_frequencies(params)
    angles = np.arange(length).astype(np.float32)[:, None] * inverse[None, :]
    scale = np.float32(attention_factor)
    wide = angles.astype(np.float64)
    return np.cos(wide).astype(np.float32) * scale, np.sin(wide).astype(np.float32) * scale


def _powers(params: RopeParams) -> Float32Array:
    """theta^(2j/dim), j = 0..dim/2-1: periods over 2 pi."""
    exponents = np.arange(0, params.dim, 2).astype(np.float32) / np.float32(params.dim)
    return np.power(np.float64(params.theta), exponents.astype(np.float64)).astype(np.float32)


def _default(params: RopeParams, powers: Float32Array) -> tuple[Float32Array, float]:
    return np.float32(1) / powers, 1.0


def _axial(params: RopeParams, powers: Float32Array) -> tuple[Float32Array, float]:
    """Those of half as many dims, twice: transformers' compute_axial_rope_parameters."""
    return np.tile(np.float32(1) / powers[::2], 2), 1.0


def _linear(params: RopeParams, powers: Float32Array) -> tuple[Float32Array, float]:
    return (np.float32(1) / powers) / np.float32(params.factor), 1.0


def _llama3(params: RopeParams, powers: Float32Array) -> tuple[Float32Array, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    inverse = np.float32(1) / powers
    original = float(params.original_max_position_embeddings or 0)
    low, high = params.low_freq_factor, params.high_freq_factor
    wavelengths = np.float32(2 * math.pi) / inverse
    rescaled = inverse / np.float32(params.factor)
    smooth = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    blended = (np.float32(1) - smooth) * rescaled + smooth * inverse
    result = np.where(wavelengths > np.float32(original / low), rescaled, blended)
    return np.where(wavelengths < np.float32(original / high), inverse, result), 1.0


def _yarn(params: RopeParams, powers: Float32Array) -> tuple[Float32Array, float]:
    """Interpolates slow dimensions, keeps fast ones, ramps between (arXiv 2309.00071)."""
    low, high = _yarn_range(params)
    index = np.arange(params.dim // 2, dtype=np.float32)
    ramp = np.clip((index - np.float32(low)) / np.float32(high - low), 0, 1).astype(np.float32)
    kept = np.float32(1) - ramp
    extrapolated = np.float32(1) / powers
    interpolated = np.float32(1) / (np.float32(params.factor) * powers)
    inverse = interpolated * (np.float32(1) - kept) + extrapolated * kept
    return inverse, _yarn_attention_factor(params)


def _yarn_range(params: RopeParams) -> tuple[float, float]:
    original = float(params.original_max_position_embeddings or 0)

    def dimension(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return params.dim * math.log(turns) / (2 * math.log(params.theta))

    low, high = dimension(params.beta_fast), dimension(params.beta_slow)
    if params.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, params.dim - 1)
    return low, high + 0.001 if low == high else high


def _yarn_attention_factor(params: RopeParams) -> float:
    if params.attention_factor is not None:
        return params.attention_factor

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(params.factor) + 1.0 if params.factor > 1 else 1.0

    if params.mscale and params.mscale_all_dim:
        return scale(params.mscale) / scale(params.mscale_all_dim)
    return scale(1.0)


_RESCALE: dict[str, Callable[[RopeParams, Float32Array], tuple[Float32Array, float]]] = {
    AXIAL: _axial,
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
