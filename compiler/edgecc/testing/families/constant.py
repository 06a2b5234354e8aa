"""Expressions that are weights."""

from __future__ import annotations

from edgecc.testing.expressions import Expr, Wanted
from edgecc.testing.rules import Grower, Rule, apply, is_index
from edgecc.testing.weight_trees import Ids


def _is_known(wanted: Wanted) -> bool:
    return all(isinstance(dim, int) for dim in wanted.shape)


def _constant(grow: Grower, wanted: Wanted) -> Expr:
    shape = tuple(dim for dim in wanted.shape if isinstance(dim, int))
    if is_index(wanted):
        return apply("constant", weights=(Ids(shape, wanted.below, grow.number(0, 1)),))
    return apply("constant", weights=(grow.weight(*shape),))


RULES = (Rule("constant", _is_known, _constant),)
