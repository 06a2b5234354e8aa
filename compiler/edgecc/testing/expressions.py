"""Typed expressions: what random modules are drawn as, before they become nodes.

An expression is an immutable tree, equal by value. Emitting it (`edgecc.testing.emit`) gives equal
subtrees one node, so sharing needs no references, and a shrunk tree is a small graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from edgecc.ir.ops import Attributes
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.ir.types import Dim, DimExpr, DType, Shape, SymbolRange, TensorType, sym
from edgecc.testing.weight_trees import WeightTree

SYMBOLS: Mapping[str, SymbolRange] = {
    "b": SymbolRange(1, 2),
    "t": SymbolRange(0, 4),
    "s": SymbolRange(1, 3),
    "r": SymbolRange(0, 3),
}
"""Sequences, tokens (may be none), tokens (at least one), selected rows."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an expression must give.

    Attributes:
        type: f32, or i64 for indices.
        below: All indices are in `0..below - 1`; 0 for floats.
    """

    type: TensorType
    below: int = 0

    @property
    def shape(self) -> Shape:
        """The shape alone."""
        return self.type.shape

    @property
    def rank(self) -> int:
        """Number of axes."""
        return self.type.rank

    def shaped(self, shape: Shape) -> Wanted:
        """The same elements in another shape."""
        return Wanted(TensorType(self.type.dtype, shape), self.below)

    def with_axis(self, axis: int, dim: Dim) -> Wanted:
        """The same with one axis of another size."""
        return self.shaped((*self.shape[:axis], dim, *self.shape[axis + 1 :]))


def floats(*shape: Dim) -> Wanted:
    """An f32 tensor."""
    return Wanted(TensorType(DType.F32, shape))


def indices(below: int, *shape: Dim) -> Wanted:
    """An i64 tensor of numbers below a bound."""
    return Wanted(TensorType(DType.I64, shape), below)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A graph input. `number` tells inputs of one type apart."""

    wanted: Wanted
    number: int = 0

    @property
    def name(self) -> str:
        """`x.t.4`, `y.t.4`, or with the bound of indices `i.t.below5`."""
        dims = [str(d).replace(" + ", "plus") for d in self.wanted.shape]
        bound = [f"below{self.wanted.below}"] if self.wanted.below else []
        letters = "ijk" if self.wanted.below else "xyz"
        return ".".join([letters[self.number], *dims, *bound])


@dataclass(frozen=True, slots=True)
class Apply:
    """Result `index` of an op."""

    op: str
    operands: tuple[Expr, ...]
    weights: tuple[WeightTree, ...] = ()
    attrs: Attributes | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """Output `index` of another graph, whose inputs are the leaves of its outputs `body`."""

    body: tuple[Expr, ...]
    arguments: tuple[Expr, ...]
    index: int = 0


Expr: TypeAlias = Leaf | Apply | Call


def leaves(*roots: Expr) -> list[Leaf]:
    """The leaves below some expressions, each once, in the order in which they are emitted."""

    def walk(tree: Expr) -> Iterator[Leaf]:
        if isinstance(tree, Leaf):
            yield tree
            return
        for child in tree.arguments if isinstance(tree, Call) else tree.operands:
            yield from walk(child)

    return list(dict.fromkeys(leaf for root in roots for leaf in walk(root)))


def input_of(wanted: Wanted, number: int = 0) -> Expr:
    """An input, or inputs joined along an axis whose size is a sum of symbols.

    The symbols of an input must be whole axes: that is how evaluation learns their values.
    """
    for axis, dim in enumerate(wanted.shape):
        terms = addends(dim)
        if len(terms) > 1:
            parts = tuple(input_of(wanted.with_axis(axis, d), number) for d in terms)
            return Apply("concat", parts, attrs=AxisAttributes(axis))
    return Leaf(wanted, number)


def addends(dim: Dim) -> list[Dim]:
    """`s + t + 1` as its three addends."""
    if isinstance(dim, int):
        return [dim]
    parts: list[Dim] = [sym(s) for s, factor in dim.terms for _ in range(factor)]
    return [*parts, dim.constant] if dim.constant else parts


def most(dim: Dim) -> int:
    """The largest value of a dimension."""
    if isinstance(dim, int):
        return dim
    return dim.constant + sum(factor * SYMBOLS[s].high for s, factor in dim.terms)


def least(dim: Dim) -> int:
    """The smallest value of a dimension."""
    if isinstance(dim, int):
        return dim
    return dim.constant + sum(factor * SYMBOLS[s].low for s, factor in dim.terms)


def is_sum(dim: Dim) -> bool:
    """Whether a dimension has several addends."""
    return isinstance(dim, DimExpr) and len(addends(dim)) > 1
