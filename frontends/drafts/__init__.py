"""Draft models: one kind per file, and how to tell them apart.

A draft's kind is decided by the tensors it stores, because one architecture name is used by several
networks; the config only has to agree.
"""

from __future__ import annotations

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint

SUPPORTED = ("dspark",)


def detect_draft(checkpoint: Checkpoint) -> str:
    """The speculation method a checkpoint is a draft for: `dspark`.

    Raises:
        UnsupportedError: A draft of a known kind that edgecc does not build.
        InputError: Not a draft.
    """
    found = _kind(checkpoint)
    if found in SUPPORTED:
        return found
    where = f"{checkpoint.role}/config.json"
    if found:
        raise UnsupportedError(
            "draft/kind",
            f"{found} drafts are not supported",
            where=where,
            help=f"supported: {', '.join(SUPPORTED)}",
        )
    raise InputError(
        "draft/unknown",
        "the checkpoint is no draft edgecc knows: no fc.weight, markov_head or midlayer tensors",
        where=where,
        help=f"supported drafts: {', '.join(SUPPORTED)}",
    )


def is_draft(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint looks like a draft that cannot run without a target."""
    return _kind(checkpoint) not in ("", "plain")


def _kind(checkpoint: Checkpoint) -> str:
    names = {n.removeprefix("model.").removeprefix("logit_head.") for n in checkpoint.tensors}
    if any(n.startswith("mtp.") and ".hc_" in n for n in names):
        return "deepseek-v4"
    if "markov_head.markov_w1.weight" in names:
        return "dspark"
    if any(n.startswith("midlayer.") for n in names) or "d2t" in names:
        return "eagle3"
    if names & {"fc.weight", "context_proj.weight", "encoder.fc.weight"}:
        return "dflash"
    return "plain" if "embed_tokens.weight" in names else ""
