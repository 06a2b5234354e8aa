"""Tensor names of targets, whatever class wraps the language model.

Canonical names are those of the text-only classes: `model.layers...`, `lm_head`. Multimodal classes
and some converters put the same tensors under other prefixes.
"""

from __future__ import annotations

from collections.abc import Collection

from edgecc.errors import InputError

CANONICAL = "model."
"""Prefix of the language model in canonical names."""

_PREFIXES = (
    "model.language_model.",  # multimodal classes since transformers 4.52
    "language_model.model.",
    "language_model.",
    "thinker.model.",
    CANONICAL,
)
_HEADS = (
    "lm_head.",
    "model.lm_head.",
    "language_model.lm_head.",
    "model.language_model.lm_head.",
    "thinker.lm_head.",
)
_TABLE = "embed_tokens.weight"


def text_prefix(stored: Collection[str], role: str) -> str:
    """What the language model's tensors are called with in place of `model.`.

    It is the prefix under which the embedding table is stored.

    Args:
        stored: Names of all tensors of the checkpoint.
        role: Whose they are, for messages.

    Raises:
        InputError: There are two language models.
    """
    found = [p for p in _PREFIXES if f"{p}{_TABLE}" in stored]
    if len(found) > 1:
        raise InputError(
            "target/two-models",
            f"{found[0]}{_TABLE} and {found[1]}{_TABLE} are both stored",
            where=f"{role}: {found[1]}{_TABLE}",
            help="remove the language model that is stale",
        )
    return found[0] if found else CANONICAL


def canonical_names(stored: Collection[str], prefix: str, role: str) -> dict[str, str]:
    """Canonical tensor names to stored ones; names without the prefix (vision, drafts) stay.

    Args:
        stored: Names of all tensors of the checkpoint.
        prefix: See `text_prefix`.
        role: Whose they are, for messages.

    Raises:
        InputError: Two stored tensors mean the same.
    """
    names: dict[str, str] = {}
    for name in stored:
        canonical = _canonical(name, prefix)
        if canonical in names:
            raise InputError(
                "target/duplicate-tensor",
                f"{names[canonical]} and {name} are both {canonical}",
                where=f"{role}: {name}",
                help="remove the one that is stale",
            )
        names[canonical] = name
    return names


def _canonical(name: str, prefix: str) -> str:
    for head in _HEADS:
        if name.startswith(head):
            return f"lm_head.{name.removeprefix(head)}"
    if name.startswith(prefix):
        return CANONICAL + name.removeprefix(prefix)
    return name
