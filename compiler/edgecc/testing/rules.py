"""How expressions grow: rules that say which op can give a wanted tensor, and from what.

Growing runs from the result downwards, so nothing is drawn and then thrown away. A rule draws the
attributes and weights of its op and asks for the operands, which are grown the same way one level
deeper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from hypothesis import strategies as st

from edgecc.ir.encodings import Encoding, IntShape
from edgecc.ir.ops import Attributes
from edgecc.ir.types import DType
from edgecc.testing.expressions import Apply, Expr, Wanted, input_of
from edgecc.testing.weight_trees import WeightTree, weight_trees

T = TypeVar("T")


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
        return self._draw(self._budget.expressions(wanted, self._depth - 1))

    def pick(self, *values: T) -> T:
        """One of some values, simplest first."""
        chosen: T = self._draw(_sampled(values, tuple(map(type, values))))
        return chosen

    def width(self) -> int:
        """A size of a last axis."""
        return self.pick(*self._budget.widths)

    def number(self, low: int, high: int) -> int:
        """An integer, `low` simplest."""
        return self._draw(st.integers(low, high))

    def cuts(self, size: int) -> list[int]:
        """Sizes of up to three pieces of an axis; some may be empty."""
        edges = sorted(self._draw(_edges(size)))
        return [b - a for a, b in zip([0, *edges], [*edges, size], strict=True)]

    def weight(self, *shape: int) -> WeightTree:
        """A weight of any kind."""
        return self._draw(self._budget.weights(shape))


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


class Budget:
    """What may be drawn, and the strategies made for it so far: making them takes longer than use.

    Args:
        rules: The rules.
        ops: The only ops that may occur; rules that use others are left out.
        widths: Sizes of last axes that ops choose, simplest first.
        encodings: Of weights; Dense f32 where none of them fits.
        unbound: Whether there may be unbound weights.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        ops: Set[str],
        widths: Sequence[int],
        encodings: Sequence[Encoding],
        *,
        unbound: bool,
    ) -> None:
        self.rules = [r for r in rules if ops >= {r.op, *r.uses}]
        self.widths = widths
        self._encodings = tuple(encodings)
        self._unbound = unbound
        self._weights: dict[IntShape, st.SearchStrategy[WeightTree]] = {}
        self._expressions: dict[tuple[Wanted, int, bool], st.SearchStrategy[Expr]] = {}

    def weights(self, shape: IntShape) -> st.SearchStrategy[WeightTree]:
        """Weights of a shape."""
        if shape not in self._weights:
            self._weights[shape] = weight_trees(shape, self._encodings, unbound=self._unbound)
        return self._weights[shape]

    def expressions(
        self, wanted: Wanted, depth: int, *, root: bool = False
    ) -> st.SearchStrategy[Expr]:
        """Expressions that give a wanted tensor, with at most `depth` rules on a path.

        Below the root, inputs are as likely as half of the rules together: that keeps trees small.
        """
        key = wanted, depth, root
        if key not in self._expressions:
            options: list[Rule | None] = [r for r in self.rules if r.fits(wanted)]
            # The choices are the same ones in the same places at the root and below, down to the
            # last depth, so that subtrees can move up when they are shrunk.
            more = [None] * (0 if root else len(options) // 2)
            choice = st.sampled_from([None, *options, *more])
            self._expressions[key] = _grown(self, choice, wanted, depth)
        return self._expressions[key]


@st.composite
def _grown(
    draw: st.DrawFn,
    budget: Budget,
    choice: st.SearchStrategy[Rule | None],
    wanted: Wanted,
    depth: int,
) -> Expr:
    rule = draw(choice)
    if rule is None or depth == 0:
        return input_of(wanted, draw(_NUMBERS))
    return rule.grow(Grower(draw, budget, depth), wanted)


_NUMBERS = st.integers(0, 1)


@functools.cache
def _edges(size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, size), max_size=2)


@functools.cache
def _sampled(values: tuple[T, ...], types: tuple[type, ...]) -> st.SearchStrategy[T]:
    """Types are part of the key: True is equal to 1."""
    return st.sampled_from(values)


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
