"""Expressions of linear layers and embedding tables."""

from __future__ import annotations

from edgecc.testing.expressions import Expr, Wanted, floats, indices
from edgecc.testing.rules import Grower, Rule, apply, is_float


def _is_rows(wanted: Wanted) -> bool:
    return is_float(wanted) and wanted.rank > 0 and isinstance(wanted.shape[-1], int)


def _width(wanted: Wanted) -> int:
    return int(str(wanted.shape[-1]))


def _linear(grow: Grower, wanted: Wanted) -> Expr:
    columns = grow.width()
    x = grow(wanted.with_axis(wanted.rank - 1, columns))
    return _layer(grow, x, columns, _width(wanted), bias=grow.pick(False, True))


def _layer(grow: Grower, x: Expr, columns: int, rows: int, *, bias: bool) -> Expr:
    weights = (grow.weight(rows, columns),)
    return apply("linear", x, weights=(*weights, grow.weight(rows)) if bias else weights)


def _gated(grow: Grower, wanted: Wanted) -> Expr:
    """Two layers of one input, which `fuse-gate-up` looks for."""
    columns = grow.width()
    x = grow(wanted.with_axis(wanted.rank - 1, columns))
    gate, up = (_layer(grow, x, columns, _width(wanted), bias=False) for _ in range(2))
    return apply("swiglu", gate, up)


def _embedding(grow: Grower, wanted: Wanted) -> Expr:
    vocab = grow.pick(2, 5, 11)
    table = grow.weight(vocab, _width(wanted))
    return apply("embedding", grow(indices(vocab, *wanted.shape[:-1])), weights=(table,))


def _tied(grow: Grower, wanted: Wanted) -> Expr:
    """A table that is looked up in and multiplied by: tied embeddings."""
    vocab, hidden = _width(wanted), grow.pick(4, 8)
    table = grow.weight(vocab, hidden)
    ids = grow(indices(max(vocab, 1), *wanted.shape[:-1]))
    x = apply("embedding", ids, weights=(table,))
    other = grow(floats(*wanted.shape[:-1], hidden))
    return apply("linear", apply("add", x, other), weights=(table,))


def _has_tokens(wanted: Wanted) -> bool:
    return _is_rows(wanted) and _width(wanted) > 0


RULES = (
    Rule("linear", _is_rows, _linear),
    Rule("swiglu", _is_rows, _gated, uses=("linear",)),
    Rule("embedding", _is_rows, _embedding),
    Rule("linear", _has_tokens, _tied, uses=("embedding", "add")),
)
