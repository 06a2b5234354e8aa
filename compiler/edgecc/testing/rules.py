"""How expressions grow: rules that say which op can give a wanted tensor, and from what.

Growing runs from the result downwards, so nothing is drawn and then thrown away. A rule draws the
attributes and weights of its op and asks for the operands, which are grown the same way one level
deeper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from hypothesis import strategies as st

from edgecc.ir.ops import Attributes
from edgecc.ir.types import DType
from edgecc.testing.expressions import Apply, Expr, Wanted, input_of
from edgecc.testing.weights import WeightTree, weights

T = TypeVar("T")

WIDTHS = (2, 4, 8, 3, 1, 0)
"""Sizes of last axes: those blocks divide, then those that some or all of them do not."""


class Grower:
    """What a rule draws with.

    Args:
        draw: Of Hypothesis.
        budget: What may be drawn.
        depth: Most ops on a path from here down, the rule's own included.
    """

    def __init__(self, draw: st.DrawFn, budget: Budget, depth: int) -> None:
        self._draw = draw
        self._budget = budget
        self._depth = depth

    def __call__(self, wanted: Wanted) -> Expr:
        """An operand."""
        return self._draw(expressions(self._budget, wanted, self._depth - 1))

    def pick(self, *values: T) -> T:
        """One of some values, simplest first."""
        return self._draw(st.sampled_from(values))

    def number(self, low: int, high: int) -> int:
        """An integer, `low` simplest."""
        return self._draw(st.integers(low, high))

    def cuts(self, size: int) -> list[int]:
        """Sizes of up to three pieces of an axis; some may be empty."""
        edges = sorted(self._draw(st.lists(st.integers(0, size), max_size=2)))
        return [b - a for a, b in zip([0, *edges], [*edges, size], strict=True)]

    def weight(self, *shape: int) -> WeightTree:
        """A weight of any kind."""
        return self._draw(weights(*shape, unbound=self._budget.unbound))


Grow: TypeAlias = Callable[[Grower, Wanted], Expr]
Fits: TypeAlias = Callable[[Wanted], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to get a tensor.

    Attributes:
        op: The op at the top.
        fits: Whether it can give what is wanted.
        grow: Draws it.
        uses: Further ops it places: rules that draw what passes look for have several.
    """

    op: str
    fits: Fits
    grow: Grow
    uses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Budget:
    """What may be drawn.

    Attributes:
        rules: The rules.
        ops: The only ops that may occur; rules that use others are left out.
        unbound: Whether there may be unbound weights.
    """

    rules: tuple[Rule, ...]
    ops: frozenset[str]
    unbound: bool = False

    def options(self, wanted: Wanted) -> list[Rule]:
        """The rules for a wanted tensor."""
        return [r for r in self.rules if self.ops >= {r.op, *r.uses} and r.fits(wanted)]


def expressions(budget: Budget, wanted: Wanted, depth: int) -> st.SearchStrategy[Expr]:
    """Expressions that give a wanted tensor, with at most `depth` levels of rules."""
    return _expressions(budget, wanted, depth)


@st.composite
def _expressions(draw: st.DrawFn, budget: Budget, wanted: Wanted, depth: int) -> Expr:
    options: list[Rule | None] = []
    if depth > 0:
        options += budget.options(wanted)
    # A third of inputs keeps trees small, and makes equal subtrees likely.
    chosen = draw(st.sampled_from([None] * (1 + len(options) // 2) + options))
    if chosen is None:
        return input_of(wanted, draw(st.integers(0, 1)))
    return chosen.grow(Grower(draw, budget, depth), wanted)


def is_float(wanted: Wanted) -> bool:
    """Whether f32 is wanted."""
    return wanted.type.dtype is DType.F32


def is_index(wanted: Wanted) -> bool:
    """Whether indices are wanted."""
    return wanted.type.dtype is DType.I64


def anything(wanted: Wanted) -> bool:
    """For ops that work on all types."""
    return True


def apply(
    op: str, *operands: Expr, weights: tuple[WeightTree, ...] = (), attrs: Attributes | None = None
) -> Apply:
    """An op with one result."""
    return Apply(op, operands, weights, attrs)
