"""Expressions of the elementwise ops."""

from __future__ import annotations

from edgecc.ir.ops.elementwise import GELUS, CastAttributes, GeluAttributes
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


def _difference(grow: Grower, wanted: Wanted) -> Expr:
    """Of values that are not nearly equal: of two that are, nothing but rounding is left."""
    return apply("sub", apply("sigmoid", grow(wanted)), apply("tanh", grow(wanted)))


def _cast(grow: Grower, wanted: Wanted) -> Expr:
    """Rounded to another type and back."""
    x = grow(wanted)
    for dtype in (grow.pick("bf16", "f16", "f32", "f64"), "f32"):
        x = apply("cast", x, attrs=CastAttributes(dtype))
    return x


def _gelu(grow: Grower, wanted: Wanted) -> Expr:
    return apply("gelu", grow(wanted), attrs=GeluAttributes(grow.pick(*GELUS)))


RULES = (
    *(Rule(op, is_float, _unary(op)) for op in ("silu", "sigmoid", "tanh")),
    *(Rule(op, is_float, _binary(op)) for op in ("add", "mul", "swiglu")),
    Rule("sub", is_float, _difference),
    Rule("gelu", is_float, _gelu),
    Rule("cast", is_float, _cast),
)
