"""Tensor names of drafts, in the spellings of all known writers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from edgecc.errors import InputError
from edgecc.frontends.quantization.names import as_weight

_RENAMES = (
    ("model.", ""),
    ("logit_head.", ""),  # older SpecForge exports
    ("encoder.fc.", "fc."),  # Muse-Glimmer assistants
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("context_proj.", "fc."),  # TorchSpec exports
    ("context_norm.", "hidden_norm."),
    ("final_norm.", "norm."),
    ("midlayer.", "layers.0."),  # EAGLE-style writers
)

_GROUPED = re.compile(r"\.qkv_proj\.([qkv])_proj\.")
"""Quantized EAGLE exports keep q, k and v apart inside one module."""


def canonical_name(stored: str) -> str:
    """The name a tensor has in DeepSpec's own checkpoints."""
    for prefix, replacement in _RENAMES:
        if stored.startswith(prefix):
            stored = replacement + stored.removeprefix(prefix)
    return _GROUPED.sub(r".\1_proj.", stored)


def stores(names: Iterable[str], canonical: str) -> bool:
    """Whether one of the stored names means the canonical one, in whatever encoding."""
    return any(as_weight(canonical_name(name)) == canonical for name in names)


def canonical_names(stored: Iterable[str]) -> dict[str, str]:
    """Canonical tensor names to stored ones.

    Raises:
        InputError: Two stored tensors mean the same.
    """
    names: dict[str, str] = {}
    for name in stored:
        canonical = canonical_name(name)
        if canonical in names:
            raise InputError(
                "draft/duplicate-tensor",
                f"{names[canonical]} and {name} are both {canonical}",
                where=f"draft: {name}",
                help="remove the one that is stale",
            )
        names[canonical] = name
    return names
