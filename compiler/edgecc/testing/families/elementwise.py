"""Expressions of the elementwise ops."""

from __future__ import annotations

from edgecc.testing.expressions import Expr, Wanted
from edgecc.testing.rules import Grow, Grower, Rule, apply, is_float


def _unary(op: str) -> Grow:
    return lambda grow, wanted: apply(op, grow(wanted))


def _binary(op: str) -> Grow:
    def build(grow: Grower, wanted: Wanted) -> Expr:
        first = grow(wanted)
        same = grow.pick(True, False)
        return apply(op, first, first if same else grow(wanted))

    return build


RULES = (
    *(Rule(op, is_float, _unary(op)) for op in ("silu", "sigmoid")),
    *(Rule(op, is_float, _binary(op)) for op in ("add", "mul", "swiglu")),
)
