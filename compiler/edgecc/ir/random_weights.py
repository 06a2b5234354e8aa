"""Random contents of weights, for every encoding: valid codes, positive scales, sane values."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from edgecc.ir.encodings import Array, Component, Encoding, IntShape
from edgecc.ir.types import DType
from edgecc.ir.weights import Parts


def random_parts(
    rng: np.random.Generator,
    shape: IntShape,
    encoding: Encoding,
    given: Mapping[str, Array] | None = None,
) -> Parts:
    """Components of a weight whose values keep activations about as large as they are.

    Args:
        rng: Source of randomness.
        shape: Logical shape.
        encoding: How values are stored.
        given: Components to take as they are.
    """
    components = encoding.components(shape)
    parts: Parts = dict(given or {})
    for name, component in components.items():
        if name not in parts:
            parts[name] = _codes(rng, name, component)
    if any(array.size == 0 for array in parts.values()):
        return parts
    with np.errstate(all="ignore"):
        values = encoding.dequantize(parts).astype(np.float64)
        size = float(np.sqrt(np.mean(np.square(values))))
    wanted = (shape[-1] if len(shape) > 1 else 1) ** -0.5
    factor = wanted / size if np.isfinite(size) and size > 0 else 1.0
    free = [name for name in components if not given or name not in given]
    scales = [name for name in free if is_scale(name, components[name])][:1]
    for name in scales or free:
        spread = rng.uniform(0.5, 1.5, parts[name].shape) if scales else 1.0
        parts[name] = _scaled(parts[name], components[name], factor * spread)
    return parts


def is_scale(name: str, component: Component) -> bool:
    """Whether a component multiplies others, by the names that encodings give them."""
    return "scale" in name and component.dtype.is_float


def _codes(rng: np.random.Generator, name: str, component: Component) -> Array:
    """Ones for scales, else standard normal floats or all codes that an integer type has."""
    dtype = component.dtype
    if is_scale(name, component):
        return np.ones(component.shape, dtype.numpy)
    if component.below is not None:
        return rng.integers(0, component.below, component.shape).astype(dtype.numpy)
    if dtype.is_float:
        values = rng.standard_normal(component.shape)
        return (np.abs(values) if dtype is DType.F8E8M0 else values).astype(dtype.numpy)
    low = 0 if dtype.value.startswith(("u", "b")) else -(1 << (dtype.bits - 1))
    high = 2 if dtype.value == "bool" else low + (1 << dtype.bits)
    return rng.integers(low, high, component.shape).astype(dtype.numpy)


def _scaled(array: Array, component: Component, factor: Array | float) -> Array:
    """Floats times a factor, within what their type holds; integers as they are."""
    if not component.dtype.is_float:
        return array
    info = ml_dtypes.finfo(component.dtype.numpy)  # type: ignore[no-untyped-call]
    wide = array.astype(np.float64) * factor
    least = float(info.smallest_subnormal) if np.all(wide >= 0) else -float(info.max)
    return np.clip(wide, least, float(info.max)).astype(component.dtype.numpy)
