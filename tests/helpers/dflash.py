"""Small pairs with DFlash drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import DROP, Tensors, edit_tensors, write_draft, write_target
from helpers.command_line import SMALL, TAPS
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target

_DFLASH: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "markov_rank": 0,
    "confidence_head": False,
    "block_size": 5,
}


def write_dflash_pair(folder: Path, kind: str) -> tuple[Path, Path]:
    """A target and a draft of five slots.

    Args:
        folder: Where to write them.
        kind: `random`; `hybrid`, a target with a recurrent layer; `reduced`, a draft with fewer ids
            than the target; `agreeing`: both give all tokens the same logits, so that each chooses
            token 0.
    """
    options = {**SMALL, **TAPS, **_DFLASH}
    if kind == "hybrid":
        target = write_hybrid_target(folder / "t", HybridSizes(layer_types=(LINEAR, FULL)))
        options |= {"target_layers": 2, "target_hidden": 32}
    else:
        target = write_target(folder / "t", **SMALL, quantized=False, eos_token_id=DROP)
    draft = write_draft(folder / "d", **options, own_head=kind == "reduced")
    if kind == "reduced":
        edit_tensors(draft, _reduce)
    if kind == "agreeing":
        _silence(target, "model.norm.weight")
        _silence(draft, "norm.weight")
    return target, draft


def _reduce(tensors: Tensors) -> None:
    kept = np.arange(0, 259, 2)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept]
    tensors["d2t"] = kept - np.arange(len(kept))


def _silence(path: Path, norm: str) -> None:
    def change(tensors: Tensors) -> Tensors:
        return {**tensors, norm: np.zeros_like(tensors[norm])}

    edit_tensors(path, change)
