"""Which files of a repository a checkpoint needs: never its pickles, and no code."""

from __future__ import annotations

from collections.abc import Collection

from edgecc.frontends.checkpoint import SINGLE
from edgecc.frontends.mtp_block import MTP_FILES
from edgecc.frontends.strict_json import JsonObject

_SMALL = (".jinja", ".json", ".model", ".txt")
"""Configs, index, tokenizer, chat template, image processor."""
_NAME_MAX = 255
"""Bytes in the name of a file, on common file systems."""


def small_files(names: Collection[str]) -> list[str]:
    """The files that are not weights: those of the repository's top folder that can matter."""
    return sorted(n for n in names if _is_plain(n) and n.endswith(_SMALL))


def _is_plain(name: str) -> bool:
    """Whether a file lies in the top folder, and can have its name on any system."""
    return name.isprintable() and not set(name) & set("/\\:") and len(name.encode()) <= _NAME_MAX


def weight_files(names: Collection[str], index: JsonObject | None) -> list[str]:
    """The weight files, those that are there.

    Args:
        names: Of all files of the repository.
        index: The parsed index, if there is one.
    """
    weight_map = index.get("weight_map") if index is not None else None
    listed = weight_map.values() if isinstance(weight_map, dict) else ()
    wanted = {SINGLE, *MTP_FILES, *(name for name in listed if isinstance(name, str))}
    return sorted(filter(_is_plain, wanted.intersection(names)))


def missing_weights(names: Collection[str], index: JsonObject | None) -> list[str]:
    """Weight files without which nothing can be read, and that are not there."""
    weight_map = index.get("weight_map") if index is not None else None
    if not isinstance(weight_map, dict):
        return [] if SINGLE in names else [SINGLE]
    return sorted({n for n in weight_map.values() if isinstance(n, str) and n not in names})
