"""Expressions of linear layers and embedding tables."""

from __future__ import annotations

from edgecc.testing.expressions import Expr, Wanted, indices
from edgecc.testing.rules import Grower, Rule, apply, is_float, is_index
from edgecc.testing.weight_trees import Ids, WeightTree


def _is_rows(wanted: Wanted) -> bool:
    return is_float(wanted) and wanted.rank > 0 and isinstance(wanted.shape[-1], int)


def _width(wanted: Wanted) -> int:
    return int(str(wanted.shape[-1]))


def _linear(grow: Grower, wanted: Wanted) -> Expr:
    columns, rows = grow.width(), _width(wanted)
    x = grow(wanted.with_axis(wanted.rank - 1, columns))
    weights = (grow.weight(rows, columns),)
    bias = grow.pick(False, True)
    return apply("linear", x, weights=(*weights, grow.weight(rows)) if bias else weights)


# What follows draws what `_linear` draws, then more: that is how it shrinks to it.


def _gated(grow: Grower, wanted: Wanted) -> Expr:
    """Two layers of one input, which `fuse-gate-up` looks for."""
    columns, rows = grow.width(), _width(wanted)
    x = grow(wanted.with_axis(wanted.rank - 1, columns))
    weights: list[tuple[WeightTree, ...]] = [(grow.weight(rows, columns),) for _ in range(2)]
    if grow.pick(False, True):
        weights = [(*w, grow.weight(rows)) for w in weights]
    return apply("swiglu", *(apply("linear", x, weights=w) for w in weights))


def _tied(grow: Grower, wanted: Wanted) -> Expr:
    """A table that is looked up in and multiplied by: tied embeddings."""
    hidden, vocab = grow.width(), _width(wanted)
    ids = grow(indices(vocab, *wanted.shape[:-1]))
    table = (grow.weight(vocab, hidden),)
    return apply("linear", apply("embedding", ids, weights=table), weights=table)


def _embedding(grow: Grower, wanted: Wanted) -> Expr:
    vocab = grow.pick(2, 5, 11)
    table = grow.weight(vocab, _width(wanted))
    return apply("embedding", grow(indices(vocab, *wanted.shape[:-1])), weights=(table,))


def _lookup(grow: Grower, wanted: Wanted) -> Expr:
    vocab = grow.pick(2, 5, 11)
    table = Ids((vocab,), wanted.below, grow.number(0, 1), offsets=grow.pick(False, True))
    return apply("lookup", grow(indices(vocab, *wanted.shape)), weights=(table,))


def _has_tokens(wanted: Wanted) -> bool:
    return _is_rows(wanted) and _width(wanted) > 0


RULES = (
    Rule("linear", _is_rows, _linear),
    Rule("swiglu", _is_rows, _gated, uses=("linear",)),
    Rule("embedding", _is_rows, _embedding),
    Rule("lookup", is_index, _lookup),
    Rule("linear", _has_tokens, _tied, uses=("embedding",)),
)
