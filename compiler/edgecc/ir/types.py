"""Immutable types of the IR: element types, dimensions, tensor types.

Everything here is hashable and equal by value. Dimensions are ints or affine expressions over named
symbols (`t`, `c + 7`, `2*b`), normalized when built, so that equality is `==`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import ml_dtypes
import numpy as np


class DType(Enum):
    """Element types. The value is the spelling in IR text."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    F8E4M3 = "f8e4m3"
    F8E5M2 = "f8e5m2"
    F8E8M0 = "f8e8m0"
    F4E2M1 = "f4e2m1"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    I4 = "i4"
    U64 = "u64"
    U32 = "u32"
    U16 = "u16"
    U8 = "u8"
    U4 = "u4"
    BOOL = "bool"

    @property
    def bits(self) -> int:
        """Bits one element takes when packed."""
        return _BITS[self]

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype that holds one element (4-bit types: one element per byte)."""
        return _NUMPY[self]

    @property
    def is_float(self) -> bool:
        """Whether elements are floating-point numbers."""
        return self.value[0] in "f" or self is DType.BF16

    def nbytes(self, count: int) -> int:
        """Bytes `count` packed elements take."""
        return (count * self.bits + 7) // 8

    @classmethod
    def of(cls, dtype: np.dtype[np.generic] | type[np.generic]) -> DType:
        """The DType of a NumPy dtype.

        Raises:
            ValueError: The NumPy dtype has no counterpart.
        """
        found = _FROM_NUMPY.get(np.dtype(dtype))
        if found is None:
            raise ValueError(f"no IR element type for NumPy dtype {np.dtype(dtype)}")
        return found


_SCALARS: Mapping[DType, type[np.generic]] = {
    DType.F64: np.float64,
    DType.F32: np.float32,
    DType.F16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
    DType.F8E4M3: ml_dtypes.float8_e4m3fn,
    DType.F8E5M2: ml_dtypes.float8_e5m2,
    DType.F8E8M0: ml_dtypes.float8_e8m0fnu,
    DType.F4E2M1: ml_dtypes.float4_e2m1fn,
    DType.I64: np.int64,
    DType.I32: np.int32,
    DType.I16: np.int16,
    DType.I8: np.int8,
    DType.I4: ml_dtypes.int4,
    DType.U64: np.uint64,
    DType.U32: np.uint32,
    DType.U16: np.uint16,
    DType.U8: np.uint8,
    DType.U4: ml_dtypes.uint4,
    DType.BOOL: np.bool_,
}
_NUMPY: Mapping[DType, np.dtype[np.generic]] = {k: np.dtype(v) for k, v in _SCALARS.items()}
_FROM_NUMPY = {v: k for k, v in _NUMPY.items()}
_BITS = {d: 4 if d in (DType.F4E2M1, DType.I4, DType.U4) else d.numpy.itemsize * 8 for d in DType}


@dataclass(frozen=True, slots=True)
class DimExpr:
    """An affine dimension: `sum(coefficient * symbol) + constant`, with at least one symbol.

    Build with `sym("t")` and `+`, `-`, `*`; results without symbols collapse to plain ints.
    Terms are sorted by symbol and have non-zero coefficients, so `a + b == b + a`.
    """

    terms: tuple[tuple[str, int], ...]
    constant: int = 0

    def __add__(self, other: Dim) -> Dim:
        return _affine(_terms(self) + _terms(other), self.constant + _constant(other))

    def __radd__(self, other: int) -> Dim:
        return self + other

    def __sub__(self, other: Dim) -> Dim:
        return self + other * -1

    def __rsub__(self, other: int) -> Dim:
        return self * -1 + other

    def __mul__(self, factor: int) -> Dim:
        if not isinstance(factor, int):
            return NotImplemented
        return _affine([(s, c * factor) for s, c in self.terms], self.constant * factor)

    def __rmul__(self, factor: int) -> Dim:
        return self * factor

    def __str__(self) -> str:
        text = ""
        for symbol, coefficient in self.terms:
            sign = "-" if coefficient < 0 else "+"
            size = abs(coefficient)
            factor = symbol if size == 1 else f"{size}*{symbol}"
            text += f" {sign} {factor}" if text else (f"-{factor}" if sign == "-" else factor)
        if self.constant:
            text += f" {'-' if self.constant < 0 else '+'} {abs(self.constant)}"
        return text

    def substitute(self, values: Mapping[str, int]) -> Dim:
        """The dimension with known symbols replaced by their values."""
        result: Dim = self.constant
        for symbol, coefficient in self.terms:
            value: Dim = values[symbol] if symbol in values else sym(symbol)
            result = result + value * coefficient
        return result


Dim: TypeAlias = int | DimExpr
Shape: TypeAlias = tuple[Dim, ...]


def sym(name: str) -> DimExpr:
    """The dimension that is just the symbol `name`."""
    return DimExpr(((name, 1),))


def _terms(dim: Dim) -> list[tuple[str, int]]:
    return list(dim.terms) if isinstance(dim, DimExpr) else []


def _constant(dim: Dim) -> int:
    return dim.constant if isinstance(dim, DimExpr) else dim


def _affine(terms: Iterable[tuple[str, int]], constant: int) -> Dim:
    summed: dict[str, int] = {}
    for symbol, coefficient in terms:
        summed[symbol] = summed.get(symbol, 0) + coefficient
    kept = tuple(sorted((s, c) for s, c in summed.items() if c))
    return DimExpr(kept, constant) if kept else constant


def symbols_of(shape: Iterable[Dim]) -> frozenset[str]:
    """All symbols that occur in a shape."""
    return frozenset(s for d in shape if isinstance(d, DimExpr) for s, _ in d.terms)


def substitute(shape: Iterable[Dim], values: Mapping[str, int]) -> Shape:
    """A shape with known symbols replaced by their values."""
    return tuple(d.substitute(values) if isinstance(d, DimExpr) else d for d in shape)


def format_shape(shape: Iterable[Dim]) -> str:
    """`[b, t, 256]`."""
    return "[" + ", ".join(str(d) for d in shape) + "]"


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and shape of a value.

    Raises:
        ValueError: A dimension is a negative int.
    """

    dtype: DType
    shape: Shape

    def __post_init__(self) -> None:
        if any(isinstance(d, int) and d < 0 for d in self.shape):
            raise ValueError(f"negative dimension in {format_shape(self.shape)}")

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype.value}{format_shape(self.shape)}"


@dataclass(frozen=True, slots=True)
class SymbolRange:
    """Inclusive bounds of a dimension symbol at run time.

    Raises:
        ValueError: The range is empty or negative.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ValueError(f"empty or negative range {self.low}..{self.high}")

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"
