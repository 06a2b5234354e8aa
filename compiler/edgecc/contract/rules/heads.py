"""Rules about output heads and embedding tables, own and borrowed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar

from edgecc.contract.pair import Pair, Side
from edgecc.contract.rule import Rule
from edgecc.errors import Diagnostic, InputError, Severity, UnsupportedError
from edgecc.frontends.strict_json import Json

_ROTATED = re.compile(
    r"hadamard|spinquant|quarot|(?<![a-z])rotat(ion|ed|e)(?![a-z])|transform_config"
)
"""What quantizers that turn the basis of hidden states write into keys and tensor names."""


class HeadAndEmbedding(Rule):
    """Target and draft end in a head that is really there, and start from a table that is.

    What it checks
        The target has a head, or ties it to the embedding table; a tied head that is stored as well
        must be equal, which is seen when compiling. What the draft does not store it borrows from
        the target, in the precision the target stores: hidden size and rows must fit. What it
        stores itself is used. Flags about what it ships must be true.

    Why it matters
        A packed head has half the columns of a dense one: taken as a dense matrix it fails, or
        fits by accident and gives noise. A head that is silently taken from somewhere else costs
        acceptance and nothing else.

    What to do
        Use the target that the draft was trained for, with its head included.
    """

    name = "head-and-embedding"
    ids: ClassVar[Mapping[str, str]] = {
        "bind/no-lm-head": "the target has no head and does not tie it",
        "bind/no-embed-tokens": "neither draft nor target has an embedding table",
        "bind/no-target": "the draft borrows, and there is no target",
        "bind/target-unbound": "the target's own tensor is missing",
        "bind/no-matrix": "a head or table is no matrix",
        "bind/hidden-mismatch": "the borrowed tensor is of another hidden size",
        "bind/vocab-mismatch": "the borrowed tensor has another number of rows",
        "bind/no-own-head": "--lm-head own, and the draft has none",
        "bind/has-own-head": "--lm-head share, and the draft has its own",
        "draft/needs-target": "a draft was given in the place of a target",
        "draft/no-embedding": "a table of its own is declared and not stored",
        "draft/ships": "a flag about what the draft ships is wrong",
        "target/tied-heads-differ": "tied, but a different head is stored",
        "target/tied-heads-stored": "tied, and a head is stored: compared when compiling",
    }

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Compare the flags of a draft with what it stores."""
        if pair.draft is not None:
            for key, tensor in (
                ("has_lm_head", "lm_head.weight"),
                ("has_embed_tokens", "embed_tokens.weight"),
            ):
                yield from self._ships(pair.draft, key, tensor)

    def _ships(self, draft: Side, key: str, tensor: str) -> Iterator[Diagnostic]:
        if key not in draft.top:
            return
        declared, stored = draft.top.boolean(key, default=False), draft.stores(tensor)
        if declared and not stored:
            raise InputError(
                "draft/ships",
                f"{key} is true, but {tensor} is not stored",
                where=draft.top.at(key),
                help="the checkpoint is incomplete: fetch its weights again",
            )
        if stored and not declared:
            yield Diagnostic(
                "draft/ships",
                f"{key} is false, but {tensor} is stored, and used",
                where=draft.top.at(key),
                help="check that config and weights belong together",
                severity=Severity.WARNING,
            )


class RotatedHead(Rule):
    """A draft does not borrow a head that expects rotated hidden states.

    What it checks
        Marks of quantizers that rotate the hidden states of the target and undo it in the head
        (Hadamard, SpinQuant, QuaRot): keys of the quantization config, and names of tensors. A
        draft must carry them too.

    Why it matters
        The target computes the same as before. The draft's hidden states are not rotated, so that
        it proposes noise through the borrowed head: acceptance falls from a half to a hundredth,
        and no error is seen. A rotation that left no mark is found by `edgecc verify` alone.

    What to do
        Use a target without rotation, or a draft that was made for this one.
    """

    name = "rotated-head"
    ids: ClassVar[Mapping[str, str]] = {"head/rotated": "the target was rotated by its quantizer"}

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Look for marks in the target, and for the same in the draft."""
        if pair.target is None:
            return
        found = list(_marks(pair.target))
        if not found:
            return
        message = f"the target's hidden states are rotated by its quantizer: {found[0]}"
        if pair.draft is None:
            yield Diagnostic(
                "head/rotated",
                message,
                where=pair.target.top.where,
                notes=("computed as stored: rotations that are applied at run time are not",),
                help="compare the output of a compile with the unrotated model",
                severity=Severity.WARNING,
            )
        elif not any(_marks(pair.draft)):
            raise UnsupportedError(
                "head/rotated",
                f"{message}, and the draft's are not",
                where=pair.target.top.where,
                notes=found[1:4],
                help="use a target without rotation, or a draft that was made for this one",
            )


def _marks(side: Side) -> Iterator[str]:
    """Keys that are set and tensors that tell of a rotation."""
    for fields in side.quantization():
        for key in _keys(fields.values):
            yield f"{fields.where} has {key}"
    for key in _keys({k: v for k, v in side.top.values.items() if not isinstance(v, dict)}):
        yield side.top.at(key)
    yield from (f"{n} is stored" for n in side.checkpoint.tensors if _ROTATED.search(n.lower()))


def _keys(values: Mapping[str, Json]) -> Iterator[str]:
    for key, value in values.items():
        if _ROTATED.search(key.lower()) and value not in (None, False, {}, [], "none"):
            yield key
        elif isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in _keys(value))
