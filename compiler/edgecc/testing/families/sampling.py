"""Expressions of the ops that choose tokens."""

from __future__ import annotations

from edgecc.ir.ops.sampling import ArgmaxAttributes, MarkovChainAttributes
from edgecc.testing.expressions import Apply, Expr, Wanted, floats, indices
from edgecc.testing.rules import Grower, Rule, apply, is_float, is_index


def _argmax(grow: Grower, wanted: Wanted) -> Expr:
    width = grow.pick(2, 4, 3, 1)
    limit = grow.number(1, min(width, wanted.below))
    return apply("argmax", grow(floats(*wanted.shape, width)), attrs=ArgmaxAttributes(limit))


def _chain(grow: Grower, wanted: Wanted, index: int, vocab: int, rank: int) -> Expr:
    batch, steps = wanted.shape[:2]
    assert isinstance(steps, int)
    slots = steps + grow.number(0, 1)
    limit = grow.number(1, min(vocab, wanted.below or vocab))
    return Apply(
        "markov_chain",
        (grow(floats(batch, slots, vocab)), grow(indices(vocab, batch))),
        (grow.weight(vocab, rank), grow.weight(vocab, rank)),
        MarkovChainAttributes(steps, limit),
        index,
    )


def _tokens(grow: Grower, wanted: Wanted) -> Expr:
    return _chain(grow, wanted, 0, grow.pick(2, 5), grow.pick(2, 4))


def _logits(grow: Grower, wanted: Wanted) -> Expr:
    return _chain(grow, wanted, 1, int(str(wanted.shape[2])), grow.pick(2, 4))


def _embeddings(grow: Grower, wanted: Wanted) -> Expr:
    return _chain(grow, wanted, 2, grow.pick(2, 5), int(str(wanted.shape[2])))


def _has_steps(wanted: Wanted) -> bool:
    steps = wanted.shape[1] if wanted.rank > 1 else 0
    return isinstance(steps, int) and steps > 0


def _is_block(wanted: Wanted) -> bool:
    width = wanted.shape[2] if wanted.rank == 3 else 0
    return is_float(wanted) and _has_steps(wanted) and isinstance(width, int) and width > 0


RULES = (
    Rule("argmax", lambda wanted: is_index(wanted) and wanted.rank < 4, _argmax),
    Rule("markov_chain", lambda w: is_index(w) and w.rank == 2 and _has_steps(w), _tokens),
    Rule("markov_chain", _is_block, _logits),
    Rule("markov_chain", _is_block, _embeddings),
)
