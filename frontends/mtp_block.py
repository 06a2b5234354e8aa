"""What a multi-token-prediction block of a checkpoint is called: its files and its tensors.

It lies beside the language model it was trained with, under names of its own; some exports put it
into a file that no index lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from edgecc.errors import InputError

MTP_BLOCK = "multi-token-prediction block"
"""What it is called among the parts of a checkpoint."""

MTP_FILES = ("mtp.safetensors", "model_mtp.safetensors")
"""Weight files that hold nothing else."""

MTP_TENSORS = (
    "mtp.*",
    "model.mtp.*",
    "language_model.mtp.*",
    "model.language_model.mtp.*",
    "mtp_layers.*",
)
"""Globs of its tensors."""

PREFIX = "mtp."
"""What published names begin with; canonical ones have nothing in its place."""

_PREFIX = re.compile(r"(?:model\.)?(?:language_model\.)?mtp\.")
_SPECULATORS = re.compile(r"mtp_layers\.(\d+)\.")
_RENAMES = {
    "input_proj": "fc",
    "token_layernorm": "pre_fc_norm_embedding",
    "hidden_layernorm": "pre_fc_norm_hidden",
    "final_layernorm": "norm",
}
"""Modules that the converter of speculators counts among those of its layer 0."""


def mtp_names(stored: Iterable[str], role: str) -> dict[str, str]:
    """Canonical tensor names of the block to stored ones, without those of other parts.

    Args:
        stored: Names of all tensors of the checkpoint.
        role: Whose they are, for messages.

    Raises:
        InputError: Two stored tensors mean the same.
    """
    names: dict[str, str] = {}
    for name in stored:
        canonical = _canonical(name)
        if canonical is None:
            continue
        if canonical in names:
            raise InputError(
                "target/duplicate-tensor",
                f"{names[canonical]} and {name} are both {PREFIX}{canonical}",
                where=f"{role}: {name}",
                help="remove the one that is stale",
            )
        names[canonical] = name
    return names


def _canonical(name: str) -> str | None:
    if found := _PREFIX.match(name):
        return name[found.end() :]
    if found := _SPECULATORS.match(name):
        module, _, leaf = name[found.end() :].partition(".")
        if found[1] == "0" and module in _RENAMES:
            return f"{_RENAMES[module]}.{leaf}"
        return f"layers.{found[1]}.{name[found.end() :]}"
    return None
