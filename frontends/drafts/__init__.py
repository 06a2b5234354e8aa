"""Draft models: one kind per file, and how to tell them apart.

A draft's kind is decided by the tensors it stores, because one architecture name is used by several
networks; the config only has to agree.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.drafts.base import Draft
from edgecc.frontends.drafts.dspark import DSpark
from edgecc.frontends.drafts.dspark_config import declared_rank
from edgecc.frontends.drafts.eagle3 import Eagle3
from edgecc.frontends.drafts.names import canonical_name

KINDS: Mapping[str, type[Draft]] = {kind.method: kind for kind in (DSpark, Eagle3)}
"""Every kind of draft that can be lifted, by its method."""

SUPPORTED = tuple(KINDS)

_ABOUT = {
    "deepseek-v4": "stages of another network, bundled with their own target",
    "plain": "this is a complete language model",
    "mtp": "a layer that belongs to its target's checkpoint",
}


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
    found = _kind(checkpoint)
    if found in SUPPORTED:
        return found
    where = f"{checkpoint.role}/config.json"
    if not found:
        raise InputError(
            "draft/unknown",
            "the checkpoint is no draft edgecc knows: no fc.weight, markov_head or midlayer "
            "tensors",
            where=where,
            help=f"supported drafts: {', '.join(SUPPORTED)}",
        )
    rank = declared_rank(checkpoint) if found == "dflash" else None
    if rank:
        raise InputError(
            "draft/markov-missing",
            f"markov_rank is {rank}, but no markov_head tensors are stored",
            where=f"{where}: markov_rank",
            help="the checkpoint is incomplete: fetch its weights again",
        )
    notes = [_ABOUT[found]] if found in _ABOUT else []
    if rank == 0:
        notes.append("markov_rank is 0: whatever its name, this is a DFlash draft")
    raise UnsupportedError(
        "draft/kind",
        f"{found} drafts are not supported",
        where=where,
        notes=notes,
        help=f"supported: {', '.join(SUPPORTED)}",
    )


def is_draft(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint looks like a draft that cannot run without a target."""
    return _kind(checkpoint) not in ("", "plain")


def _kind(checkpoint: Checkpoint) -> str:
    stored = checkpoint.tensors.keys()
    names = {canonical_name(name) for name in stored}
    if any(n.startswith("mtp.") and ".hc_" in n for n in names):
        return "deepseek-v4"
    if any(n.startswith("markov_head.") for n in names):
        return "dspark"
    eagle = "d2t" in names or "layers.0.hidden_norm.weight" in names
    if eagle or any(n.startswith("midlayer.") for n in stored):
        return "eagle3"
    if "fc.weight" in names:
        return _block_kind(names)
    if any(n.endswith("embed_tokens.weight") for n in names):  # whatever class wraps it
        return "plain"
    return "mtp" if any(n.startswith(("mtp.", "mtp_layers.")) for n in names) else ""


def _block_kind(names: Collection[str]) -> str:
    """Block drafts without a Markov head, by what they have in its place."""
    if any(n.startswith("candidate_selector.") for n in names):
        return "dflash2"
    return "domino" if any("gru" in n for n in names) else "dflash"
