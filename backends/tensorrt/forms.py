"""Forms of weights: component arrays as they are stored, to the arrays that engines take.

The compiler makes constants with them, the runtime fills device buffers: the same function, so an
engine computes with the same bits under either policy. NumPy only, no compiler. Each form makes one
array, block of rows by block of rows, so that no weight has to be in memory twice.

- `stored`: the elements as they lie in the file; 4-bit ones two a byte.
- `doubled`: E2M1 codes as signed 8-bit integers of twice their value.
- `halved`: half of E4M3 block scales in 16 bits. Both are exact; together they are an NVFP4 weight
  without its global scale.
- `factor`: float32 scale of a product, `[1, 1]` or one for each column `[1, N]`.
- `reciprocal`: the same of a divisor.
- `widened`: scales of 16 bits in float32.
- `int4`: signed 4-bit integers that lie two rows a byte, as two columns a byte.
- `values-LAYOUT`: the values of a layout (`edgecc.backends.layouts`), rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from edgecc import integers, nvfp4
from edgecc.backends.base import Array
from edgecc.backends.layouts import BLOCK_BYTES, LAYOUTS, Parts, values_of

Shape: TypeAlias = tuple[int, ...]

NUMPY: Mapping[str, Any] = {
    "f32": np.float32,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "f8e4m3": ml_dtypes.float8_e4m3fn,
    "f4e2m1": np.uint8,
    "i4": np.uint8,
    "i64": np.int64,
    "i32": np.int32,
    "i8": np.int8,
    "bool": np.bool_,
}
"""What holds the elements of each engine type; two 4-bit elements lie in one byte."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one array is made.

    Attributes:
        components: What it is made of; None for one component of any name.
        dtypes: Engine types it can have.
        shape: Its shape, from those of the components. Raises ValueError if they do not fit.
        make: The array of a block of rows, from the components of that block.
        optional: Components that it may be made of as well.
        groups: Rows of the array for one step along axis 0 of a component: 1 unless given, 0 where
            a component has no rows.
    """

    components: tuple[str, ...] | None
    dtypes: frozenset[str]
    shape: Callable[[Parts, str, Sequence[int]], Shape]
    make: Callable[[Parts, str, Sequence[int]], Array]
    groups: Callable[[Parts, Sequence[int]], Mapping[str, int]] = lambda parts, block: {}
    optional: tuple[str, ...] = ()

    def takes(self, parts: Parts) -> bool:
        """Whether these are components that it is made of."""
        if self.components is None:
            return len(parts) == 1
        return set(self.components) <= set(parts) <= {*self.components, *self.optional}


def _only(parts: Parts) -> Array:
    (array,) = parts.values()
    return array


def _stored_shape(parts: Parts, dtype: str, block: Sequence[int]) -> Shape:
    array = _only(parts)
    if array.dtype != NUMPY[dtype]:
        raise ValueError(f"elements are {array.dtype}, not {dtype}")
    if dtype == "i4":
        raise ValueError("4-bit integers are stored in another order")
    if dtype != "f4e2m1":
        return array.shape
    *lead, width = array.shape
    return (*lead, 2 * width)


def _packed_shape(parts: Parts, dtype: str, block: Sequence[int]) -> Shape:
    rows, half = _typed(_only(parts), np.uint8).shape
    return rows, 2 * half


def _doubled(parts: Parts, dtype: str, block: Sequence[int]) -> Array:
    return (2 * nvfp4.unpack_e2m1(_only(parts))).astype(np.int8)


def _int4_shape(parts: Parts, dtype: str, block: Sequence[int]) -> Shape:
    half, columns = _typed(_only(parts), np.uint8).shape
    if columns % 2:
        raise ValueError(f"{columns} columns cannot lie two a byte")
    return 2 * half, columns


def _int4(parts: Parts, dtype: str, block: Sequence[int]) -> Array:
    codes = integers.unpack_int4(_only(parts)).view(np.uint8) & 15
    packed: Array = np.bitwise_or(codes[:, 0::2], codes[:, 1::2] << 4, dtype=np.uint8)
    return packed


def _scale_shape(parts: Parts, dtype: str, block: Sequence[int]) -> Shape:
    rows, columns = _typed(_only(parts), ml_dtypes.float8_e4m3fn).shape
    return rows, columns


def _halved(parts: Parts, dtype: str, block: Sequence[int]) -> Array:
    return (_only(parts).astype(np.float32) / 2).astype(NUMPY[dtype])


def _factor_shape(parts: Parts, dtype: str, block: Sequence[int]) -> Shape:
    scale = _typed(_only(parts), np.float32, np.float16, ml_dtypes.bfloat16)
    if scale.ndim > 1:
        raise ValueError(f"scales {scale.shape}")
    return 1, scale.size


def _factor(parts: Parts, dtype: str, block: Sequence[int]) -> Array:
    return np.atleast_1d(_only(parts).astype(np.float32))[None, :]


def _reciprocal(parts: Parts, dtype: str, block: Sequence[int]) -> Array:
    return np.reciprocal(_factor(parts, dtype, block))


def _widened_shape(parts: Parts, dtype: str, block: Sequence[int]) -> Shape:
    return _typed(_only(parts), np.float16, ml_dtypes.bfloat16).shape


def _widened(parts: Parts, dtype: str, block: Sequence[int]) -> Array:
    wide: Array = _only(parts).astype(np.float32)
    return wide


def _typed(array: Array, *dtypes: Any) -> Array:
    if array.dtype not in [np.dtype(d) for d in dtypes]:
        raise ValueError(f"elements are {array.dtype}")
    return array


_FLOATS = frozenset({"f32", "f16", "bf16"})
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "int4": ("weight_zero_point", "group_index"),
    "nvfp4": ("weight_scale_2", "weight_global_scale"),
}
_WHOLE = ("weight_scale_2", "weight_global_scale", "group_index")
"""Components without rows."""


def _values(layout: str) -> Form:
    def rounded(parts: Parts, dtype: str, block: Sequence[int]) -> Array:
        values = values_of(layout, parts, block)
        with np.errstate(over="ignore"):
            return values.rows(slice(0, values.shape[0])).astype(NUMPY[dtype])

    def groups(parts: Parts, block: Sequence[int]) -> Mapping[str, int]:
        scale = parts.get("weight_scale")
        by_row = 0 if scale is None or not scale.ndim else block[0] if block else 1
        by_component = dict.fromkeys((n for n in _WHOLE if n in parts), 0)
        return {**by_component, "weight": 2 if layout == "int4" else 1, "weight_scale": by_row}

    return Form(
        ("weight",) if layout == "dense" else ("weight", "weight_scale"),
        _FLOATS,
        lambda parts, dtype, block: values_of(layout, parts, block).shape,
        rounded,
        groups,
        _OPTIONAL.get(layout, ()),
    )


FORMS: Mapping[str, Form] = {
    "stored": Form(None, frozenset(NUMPY), _stored_shape, lambda parts, dtype, block: _only(parts)),
    "doubled": Form(None, frozenset({"i8"}), _packed_shape, _doubled),
    "int4": Form(
        None,
        frozenset({"i4"}),
        _int4_shape,
        _int4,
        lambda parts, block: dict.fromkeys(parts, 2),
    ),
    "halved": Form(None, frozenset({"f16", "bf16"}), _scale_shape, _halved),
    "factor": Form(
        None,
        frozenset({"f32"}),
        _factor_shape,
        _factor,
        lambda parts, block: dict.fromkeys(parts, 0),
    ),
    "reciprocal": Form(
        None,
        frozenset({"f32"}),
        _factor_shape,
        _reciprocal,
        lambda parts, block: dict.fromkeys(parts, 0),
    ),
    "widened": Form(None, frozenset({"f32"}), _widened_shape, _widened),
    **{f"values-{layout}": _values(layout) for layout in LAYOUTS},
}
"""Every form by name."""


def shape_of(form: str, parts: Parts, dtype: str, block: Sequence[int] = ()) -> Shape:
    """Shape of the array, in elements.

    Args:
        form: One of `FORMS`.
        parts: Components as they are stored.
        dtype: Engine type.
        block: Rows and columns that share a scale, of `values-fp8-block`.

    Raises:
        ValueError: Components are missing or do not fit to each other or to the type.
    """
    found = FORMS[form]
    if not found.takes(parts):
        raise ValueError(f"{form} cannot be made from {', '.join(parts) or 'nothing'}")
    if block and form != "values-fp8-block":
        raise ValueError(f"{form} has no blocks of rows and columns")
    if dtype not in found.dtypes:
        raise ValueError(f"{form} has no elements of type {dtype}")
    return found.shape(parts, dtype, block)


def make(form: str, parts: Parts, dtype: str, block: Sequence[int] = ()) -> Array:
    """The array of some rows, from the components of those rows; 4-bit elements two a byte."""
    return np.ascontiguousarray(FORMS[form].make(parts, dtype, block))


def row_blocks(
    form: str, parts: Parts, dtype: str, block: Sequence[int] = ()
) -> Iterator[tuple[int, Array]]:
    """The array by blocks of rows: first row, and the rows.

    Components may be mapped files: a block reads its own pages only.
    """
    found = FORMS[form]
    groups = {**dict.fromkeys(parts, 1), **found.groups(parts, block)}
    shape = shape_of(form, parts, dtype, block)
    if not shape or not any(groups.values()):
        yield 0, make(form, parts, dtype, block)
        return
    group = int(np.lcm.reduce([g or 1 for g in groups.values()]))
    step = max(1, BLOCK_BYTES // (4 * max(1, prod(shape[1:]))) // group) * group
    for start in range(0, max(1, shape[0]), step):
        stop = min(start + step, shape[0])
        cut = {
            name: array[start // g : -(-stop // g)] if (g := groups[name]) else array
            for name, array in parts.items()
        }
        yield start, make(form, cut, dtype, block)
