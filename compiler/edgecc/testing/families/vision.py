"""Expressions of the ops of vision encoders, and of models that read what they make."""

from __future__ import annotations

from edgecc.ir.ops.vision import (
    MergeRowsAttributes,
    MultiAxisRopeAttributes,
    MultiHeadAttentionAttributes,
)
from edgecc.ir.types import Dim, sym
from edgecc.testing.expressions import Expr, Wanted, floats, indices, least, most
from edgecc.testing.families.norm import last_axis
from edgecc.testing.rules import Grower, Rule, apply, is_float
from edgecc.testing.weight_trees import rotary_tables


def _is_rows(wanted: Wanted) -> bool:
    """`[b, s, H]`."""
    return is_float(wanted) and wanted.rank == 3 and last_axis(wanted) > 0


def _rope(grow: Grower, wanted: Wanted) -> Expr:
    width, rows = last_axis(wanted), wanted.shape[1]
    heads = grow.pick(*(h for h in (1, 2, 4) if width % h == 0 and width // h >= 2))
    rotated = grow.pick(*(r for r in (2, 4) if r <= width // heads))
    length, count = most(rows) + 3, grow.pick(2, 3)
    axes = tuple(grow.number(0, count - 1) for _ in range(rotated // 2))
    positions = grow(indices(length, count, *wanted.shape[:2]))
    attrs = MultiAxisRopeAttributes(heads, axes)
    tables = rotary_tables(length, rotated)
    return apply("multi_axis_rope", grow(wanted), positions, weights=tables, attrs=attrs)


def _attention(grow: Grower, wanted: Wanted) -> Expr:
    heads = grow.pick(*(h for h in (1, 2, 4) if last_axis(wanted) % h == 0))
    attrs = MultiHeadAttentionAttributes(heads, 0.5)
    return apply("multi_head_attention", *(grow(wanted) for _ in "qkv"), attrs=attrs)


def _merge_rows(grow: Grower, wanted: Wanted) -> Expr:
    *lead, rows, width = wanted.shape
    count = grow.pick(*(c for c in (2, 4, 1) if int(str(width)) % c == 0))
    x = wanted.shaped((*lead, rows * count, int(str(width)) // count))
    return apply("merge_rows", grow(x), attrs=MergeRowsAttributes(count))


def _is_wide(wanted: Wanted) -> bool:
    return wanted.rank >= 2 and isinstance(wanted.shape[-1], int)


def _replace_rows(grow: Grower, wanted: Wanted) -> Expr:
    count: Dim = grow.pick(*(n for n in (sym("s"), 3, 1)))
    rows = grow(floats(count, wanted.shape[2]))
    return apply("replace_rows", grow(wanted), rows, grow(indices(least(count), *wanted.shape[:2])))


def _embedding_bag(grow: Grower, wanted: Wanted) -> Expr:
    vocab, count = grow.pick(2, 5, 11), grow.pick(4, 1)
    table = grow.weight(vocab, last_axis(wanted))
    shape = (*wanted.shape[:-1], count)
    operands = grow(indices(vocab, *shape)), grow(floats(*shape))
    return apply("embedding_bag", *operands, weights=(table,))


def _has_width(wanted: Wanted) -> bool:
    return is_float(wanted) and last_axis(wanted) > 0


RULES = (
    Rule("merge_rows", _is_wide, _merge_rows),
    Rule("replace_rows", _is_rows, _replace_rows),
    Rule("embedding_bag", _has_width, _embedding_bag),
    Rule("multi_head_attention", _is_rows, _attention),
    Rule("multi_axis_rope", lambda w: _is_rows(w) and last_axis(w) >= 2, _rope),
)
