"""Names of speculation methods: edgecc's, and those that vLLM has for the same and for others."""

from __future__ import annotations

from collections.abc import Mapping

from edgecc.errors import UnsupportedError, did_you_mean
from edgecc.prompt_lookup import NGRAM

OWN_BLOCK = "mtp"
"""The speculation method that drafts with the target's own tensors."""

DRAFT_MODEL = "draft_model"
"""The speculation method of a small language model, by the name that vLLM has for it."""

WITHOUT_DRAFT = (OWN_BLOCK, NGRAM)
"""The speculation methods that need no draft checkpoint."""

SPEC_METHODS = ("auto", "dspark", "dflash", "eagle3", DRAFT_MODEL, *WITHOUT_DRAFT)
"""Speculation methods: `auto` is that of the draft, none without one."""

_SAME: Mapping[str, str] = {"qwen3_5_mtp": OWN_BLOCK, "ngram_gpu": NGRAM}
"""Other names of these in vLLM."""

_OTHER: Mapping[str, str] = {
    "eagle": "it reads one hidden state of the target; the successor, eagle3, is built",
    "medusa": "its heads propose from one hidden state of the target, without knowing each other",
    "mlp_speculator": "its heads propose from one hidden state of the target",
    "suffix": "it looks up in earlier answers as well; ngram looks up in the text so far",
    "extract_hidden_states": "it proposes nothing",
}
"""Methods of vLLM that are not built, and what they are."""

_BLOCK = "_mtp"
"""End of vLLM's names for blocks that belong to a family of targets."""


def method_named(name: str) -> str:
    """Edgecc's name of a method that vLLM calls otherwise; others stay as they are."""
    return _SAME.get(name, name)


def check_method(name: str) -> None:
    """Check that there is a method of a name.

    Raises:
        UnsupportedError: There is not; of methods known from vLLM it tells why.
    """
    if name in SPEC_METHODS:
        return
    notes: tuple[str, ...] = ()
    if name in _OTHER:
        notes = (f"known from vLLM: {_OTHER[name]}",)
    elif name.endswith(_BLOCK):
        notes = (f"known from vLLM: only blocks of Qwen3.5 targets are built, as {OWN_BLOCK}",)
    raise UnsupportedError(
        "draft/kind",
        f"method {name!r} is not supported",
        where="--spec-method",
        notes=notes,
        help=f"supported: {', '.join(SPEC_METHODS)}" if notes else did_you_mean(name, SPEC_METHODS),
    )
