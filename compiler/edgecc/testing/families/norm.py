"""Expressions of the normalizations."""

from __future__ import annotations

from edgecc.ir.ops.norm import AddRmsNormAttributes, LayerNormAttributes, RmsNormAttributes
from edgecc.testing.expressions import Apply, Expr, Wanted
from edgecc.testing.rules import Grower, Rule, apply, is_float
from edgecc.testing.weight_trees import WeightTree


def last_axis(wanted: Wanted) -> int:
    """Size of the last axis, 0 when there is none or it is not known."""
    size = wanted.shape[-1] if wanted.rank else 0
    return size if isinstance(size, int) else 0


def _has_width(wanted: Wanted) -> bool:
    return is_float(wanted) and last_axis(wanted) > 0


def _norm(grow: Grower, wanted: Wanted) -> tuple[tuple[WeightTree, ...], RmsNormAttributes]:
    """Weight and attributes."""
    width = last_axis(wanted)
    groups = grow.pick(*(g for g in (1, 2, 4) if width % g == 0))
    return (grow.weight(width // groups),), RmsNormAttributes(1e-5, groups)


def _rms_norm(grow: Grower, wanted: Wanted) -> Expr:
    x, (weights, attrs) = grow(wanted), _norm(grow, wanted)
    return apply("rms_norm", x, weights=weights, attrs=attrs)


def _residual(grow: Grower, wanted: Wanted) -> Expr:
    """`y = a + b` and `y + norm(y)`: a sum that is normed and read elsewhere as well.

    Draws what `_rms_norm` draws, then more: that is how it shrinks to it.
    """
    a, (weights, attrs), b = grow(wanted), _norm(grow, wanted), grow(wanted)
    y = apply("add", a, b)
    return apply("add", y, apply("rms_norm", y, weights=weights, attrs=attrs))


def _fused(grow: Grower, wanted: Wanted) -> Expr:
    a, b, weights = grow(wanted), grow(wanted), (grow.weight(last_axis(wanted)),)
    index = grow.pick(0, 1)
    return Apply("add_rms_norm", (a, b), weights, AddRmsNormAttributes(1e-5), index)


def _layer_norm(grow: Grower, wanted: Wanted) -> Expr:
    width = last_axis(wanted)
    weights = grow.weight(width), grow.weight(width)
    return apply("layer_norm", grow(wanted), weights=weights, attrs=LayerNormAttributes(1e-5))


RULES = (
    Rule("add_rms_norm", _has_width, _fused),
    Rule("rms_norm", _has_width, _rms_norm),
    Rule("layer_norm", _has_width, _layer_norm),
    Rule("add", _has_width, _residual, uses=("rms_norm",)),
)
