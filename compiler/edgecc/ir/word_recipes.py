"""Recipes that give 4-bit codes in 32-bit words the order of `Int4`: lossless, nothing is rounded.

Checkpoints of AutoAWQ and GPTQ have the columns of a weight as rows of their tensors, so that no
block of rows could be read; and each producer packs its words in its own order. One order in the IR
needs one kernel of each engine. Shapes, for a weight `[N, K]` of G groups of columns:

| recipe | codes | scales | zero points | group of each column |
| --- | --- | --- | --- | --- |
| `awq_int4` | i32 `[K, N/8]` | `[G, N]` | i32 `[G, N/8]` | |
| `gptq_int4` | i32 `[K/8, N]` | `[G, N]` | i32 `[G, N/8]` | i32 `[K]` |
| `packed_int4` | i32 `[N, K/8]` | `[N, G]` | i32 `[N/8, G]` | i32 `[K]` |

Sources: AutoAWQ 0.2 `awq/utils/packing_utils.py`, GPTQModel 7.7 `dequantize_weight`,
compressed-tensors 0.20 `pack_quantized`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np

from edgecc import integers
from edgecc.ir import words
from edgecc.ir.encodings import Array, Dense, Encoding, Int4, IntShape
from edgecc.ir.recipe import Recipe
from edgecc.ir.types import DType
from edgecc.ir.weights import Derived, Param, Parts, Weight, WeightTable

_FLAGS = ("zero_point", "ordered")


class Words(Recipe):
    """Codes and scales, then zero points and groups of columns where there are any.

    Params: `zero_point` and `ordered` say which inputs are given. Without zero points, codes are
    around 8.
    """

    inputs = None
    repacks = True
    flags: tuple[str, ...] = _FLAGS

    def result(
        self, inputs: Sequence[Weight], params: Mapping[str, Param]
    ) -> tuple[IntShape, Encoding]:
        """`[N, K]` in `Int4`.

        Raises:
            ValueError: Unknown parameters, another number of inputs, or inputs that do not belong
                together.
        """
        if set(params) != set(self.flags) or any(type(v) is not bool for v in params.values()):
            raise ValueError(f"{self.name} takes {', '.join(self.flags)}, got {dict(params)}")
        given = _Given(inputs, params)
        dtypes = [w.encoding.dtype if isinstance(w.encoding, Dense) else None for w in inputs]
        scale = dtypes.pop(1)
        if any(dtype is not DType.I32 for dtype in dtypes) or scale is None or not scale.is_float:
            raise ValueError(f"{self.name} needs words, found {', '.join(map(_spelled, inputs))}")
        (rows, columns), groups = self.sizes(inputs[0].shape, inputs[1].shape)
        wanted = self.shapes(rows, columns, groups)
        if not groups or columns % groups:
            raise ValueError(f"{columns} columns are no {groups} groups")
        for weight, shape in zip(inputs, given.chosen(wanted), strict=True):
            if weight.shape != shape:
                raise ValueError(f"{self.name}: expected {list(shape)}, found {_spelled(weight)}")
        encoding = Int4(
            columns // groups, bool(params["zero_point"]), bool(params["ordered"]), scale
        )
        encoding.components((rows, columns))
        return (rows, columns), encoding

    @abstractmethod
    def sizes(self, codes: IntShape, scales: IntShape) -> tuple[tuple[int, int], int]:
        """`(N, K)` and the number of groups, from the shapes of codes and scales.

        Raises:
            ValueError: One of them has no two axes.
        """

    @abstractmethod
    def shapes(self, rows: int, columns: int, groups: int) -> tuple[IntShape, ...]:
        """Shapes of codes, scales, zero points and the groups of columns."""

    @abstractmethod
    def codes(self, table: WeightTable, symbol: str, start: int, stop: int) -> Array:
        """Codes of rows: u8 `[stop - start, K]`."""

    @abstractmethod
    def scales(self, table: WeightTable, symbol: str, start: int, stop: int) -> Array:
        """Scales of rows: `[stop - start, G]`."""

    @abstractmethod
    def zero_points(
        self, table: WeightTable, symbol: str, start: int, stop: int, params: Mapping[str, Param]
    ) -> Array:
        """Zero points of rows: u8 `[stop - start, G]`."""

    def rows(
        self, table: WeightTable, weight: Weight, source: Derived, start: int, stop: int
    ) -> Parts:
        """Rows of the codes in their new order, with their scales and zero points."""
        params, given = dict(source.params), iter(source.inputs)
        codes = self.codes(table, next(given), start, stop)
        parts = {
            "weight": integers.pack_int4(_signed(codes)),
            "weight_scale": np.ascontiguousarray(self.scales(table, next(given), start, stop)),
        }
        if params["zero_point"]:
            zeros = self.zero_points(table, next(given), start, stop, params)
            parts["weight_zero_point"] = _signed(zeros)
        if params["ordered"]:
            parts["group_index"] = table.read(next(given))["weight"]
        return parts


class _Given:
    """Which of four inputs there are."""

    def __init__(self, inputs: Sequence[Weight], params: Mapping[str, Param]) -> None:
        self._there = (True, True, bool(params["zero_point"]), bool(params.get("ordered")))
        if len(inputs) != sum(self._there):
            raise ValueError(f"{sum(self._there)} inputs are needed, got {len(inputs)}")

    def chosen(self, of_all: Sequence[IntShape]) -> list[IntShape]:
        return [item for item, there in zip(of_all, self._there, strict=True) if there]


class _Transposed(Words):
    """Columns of the weight are rows of the tensors."""

    def scales(self, table: WeightTable, symbol: str, start: int, stop: int) -> Array:
        """A block of columns, transposed."""
        return table.read(symbol)["weight"][:, start:stop].T

    def _columns(self, table: WeightTable, symbol: str, start: int, stop: int) -> Array:
        """The words that hold these rows, where eight rows share one."""
        return table.read(symbol)["weight"][:, start // words.CODES : -(-stop // words.CODES)]


class AwqInt4(_Transposed):
    """AutoAWQ's GEMM layout; always with zero points, never with an order of its own."""

    name = "awq_int4"

    def sizes(self, codes: IntShape, scales: IntShape) -> tuple[tuple[int, int], int]:
        """From `[K, N/8]` and `[G, N]`."""
        (columns, _), (groups, rows) = _two(codes), _two(scales)
        return (rows, columns), groups

    def shapes(self, rows: int, columns: int, groups: int) -> tuple[IntShape, ...]:
        """See the module."""
        packed = -(-rows // words.CODES)
        return (columns, packed), (groups, rows), (groups, packed), (columns,)

    def codes(self, table: WeightTable, symbol: str, start: int, stop: int) -> Array:
        """Unpacked and transposed."""
        return _cut(words.in_awq_order(self._columns(table, symbol, start, stop)), start, stop)

    def zero_points(
        self, table: WeightTable, symbol: str, start: int, stop: int, params: Mapping[str, Param]
    ) -> Array:
        """In the order of the codes."""
        return self.codes(table, symbol, start, stop)


class GptqInt4(_Transposed):
    """GPTQ's layout. Param `v1`: zero points are stored as one less, as its first format does."""

    name = "gptq_int4"
    flags = (*_FLAGS, "v1")

    def sizes(self, codes: IntShape, scales: IntShape) -> tuple[tuple[int, int], int]:
        """From `[K/8, N]` and `[G, N]`."""
        (packed, _), (groups, rows) = _two(codes), _two(scales)
        return (rows, packed * words.CODES), groups

    def shapes(self, rows: int, columns: int, groups: int) -> tuple[IntShape, ...]:
        """See the module."""
        packed = -(-rows // words.CODES)
        return (columns // words.CODES, rows), (groups, rows), (groups, packed), (columns,)

    def codes(self, table: WeightTable, symbol: str, start: int, stop: int) -> Array:
        """Unpacked: eight neighbours of a row share a word."""
        return words.along_rows(table.read(symbol)["weight"][:, start:stop])

    def zero_points(
        self, table: WeightTable, symbol: str, start: int, stop: int, params: Mapping[str, Param]
    ) -> Array:
        """Eight rows share a word."""
        stored = self._columns(table, symbol, start, stop)
        stored = words.next_zero_points(np.ascontiguousarray(stored)) if params["v1"] else stored
        return _cut(words.along_columns(stored).T, start, stop)


class PackedInt4(Words):
    """The layout of compressed-tensors, `pack-quantized`."""

    name = "packed_int4"

    def sizes(self, codes: IntShape, scales: IntShape) -> tuple[tuple[int, int], int]:
        """From `[N, K/8]` and `[N, G]`."""
        (rows, packed), (_, groups) = _two(codes), _two(scales)
        return (rows, packed * words.CODES), groups

    def shapes(self, rows: int, columns: int, groups: int) -> tuple[IntShape, ...]:
        """See the module."""
        codes, zeros = (rows, columns // words.CODES), (-(-rows // words.CODES), groups)
        return codes, (rows, groups), zeros, (columns,)

    def codes(self, table: WeightTable, symbol: str, start: int, stop: int) -> Array:
        """Eight neighbours of a row share a word."""
        return words.along_columns(table.read(symbol, start, stop)["weight"])

    def scales(self, table: WeightTable, symbol: str, start: int, stop: int) -> Array:
        """As they are stored."""
        return table.read(symbol, start, stop)["weight"]

    def zero_points(
        self, table: WeightTable, symbol: str, start: int, stop: int, params: Mapping[str, Param]
    ) -> Array:
        """Eight rows share a word."""
        first, last = start // words.CODES, -(-stop // words.CODES)
        stored = words.along_rows(table.read(symbol, first, last)["weight"])
        return _cut(stored.T, start, stop)


def _two(shape: IntShape) -> tuple[int, int]:
    if len(shape) != 2:
        raise ValueError(f"a matrix is needed, found {list(shape)}")
    return shape[0], shape[1]


def _cut(rows: Array, start: int, stop: int) -> Array:
    """Rows of whole words, cut to those that are wanted."""
    skipped = start % words.CODES
    return rows[skipped : skipped + stop - start]


def _signed(codes: Array) -> Array:
    """0..15 to -8..7."""
    signed: Array = np.ascontiguousarray(codes).view(np.int8) - np.int8(words.OFFSET)
    return signed


def _spelled(weight: Weight) -> str:
    return f"{weight.encoding} {list(weight.shape)}"


WORD_RECIPES: tuple[Recipe, ...] = (AwqInt4(), GptqInt4(), PackedInt4())
