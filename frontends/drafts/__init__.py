"""Draft models: one kind per file, and how to tell them apart.

A draft's kind is decided by the tensors it stores, because one architecture name is used by several
networks; the config only has to agree.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from edgecc.errors import InputError, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.drafts.base import Draft
from edgecc.frontends.drafts.dflash import DFlash
from edgecc.frontends.drafts.draft_model import DraftModel
from edgecc.frontends.drafts.dspark import DSpark
from edgecc.frontends.drafts.dspark_config import declared_rank
from edgecc.frontends.drafts.eagle3 import Eagle3
from edgecc.frontends.drafts.mtp import Mtp, has_block
from edgecc.frontends.drafts.names import canonical_name
from edgecc.frontends.drafts.ngram import Ngram, check_lookup_options, choose_ngram
from edgecc.frontends.mtp_block import MTP_BLOCK
from edgecc.frontends.options import LiftOptions
from edgecc.frontends.quantization.names import as_weight
from edgecc.frontends.spec_methods import check_method

KINDS: Mapping[str, type[Draft]] = {
    kind.method: kind for kind in (DSpark, DFlash, Eagle3, DraftModel)
}
"""Every kind of draft checkpoint that can be lifted, by its method."""

SUPPORTED = tuple(KINDS)

_ABOUT = {
    "deepseek-v4": "stages of another network, bundled with their own target",
    "mtp": "a layer that belongs to its target's checkpoint: give that alone, with "
    "--spec-method mtp",
}


def choose_draft(
    target: Checkpoint | None, draft: Checkpoint | None, options: LiftOptions
) -> tuple[Draft | Ngram | None, str | None]:
    """How a target is to speculate.

    Args:
        target: The target, if there is one.
        draft: The draft checkpoint, if there is one.
        options: The method and the proposals that were asked for.

    Returns:
        The draft, or what takes its place; None for plain decoding; and the decision as a line.

    Raises:
        UsageError: The method that was asked for does not fit what is there.
        UnsupportedError: A draft of a known kind, or a variant, that edgecc does not build.
        InputError: Not a draft, an incomplete one, or one with a bad config.
    """
    method, steps = options.spec_method, options.num_speculative_tokens
    check_method(method)
    check_lookup_options(options)
    if method == Ngram.method:
        lookup = choose_ngram(target, draft, options)
        return lookup, lookup.decision
    if method == Mtp.method:
        return _own_block(target, draft, steps)
    if draft is None:
        if method != "auto":
            raise UsageError(
                "usage/spec-method",
                f"--spec-method {method} needs a draft",
                help="give its folder: --draft DIR",
            )
        return None, _offer(target)
    found, tensor = _detect(draft)
    if method not in ("auto", found):
        raise UsageError(
            "usage/spec-method",
            f"--spec-method {method}, but the draft is one of method {found}: it stores {tensor}",
            where=draft.location(tensor),
            help=f"leave out --spec-method, or say {found}",
        )
    why = f"it was asked for, and the draft stores {tensor}"
    if method == "auto":
        why = f"the draft stores {tensor}"
    return KINDS[found](draft, steps), f"speculation by method {found}: {why}"


def _own_block(
    target: Checkpoint | None, draft: Checkpoint | None, steps: int | None
) -> tuple[Draft, str]:
    """The target's own block.

    Raises:
        UsageError: There is no target, or a draft as well.
    """
    if draft is not None or target is None:
        raise UsageError(
            "usage/spec-method",
            "--spec-method mtp drafts with a block of the target's own checkpoint"
            + (f", --draft names {draft.name}" if draft is not None else ""),
            help="leave out --draft" if target is not None else "give the target alone",
        )
    block = Mtp(target, steps)
    return block, (
        f"speculation by method mtp: it was asked for, and the target stores its {MTP_BLOCK} "
        f"({len(block.names)} tensors)"
    )


def _offer(target: Checkpoint | None) -> str | None:
    """Told of targets that decode plainly and need not."""
    if target is None or not has_block(target):
        return None
    return f"no draft: --spec-method mtp would draft with the target's {MTP_BLOCK}"


def read_draft(checkpoint: Checkpoint, steps: int | None = None) -> Draft:
    """Recognize a draft and read its config.

    Args:
        checkpoint: The draft.
        steps: Proposals per round; None takes the draft's own number.

    Raises:
        UnsupportedError: A draft of a known kind, or a variant, that edgecc does not build.
        InputError: Not a draft, an incomplete one, or one with a bad config.
        UsageError: The draft cannot propose so many tokens.
    """
    return KINDS[detect_draft(checkpoint)](checkpoint, steps)


def detect_draft(checkpoint: Checkpoint) -> str:
    """The speculation method a checkpoint is a draft for: a key of `KINDS`.

    Raises:
        UnsupportedError: A draft of a known kind that edgecc does not build.
        InputError: Not a draft, or an incomplete one.
    """
    return _detect(checkpoint)[0]


def _detect(checkpoint: Checkpoint) -> tuple[str, str]:
    """Like `detect_draft`, with the tensor that gives it away."""
    found, tensor = _kind(checkpoint)
    where = f"{checkpoint.role}/config.json"
    rank = declared_rank(checkpoint) if found == "dflash" else None
    if rank:
        raise InputError(
            "draft/markov-missing",
            f"markov_rank is {rank}, but no markov_head tensors are stored",
            where=f"{where}: markov_rank",
            help="the checkpoint is incomplete: fetch its weights again",
        )
    if found in SUPPORTED:
        return found, tensor
    if not found:
        raise InputError(
            "draft/unknown",
            "the checkpoint is no draft edgecc knows: no fc.weight, markov_head, midlayer or "
            "embed_tokens tensors",
            where=where,
            help=f"supported drafts: {', '.join(SUPPORTED)}",
        )
    notes = [_ABOUT[found]] if found in _ABOUT else []
    raise UnsupportedError(
        "draft/kind",
        f"{found} drafts are not supported",
        where=where,
        notes=notes,
        help=f"supported: {', '.join(SUPPORTED)}",
    )


def is_draft(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint looks like a draft that cannot run without a target."""
    return _kind(checkpoint)[0] not in ("", DraftModel.method)


def _kind(checkpoint: Checkpoint) -> tuple[str, str]:
    """What a checkpoint is, and the tensor that gives it away; empty if nothing is known."""
    names = {as_weight(canonical_name(name)): name for name in sorted(checkpoint.tensors)}
    for kind, gives_away in _SIGNS:
        stored = next((names[n] for n in names if gives_away(n, names[n], names)), None)
        if stored is not None:
            return _block_kind(names) if kind == "dflash" else kind, stored
    return "", ""


def _block_kind(names: Collection[str]) -> str:
    """Block drafts without a Markov head, by what they have in its place."""
    if any(n.startswith("candidate_selector.") for n in names):
        return "dflash2"
    return "domino" if any("gru" in n for n in names) else "dflash"


def _is_eagle3(name: str, stored: str, names: Collection[str]) -> bool:
    """EAGLE3 norms the target's states inside its layer, block drafts before their first one.

    A reduced vocabulary may be the draft's of either.
    """
    in_layer = name == "layers.0.hidden_norm.weight" or stored.startswith("midlayer.")
    return in_layer or (name == "d2t" and "hidden_norm.weight" not in names)


_SIGNS: tuple[tuple[str, Callable[[str, str, Collection[str]], bool]], ...] = (
    ("deepseek-v4", lambda name, *_: name.startswith("mtp.") and ".hc_" in name),
    ("dspark", lambda name, *_: name.startswith("markov_head.")),
    ("eagle3", _is_eagle3),
    ("dflash", lambda name, *_: name == "fc.weight"),
    # Whatever class wraps it.
    (DraftModel.method, lambda name, *_: name.endswith("embed_tokens.weight")),
    ("mtp", lambda name, *_: name.startswith(("mtp.", "mtp_layers."))),
)
"""Kinds of checkpoints and their tensors, by canonical name, stored name and all canonical names;
the first that fits."""
