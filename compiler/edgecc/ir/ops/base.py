"""What an operation is: signature, attributes, shape rule, reference semantics, in one class.

An op is a stateless object; its class docstring is its page in the documentation. `infer` is the
only source of result types: the builder calls it, and the verifier calls it again and compares.
`evaluate` is the reference semantics in NumPy, in float32 or float64, and row-invariant: the bits
of a result row do not depend on how many rows are computed together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np

from edgecc.errors import RequestError
from edgecc.ir.encodings import Array
from edgecc.ir.types import Dim, DType, TensorType
from edgecc.ir.weights import BLOCK_BYTES, Weight, WeightTable


class TypeRuleError(ValueError):
    """The operands do not fit the op; the message says what was found and expected."""


class Trait(Flag):
    """Facts passes rely on."""

    NONE = 0
    COMMUTATIVE = auto()
    ELEMENTWISE = auto()
    ROWWISE = auto()
    """Works on the last axis only: rows can be reordered, taken or joined before or after."""
    STEPWISE = auto()
    """Rounds to few values: the smallest change of an operand can change the result by a step."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """Base of the attribute dataclasses. Fields are ints, floats, strings, bools, dims, tuples."""


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """Input and output types of a graph, for ops that call it."""

    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]


Scope = Mapping[str, GraphSignature]


class WeightView:
    """A weight as `evaluate` sees it: dequantized on demand, by rows, in the evaluation dtype."""

    def __init__(self, table: WeightTable, symbol: str, dtype: np.dtype[Any]) -> None:
        self._table = table
        self._dtype = dtype
        self.symbol = symbol
        self.weight: Weight = table[table.resolve(symbol)]

    def dense(self) -> Array:
        """All values. Only for small weights: norms, biases, tables."""
        return self._cast(self._table.dense(self.symbol))

    def rows(self, indices: Array) -> Array:
        """Single rows, one read each: for embedding tables.

        Raises:
            RequestError: There is no such row.
        """
        unique, inverse = np.unique(indices, return_inverse=True)
        check_indices(f"table @{self.symbol}", unique, self.weight.shape[0])
        picked = [self._table.dense(self.symbol, int(i), int(i) + 1)[0] for i in unique]
        table = np.stack(picked) if picked else np.zeros((0, *self.weight.shape[1:]))
        return self._cast(table)[inverse.reshape(indices.shape)]

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[tuple[int, int, Array]]:
        """Blocks of rows `(start, stop, values)`; fewer than `stop - start` rows repeat.

        They may lie in the file, so they are not to be written to.

        Args:
            block_bytes: About so many bytes of float32 in a block.
        """
        encoding = self.weight.encoding
        for start, stop, parts in self._table.row_blocks(self.symbol, block_bytes):
            values = encoding.dequantize(parts)
            is_float = values.dtype.kind == "f"
            yield start, stop, values.astype(self._dtype, copy=False) if is_float else values

    def _cast(self, array: Array) -> Array:
        return array.astype(self._dtype) if array.dtype.kind == "f" else array


class CallGraph(Protocol):
    """Evaluates another graph of the module, for the `call` op."""

    def __call__(self, name: str, operands: Sequence[Array]) -> tuple[Array, ...]:
        """Positional inputs to positional outputs."""
        ...


@dataclass(frozen=True, slots=True)
class EvalContext:
    """What `evaluate` may use besides its operands.

    Attributes:
        dtype: float32 or float64; floating-point operands already have it, results must.
        call: Evaluates a graph by name.
        result_shapes: Result shapes with symbols replaced by the values of this evaluation.
    """

    dtype: np.dtype[Any]
    call: CallGraph
    result_shapes: tuple[tuple[Dim, ...], ...] = ()


A = TypeVar("A", bound=Attributes)


class Op(ABC, Generic[A]):
    """One operation.

    Class attributes:
        name: Spelling in IR text.
        attributes: The attribute dataclass.
        operands: Names of the operands, for messages and documentation.
        weights: Names of the weight operands; a trailing `?` marks the optional ones.
        results: Names of the results.
        variadic: Whether the last operand may repeat (`concat`, `call`).
        traits: See `Trait`.
    """

    name: ClassVar[str]
    attributes: ClassVar[type[Attributes]] = Attributes
    operands: ClassVar[tuple[str, ...]] = ()
    weights: ClassVar[tuple[str, ...]] = ()
    results: ClassVar[tuple[str, ...]] = ("result",)
    variadic: ClassVar[bool] = False
    traits: ClassVar[Trait] = Trait.NONE

    @abstractmethod
    def infer(
        self, operands: Sequence[TensorType], weights: Sequence[Weight], attrs: A, scope: Scope
    ) -> tuple[TensorType, ...]:
        """Result types.

        Raises:
            TypeRuleError: The operands do not fit.
        """

    @abstractmethod
    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: A,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Reference values of the results."""

    def check_counts(self, operands: int, weights: int) -> None:
        """Check how many operands and weights were given.

        Raises:
            TypeRuleError: Too few or too many.
        """
        low = len(self.operands) - (1 if self.variadic else 0)
        if operands < low or (operands > len(self.operands) and not self.variadic):
            raise TypeRuleError(f"expects operands ({', '.join(self.operands)}), got {operands}")
        needed = sum(1 for w in self.weights if not w.endswith("?"))
        if not needed <= weights <= len(self.weights):
            raise TypeRuleError(f"expects weights ({', '.join(self.weights)}), got {weights}")

    def check_attributes(self, attrs: Attributes) -> None:
        """Check that the attributes are those of this op.

        Raises:
            TypeRuleError: They are of another class.
        """
        found, expected = type(attrs).__name__, self.attributes.__name__
        require(type(attrs) is self.attributes, f"expects attributes {expected}, got {found}")

    def __repr__(self) -> str:
        return f"<op {self.name}>"


_NARROW = (DType.BF16, DType.F16, DType.F8E4M3, DType.F8E5M2)


def round_to(array: Array, dtype: DType) -> Array:
    """Floats rounded to a narrower type and held as before; other types leave them as they are.

    To nearest, ties to even; what is too large becomes infinite (NaN where there is no infinity).
    """
    if dtype not in _NARROW or array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype.numpy).astype(array.dtype)


def require(condition: bool, message: str) -> None:
    """Raise a `TypeRuleError` with the message unless the condition holds."""
    if not condition:
        raise TypeRuleError(message)


def require_type(
    what: str, found: TensorType, dtype: DType | None = None, rank: int | None = None
) -> None:
    """Check dtype and rank of an operand; the message is only made when it is needed."""
    if dtype is not None and found.dtype is not dtype:
        raise TypeRuleError(f"{what} must be {dtype.value}, got {found}")
    if rank is not None and found.rank != rank:
        raise TypeRuleError(f"{what} must have rank {rank}, got {found}")


def require_float(what: str, found: TensorType) -> None:
    """Check that an operand holds floating-point numbers."""
    if not found.dtype.is_float:
        raise TypeRuleError(f"{what} must be floating-point, got {found}")


def require_equal(what: str, found: object, expected: object) -> None:
    """Check that two dims, shapes or counts are equal."""
    if found != expected:
        raise TypeRuleError(f"{what}: expected {expected}, got {found}")


def check_indices(what: str, indices: Array, size: int) -> None:
    """Check that indices are in `0..size - 1`; NumPy would count negative ones from the end.

    Raises:
        RequestError: One is not.
    """
    outside = indices[(indices < 0) | (indices >= size)]
    if outside.size:
        raise RequestError(
            "run/index-range", f"{what}: index {outside.flat[0]} is outside 0..{size - 1}"
        )
