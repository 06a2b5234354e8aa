"""Random inputs on which every graph of a module can be evaluated.

Sizes are small and awkward (the low end, zero, one, odd numbers), floats are standard normal, and
integers lie where the ops that index with them allow (`edgecc.ir.index_ranges`). The array of an
input depends on the seed, its graph and its name only.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from edgecc.errors import InputError
from edgecc.ir.core import Graph, Module
from edgecc.ir.encodings import Array
from edgecc.ir.index_ranges import IndexRange, concrete, input_ranges
from edgecc.ir.interpreter import Inputs
from edgecc.ir.types import DType, TensorType, symbols_of

MOST = 4
"""Largest size that is chosen for a symbol, unless its range starts higher."""

_SPAN = 16
"""Width taken of a range without an end."""

_ELEMENTS = 1 << 36
"""More than fit anywhere: what would need so many is told as a fact about the module."""


def random_inputs(module: Module, seed: int = 0, sizes: Mapping[str, int] | None = None) -> Inputs:
    """Inputs of every graph that no other graph calls.

    Args:
        module: A module that verifies; weights are not read.
        seed: The same seed gives the same arrays.
        sizes: Values of some dimension symbols; the others are drawn by `random_sizes`.

    Returns:
        Arrays by graph and input name: float32, or integers in the dtype of the input.

    Raises:
        InputError: There are no valid inputs with these sizes, or none with small ones.
    """
    for most in range(MOST, -1, -1):
        rng = np.random.default_rng([seed, most])
        chosen = {**random_sizes(module, rng, most=most), **(sizes or {})}
        try:
            return {g.name: _graph_inputs(module, g, seed, chosen) for g in module.entries()}
        except InputError:
            if most == 0:
                raise
    raise AssertionError("unreachable")


def random_sizes(module: Module, rng: np.random.Generator, *, most: int = MOST) -> dict[str, int]:
    """A small value for every dimension symbol of the module's inputs.

    Args:
        module: Whose symbols.
        rng: Source of randomness.
        most: Largest value, unless the range of a symbol starts higher; symbols without a range
            start at 1.
    """
    used = {s for g in module.entries() for i in g.inputs for s in symbols_of(i.value.type.shape)}
    sizes = {}
    for symbol in sorted(used | set(module.symbols)):
        bounds = module.symbols.get(symbol)
        low, high = (bounds.low, bounds.high) if bounds else (1, max(most, 1))
        # As an offset: bounds may be too large for NumPy.
        sizes[symbol] = low + int(rng.integers(0, min(high, max(low, most)) - low, endpoint=True))
    return sizes


def _graph_inputs(
    module: Module, graph: Graph, seed: int, sizes: Mapping[str, int]
) -> dict[str, Array]:
    ranges = input_ranges(module, graph.name, sizes)
    made = {}
    for item in graph.inputs:
        what = f"input %{item.name} of graph @{graph.name}"
        shape = concrete(item.value.type.shape, sizes, what)
        if prod(shape) > _ELEMENTS:
            raise InputError("ir/huge-input", f"{what} has {prod(shape)} elements: {list(shape)}")
        rng = np.random.default_rng([seed, *f"{graph.name} {item.name}".encode()])
        if item.value.type.dtype.is_float:
            made[item.name] = rng.standard_normal(shape, dtype=np.float32)
        else:
            made[item.name] = _integers(rng, what, shape, item.value.type, ranges[item.name])
    return made


def _integers(
    rng: np.random.Generator,
    what: str,
    shape: tuple[int, ...],
    type: TensorType,
    allowed: IndexRange,
) -> Array:
    """Integers near either end of the allowed range, where mistakes by one are seen.

    Raises:
        InputError: The range is empty.
    """
    if not np.prod(shape):
        return np.zeros(shape, type.dtype.numpy)
    held = _held(type.dtype)
    low, high = max(allowed.low, held.low), min(allowed.high, held.high)
    if low > high:
        raise InputError("ir/no-valid-input", f"no value of {what} is valid: {allowed}")
    if high == held.high:  # no upper bound: small ones do
        high = min(high, max(low, 0) + _SPAN)
    if low == held.low:
        low = max(low, min(high, _SPAN) - _SPAN)
    offsets = np.minimum(rng.geometric(0.2, shape) - 1, high - low)
    from_end = rng.random(shape) < 0.25
    return np.where(from_end, high - offsets, low + offsets).astype(type.dtype.numpy)


def _held(dtype: DType) -> IndexRange:
    """What an integer type can hold."""
    if dtype is DType.BOOL:
        return IndexRange(0, 1)
    if dtype.value.startswith("u"):
        return IndexRange(0, (1 << dtype.bits) - 1)
    return IndexRange(-(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1)
