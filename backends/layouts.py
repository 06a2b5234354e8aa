"""Values of stored weights, block of rows by block of rows, from their component arrays alone.

What a loader needs to widen weights that lie packed in a bundle: NumPy only, no compiler. A layout
is the name of how a weight is stored; `values_of` checks that its components belong together and
gives its exact values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from edgecc import fp8, integers, nvfp4
from edgecc.backends.base import Array

Parts: TypeAlias = Mapping[str, Array]
"""Component arrays by name: `weight`, `weight_scale`, and what else an encoding has."""

BLOCK_BYTES = 4 << 20
"""Float32 bytes of one block of rows."""


@dataclass(frozen=True, slots=True)
class Values:
    """The values of one stored weight.

    Attributes:
        shape: Of the values.
        rows: Exact float32 values of a slice of rows.
        group: Slices start at multiples of this.
    """

    shape: tuple[int, ...]
    rows: Callable[[slice], Array]
    group: int = 1


def blocks(rows: int, columns: int, group: int = 1) -> list[slice]:
    """Slices that together are `rows` rows, each of about `BLOCK_BYTES` as float32."""
    step = max(1, BLOCK_BYTES // (4 * max(1, columns)) // group) * group
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def check_nvfp4(parts: Parts) -> tuple[int, int]:
    """The shape of an NVFP4 weight with blocks of 16.

    Raises:
        ValueError: The scales do not fit to the codes.
    """
    packed, scale = parts["weight"], parts["weight_scale"]
    rows, half = packed.shape
    if scale.shape != (rows, half // 8) or half % 8 or global_scale(parts)[0].shape:
        raise ValueError(f"codes {packed.shape}, scales {scale.shape}")
    return rows, 2 * half


def global_scale(parts: Parts) -> tuple[Array, bool]:
    """The scale of a whole NVFP4 weight, and whether it is a divisor.

    Raises:
        ValueError: There is none, or there are both.
    """
    found = [n for n in ("weight_scale_2", "weight_global_scale") if n in parts]
    if len(found) != 1:
        raise ValueError(f"one global scale is needed, found {', '.join(found) or 'none'}")
    return parts[found[0]], found[0] == "weight_global_scale"


def _nvfp4(parts: Parts, block: Sequence[int]) -> Values:
    packed, scale = parts["weight"], parts["weight_scale"]
    of_all, divisor = global_scale(parts)
    return Values(
        check_nvfp4(parts),
        lambda rows: nvfp4.dequantize(packed[rows], scale[rows], of_all, divisor=divisor),
    )


def _mxfp4(parts: Parts, block: Sequence[int]) -> Values:
    packed, scale = parts["weight"], parts["weight_scale"]
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if scale.shape[0] != rows or columns % max(1, scale.shape[1]):
        raise ValueError(f"codes {packed.shape}, scales {scale.shape}")
    return Values((rows, columns), lambda rows: nvfp4.dequantize_mx(packed[rows], scale[rows]))


def _fp8(parts: Parts, block: Sequence[int]) -> Values:
    stored, scale = parts["weight"], parts["weight_scale"]
    if scale.shape not in ((), stored.shape[:1]):
        raise ValueError(f"elements {stored.shape}, scales {scale.shape}")
    return Values(
        stored.shape,
        lambda rows: fp8.dequantize(stored[rows], scale[rows] if scale.ndim else scale),
    )


def _fp8_block(parts: Parts, block: Sequence[int]) -> Values:
    stored, scale = parts["weight"], parts["weight_scale"]
    high, wide = (int(size) for size in block)
    rows, columns = stored.shape
    if min(high, wide) < 1 or scale.shape != (-(-rows // high), -(-columns // wide)):
        raise ValueError(f"elements {stored.shape}, blocks {list(block)}, scales {scale.shape}")

    def values(rows: slice) -> Array:
        scales = scale[rows.start // high : -(-rows.stop // high)]
        return fp8.dequantize(stored[rows], scales, (high, wide))

    return Values(stored.shape, values, high)


def _int8(parts: Parts, block: Sequence[int]) -> Values:
    stored, scale = parts["weight"], parts["weight_scale"]
    if scale.shape != stored.shape[:1]:
        raise ValueError(f"elements {stored.shape}, scales {scale.shape}")
    return Values(stored.shape, lambda rows: integers.dequantize_int8(stored[rows], scale[rows]))


def _int4(parts: Parts, block: Sequence[int]) -> Values:
    packed, scale = parts["weight"], parts["weight_scale"]
    zeros, index = parts.get("weight_zero_point"), parts.get("group_index")
    rows, columns = 2 * packed.shape[0], packed.shape[1]
    if scale.shape[0] != rows or columns % max(1, scale.shape[1]):
        raise ValueError(f"packed {packed.shape}, scales {scale.shape}")
    if zeros is not None and zeros.shape != scale.shape:
        raise ValueError(f"scales {scale.shape}, zero points {zeros.shape}")
    if index is not None:
        _check_groups(index, columns, scale.shape[1])

    def values(rows: slice) -> Array:
        half = slice(rows.start // 2, rows.stop // 2)
        shifts = None if zeros is None else zeros[rows]
        return integers.dequantize_int4(packed[half], scale[rows], shifts, index)

    return Values((rows, columns), values, 2)


def _check_groups(index: Array, columns: int, groups: int) -> None:
    """Every column has a group that is there."""
    if index.shape != (columns,) or (columns and not 0 <= index.min() <= index.max() < groups):
        raise ValueError(f"groups of {columns} columns: {index.shape}, not all within {groups}")


def _dense(parts: Parts, block: Sequence[int]) -> Values:
    stored = parts["weight"]
    return Values(stored.shape, lambda rows: stored[rows].astype(np.float32))


LAYOUTS: Mapping[str, Callable[[Parts, Sequence[int]], Values]] = {
    "dense": _dense,
    "fp8": _fp8,
    "fp8-block": _fp8_block,
    "int4": _int4,
    "int8": _int8,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}


def values_of(layout: str, parts: Parts, block: Sequence[int] = ()) -> Values:
    """The values of a stored weight.

    Args:
        layout: One of `LAYOUTS`.
        parts: Its components.
        block: Rows and columns that share a scale, of `fp8-block`.

    Raises:
        ValueError: The components do not belong together.
        KeyError: One is missing.
    """
    return LAYOUTS[layout](parts, block)
