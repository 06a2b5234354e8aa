"""Expressions of the normalizations."""

from __future__ import annotations

from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.testing.expressions import Expr, Wanted
from edgecc.testing.rules import Grower, Rule, apply, is_float


def last_axis(wanted: Wanted) -> int:
    """Size of the last axis, 0 when there is none or it is not known."""
    size = wanted.shape[-1] if wanted.rank else 0
    return size if isinstance(size, int) else 0


def _has_width(wanted: Wanted) -> bool:
    return is_float(wanted) and last_axis(wanted) > 0


def _rms_norm(grow: Grower, wanted: Wanted) -> Expr:
    return _norm_of(grow, wanted, grow(wanted))


def _norm_of(grow: Grower, wanted: Wanted, x: Expr) -> Expr:
    width = last_axis(wanted)
    groups = grow.pick(*(g for g in (1, 2, 4) if width % g == 0))
    attrs = RmsNormAttributes(1e-5, groups)
    return apply("rms_norm", x, weights=(grow.weight(width // groups),), attrs=attrs)


def _residual(grow: Grower, wanted: Wanted) -> Expr:
    """`y = a + b` and `y + f(norm(y))`, as decoder layers have it."""
    y = apply("add", grow(wanted), grow(wanted))
    normed = _norm_of(grow, wanted, y)
    return apply("add", y, normed if grow.pick(True, False) else apply("silu", normed))


RULES = (
    Rule("rms_norm", _has_width, _rms_norm),
    Rule("add", _has_width, _residual, uses=("rms_norm", "silu")),
)
