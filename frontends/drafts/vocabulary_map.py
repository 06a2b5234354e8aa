"""Reduced draft vocabularies: which token of the target each row of the draft's head means.

`d2t` gives each draft id the distance to its target id, `target = i + d2t[i]`; `t2d` marks the
target ids that have a draft id. A few exports store target ids in `d2t` instead of distances: they
are recognized by `t2d` and by nothing else, because either form can look like the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgecc.errors import Diagnostic, InputError, Severity
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.ir.encodings import Array
from edgecc.ir.types import DType

_FETCH = "the checkpoint is incomplete or damaged: fetch it again, or export it again"


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The ids a draft chooses from.

    Attributes:
        size: Rows of the head.
        table: Symbol of the table of target ids, i64 `[size]`; None if ids are the target's.
        limit: Ids from here on mean padding rows of the target.
    """

    size: int
    table: str | None
    limit: int


def read_vocabulary(
    weights: ModuleWeights, vocab: int, declared: int | None, num_tokens: int
) -> DraftVocabulary:
    """Size of the draft's vocabulary and its map, checked once and completely.

    Args:
        weights: Of the draft, in canonical names.
        vocab: Rows of the target's vocabulary.
        declared: Rows of the draft's, if its config says.
        num_tokens: Target ids from here on are padding rows.

    Raises:
        InputError: The vocabulary is reduced but has no head or no map, or head, map, marks and
            config do not agree.
    """
    size = _size(weights, vocab, declared)
    marked = _marked(weights, vocab)
    if not weights.has("d2t"):
        if size != vocab:
            raise InputError(
                "draft/no-vocabulary-map",
                f"lm_head has {size} rows, the vocabulary {vocab}, and there is no d2t that says "
                "which token each row means",
                where=_where(weights, "lm_head.weight"),
                help=_FETCH,
            )
        if marked is None:  # and no table of them: vocab may be any number of a config
            return DraftVocabulary(size, None, min(vocab, num_tokens))
        targets, symbol = np.arange(vocab), None
    else:
        symbol = weights.ids("d2t", size)
        stored = weights.checkpoint.read(weights.names()["d2t"])
        targets = stored + np.arange(size)
        if _is(stored, marked) and not _is(targets, marked):
            targets = stored
            weights.module.decisions.append("d2t of the draft holds target ids, not distances")
        else:
            symbol = _absolute(weights, symbol, stored, vocab, marked)
    _check(weights, targets, vocab, marked)
    proposable = np.flatnonzero(targets < num_tokens)
    if not proposable.size:
        raise _bad_map(weights, "d2t", "every id of the draft means a padding row of the target")
    return DraftVocabulary(size, symbol, int(proposable[-1]) + 1)


def _size(weights: ModuleWeights, vocab: int, declared: int | None) -> int:
    """Rows of the head: the stored one's, else what config and map say, which must be all.

    Raises:
        InputError: They contradict each other, or a reduced vocabulary has no head.
    """
    names = weights.names()
    role, tensors = weights.checkpoint.role, weights.checkpoint.tensors
    if (stored := weights.size("lm_head.weight")) is not None:
        size = stored[0]
        if declared not in (None, size) or size > vocab:
            raise InputError(
                "draft/vocabulary-size",
                f"lm_head has {size} rows, draft_vocab_size is {declared}, vocab_size {vocab}",
                where=f"{role}/config.json: draft_vocab_size",
                help="config and weights are of different revisions: fetch both again",
            )
        return size
    mapped = tensors[names["d2t"]].shape if "d2t" in names else ()
    size = declared or (mapped[0] if mapped else vocab)
    if size != vocab:
        raise InputError(
            "bind/vocab-mismatch",
            f"the draft's vocabulary has {size} rows and it ships no lm_head; the target's head "
            f"has {vocab}",
            where=f"{role}: lm_head.weight",
            notes=("a reduced draft vocabulary needs a head of its own",),
            help=_FETCH,
        )
    return size


def _marked(weights: ModuleWeights, vocab: int) -> Array | None:
    """Target ids that `t2d` marks, increasing; None if it is not stored.

    Raises:
        InputError: It has another shape or dtype.
    """
    name = weights.names().get("t2d")
    if name is None:
        return None
    info = weights.checkpoint.info(name)
    if info.shape != (vocab,) or info.dtype is not DType.BOOL:
        raise InputError(
            "checkpoint/shape",
            f"expected a bool tensor of shape [{vocab}], found {info.dtype.value} "
            f"{list(info.shape)}",
            where=weights.checkpoint.location(name),
            help=_FETCH,
        )
    weights.quantization.consumed.add(name)
    return np.flatnonzero(weights.checkpoint.read(name))


def _is(targets: Array, marked: Array | None) -> bool:
    return marked is not None and np.array_equal(np.sort(targets), marked)


def _absolute(
    weights: ModuleWeights, symbol: str, offsets: Array, vocab: int, marked: Array | None
) -> str | None:
    """Symbol of the table of ids made from distances; None where all of them are zero and whole."""
    if not offsets.any():
        if len(offsets) == vocab:
            return None
        if marked is None:
            weights.checkpoint.findings.append(
                Diagnostic(
                    "draft/zero-map",
                    f"d2t is all zeros: the draft's ids are the first {len(offsets)} of the target",
                    where=_where(weights, "d2t"),
                    help="a map that was never filled looks the same: check that the draft's "
                    "proposals are ever accepted",
                    severity=Severity.WARNING,
                )
            )
    return weights.module.weights.derive(f"{symbol}.ids", "offsets_to_ids", (symbol,))


def _check(weights: ModuleWeights, targets: Array, vocab: int, marked: Array | None) -> None:
    """Every draft id means a token of its own, and `t2d` marks just these.

    Raises:
        InputError: Not so; the first bad row is named.
    """
    outside = np.flatnonzero((targets < 0) | (targets >= vocab))
    if outside.size:
        row = int(outside[0])
        raise _bad_map(
            weights,
            "d2t",
            f"row {row} means token {targets[row]}, outside 0..{vocab - 1}",
            f"{outside.size} such rows",
        )
    tokens, first = np.unique(targets, return_index=True)
    if len(tokens) != len(targets):
        row = int(np.setdiff1d(np.arange(len(targets)), first)[0])
        raise _bad_map(
            weights, "d2t", f"row {row} means token {targets[row]}, as an earlier row does"
        )
    if marked is not None and not np.array_equal(tokens, marked):
        token = int(np.setxor1d(tokens, marked)[0])
        differ = "is marked but has no id" if token in marked else "has an id but is not marked"
        raise _bad_map(
            weights,
            "t2d",
            f"t2d marks {len(marked)} tokens, the draft has {len(tokens)} ids: token {token} "
            f"{differ}",
        )


def _bad_map(weights: ModuleWeights, name: str, message: str, *notes: str) -> InputError:
    return InputError(
        "draft/vocabulary-map", message, where=_where(weights, name), notes=notes, help=_FETCH
    )


def _where(weights: ModuleWeights, name: str) -> str:
    stored = weights.names().get(name, name)
    if stored in weights.checkpoint.tensors:
        return weights.checkpoint.location(stored)
    return f"{weights.checkpoint.role}: {name}"
