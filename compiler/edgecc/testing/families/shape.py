"""Expressions of the ops that move data, and of positions and lengths."""

from __future__ import annotations

from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes
from edgecc.ir.types import Dim, sym, symbols_of
from edgecc.testing.expressions import (
    Apply,
    Expr,
    Wanted,
    addends,
    floats,
    indices,
    is_sum,
    least,
    most,
)
from edgecc.testing.rules import Grower, Rule, anything, apply, is_index


def _known_axes(wanted: Wanted) -> list[int]:
    """Axes of known size above 0."""
    return [i for i, d in enumerate(wanted.shape) if isinstance(d, int) and d > 0]


def _has_known_axis(wanted: Wanted) -> bool:
    return bool(_known_axes(wanted))


def _known_axis(grow: Grower, wanted: Wanted) -> tuple[int, int]:
    """One of those axes, the last one simplest, and its size."""
    axis = grow.pick(*reversed(_known_axes(wanted)))
    return axis, int(str(wanted.shape[axis]))


def _concat(grow: Grower, wanted: Wanted) -> Expr:
    axis, size = _known_axis(grow, wanted)
    parts = [grow(wanted.with_axis(axis, piece)) for piece in grow.cuts(size)]
    return apply("concat", *parts, attrs=AxisAttributes(axis))


def _has_sum(wanted: Wanted) -> bool:
    return any(map(is_sum, wanted.shape))


def _concat_sum(grow: Grower, wanted: Wanted) -> Expr:
    """Pieces whose sizes are the addends of a symbolic size."""
    axis = next(i for i, d in enumerate(wanted.shape) if is_sum(d))
    parts = [grow(wanted.with_axis(axis, piece)) for piece in addends(wanted.shape[axis])]
    return apply("concat", *parts, attrs=AxisAttributes(axis))


def _split(grow: Grower, wanted: Wanted) -> Expr:
    axis, size = _known_axis(grow, wanted)
    before = [size] * grow.number(0, 2)
    after = [grow.pick(1, 2, 4) for _ in range(grow.number(0, 1))]
    sizes = (*before, size, *after)
    x = grow(wanted.with_axis(axis, sum(sizes)))
    return Apply("split", (x,), attrs=SplitAttributes(axis, sizes), index=len(before))


def _slice(grow: Grower, wanted: Wanted) -> Expr:
    axis, size = _known_axis(grow, wanted)
    start, after = grow.number(0, 2), grow.number(0, 2)
    x = grow(wanted.with_axis(axis, start + size + after))
    return apply("slice", x, attrs=SliceAttributes(axis, start, start + size))


def _tail(grow: Grower, wanted: Wanted) -> Expr:
    axis = grow.number(0, wanted.rank - 1)
    dim = wanted.shape[axis]
    more: Dim = grow.number(0, 2)
    if not isinstance(dim, int) and "s" not in symbols_of(wanted.shape) and grow.pick(True, False):
        more = sym("s")
    x = grow(wanted.with_axis(axis, dim + more))
    return apply("tail", x, grow(wanted), attrs=AxisAttributes(axis))


def _has_axis(wanted: Wanted) -> bool:
    return wanted.rank > 0


def _take_rows(grow: Grower, wanted: Wanted) -> Expr:
    choices: tuple[Dim, ...] = (sym("s"), 3, 1)
    rows = grow.pick(*choices)
    x = grow(wanted.with_axis(1, rows))
    return apply("take_rows", x, grow(indices(least(rows), wanted.shape[1])))


def _is_batch_of_rows(wanted: Wanted) -> bool:
    return wanted.rank == 3


def _pad(grow: Grower, wanted: Wanted) -> Expr:
    axis, size = _known_axis(grow, wanted)
    after = grow.number(0, size)
    value = grow.number(0, min(2, wanted.below - 1) if wanted.below else 2)
    return apply(
        "pad", grow(wanted.with_axis(axis, size - after)), attrs=PadAttributes(axis, after, value)
    )


def _unsqueeze(grow: Grower, wanted: Wanted) -> Expr:
    axis = grow.pick(*(i for i, d in enumerate(wanted.shape) if d == 1))
    x = grow(wanted.shaped((*wanted.shape[:axis], *wanted.shape[axis + 1 :])))
    return apply("unsqueeze", x, attrs=AxisAttributes(axis))


def _squeeze(grow: Grower, wanted: Wanted) -> Expr:
    axis = grow.number(0, wanted.rank)
    x = grow(wanted.shaped((*wanted.shape[:axis], 1, *wanted.shape[axis:])))
    return apply("squeeze", x, attrs=AxisAttributes(axis))


def _position_ids(grow: Grower, wanted: Wanted) -> Expr:
    batch, rows = wanted.shape
    start = grow(indices(wanted.below - most(rows) + 1, batch))
    return apply("position_ids", start, grow(floats(batch, rows, 2)))


def _has_positions(wanted: Wanted) -> bool:
    return is_index(wanted) and wanted.rank == 2 and most(wanted.shape[1]) <= wanted.below


def _advance(grow: Grower, wanted: Wanted) -> Expr:
    rows: Dim = grow.pick(*(r for r in (sym("t"), 1, sym("s")) if most(r) < wanted.below))
    start = grow(indices(wanted.below - most(rows), *wanted.shape))
    return apply("advance", start, grow(floats(*wanted.shape, rows, 2)))


def _is_length(wanted: Wanted) -> bool:
    return is_index(wanted) and wanted.rank == 1 and wanted.below > 1


RULES = (
    Rule("slice", _has_known_axis, _slice),
    Rule("split", _has_known_axis, _split),
    Rule("concat", _has_known_axis, _concat),
    Rule("concat", _has_sum, _concat_sum),
    Rule("tail", _has_axis, _tail, uses=("concat",)),
    Rule("take_rows", _is_batch_of_rows, _take_rows),
    Rule("pad", _has_known_axis, _pad),
    Rule("unsqueeze", lambda wanted: 1 in wanted.shape, _unsqueeze),
    Rule("squeeze", lambda wanted: wanted.rank < 4 and anything(wanted), _squeeze),
    Rule("position_ids", _has_positions, _position_ids),
    Rule("advance", _is_length, _advance),
)
