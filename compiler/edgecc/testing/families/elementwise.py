"""Expressions of the elementwise ops."""

from __future__ import annotations

from edgecc.ir.ops.elementwise import CastAttributes
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


def _cast(grow: Grower, wanted: Wanted) -> Expr:
    """Rounded to 16 bits and back: other ops are drawn in f32."""
    narrow = CastAttributes(grow.pick("bf16", "f16"))
    return apply("cast", apply("cast", grow(wanted), attrs=narrow), attrs=CastAttributes("f32"))


RULES = (
    Rule("cast", is_float, _cast),
    *(Rule(op, is_float, _unary(op)) for op in ("silu", "sigmoid")),
    *(Rule(op, is_float, _binary(op)) for op in ("add", "mul", "swiglu")),
)
