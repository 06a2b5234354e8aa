"""Small pairs whose DSpark drafts have a Markov head of any type, a reduced vocabulary, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import DROP, Tensors, edit_tensors, nvfp4, write_draft, write_target
from helpers.command_line import SMALL, TAPS

RANK, BLOCK = 16, 4
KEPT = np.arange(3, 243, 3)
"""Target ids that a reduced vocabulary has."""

_READS = {
    "vanilla": (),
    "gated": (("markov_head.gate_proj", RANK, SMALL["hidden"] + RANK),),
    "rnn": (("markov_head.joint_proj", 3 * RANK, 2 * RANK + SMALL["hidden"]),),
}
"""By type: what a Markov head stores besides W1 and W2, with its rows and columns."""


def packed(tensors: Tensors) -> None:
    """All layers, `fc` and W2 as NVFP4, as published conversions of DSpark drafts have them."""
    packs = ("_proj", "fc", "markov_w2")
    for name in [n for n in tensors if n.endswith(".weight")]:
        module = name.removesuffix(".weight")
        heads = module.startswith("markov_head.") and not module.endswith("markov_w2")
        if module.endswith(packs) and not heads and tensors[name].dtype != np.uint8:
            tensors |= nvfp4(module, tensors[name])


def write_heads(folder: Path, *, kind: str, reduced: bool) -> tuple[Path, Path]:
    """A target and a draft; W2 of the draft's Markov head is NVFP4.

    Args:
        folder: Where to write them.
        kind: Type of the Markov head.
        reduced: Whether the draft has fewer ids than the target.
    """
    target = write_target(folder / "t", **SMALL, quantized=False, eos_token_id=DROP)
    options: dict[str, Any] = {
        "markov_rank": RANK,
        "own_head": True,
        "block_size": BLOCK,
        **SMALL,
        **TAPS,
    }
    draft = write_draft(folder / "d", **options, markov_head_type=kind)

    def change(tensors: Tensors) -> None:
        random = np.random.default_rng(0)
        for module, rows, columns in _READS[kind]:
            weight = random.normal(0, 1, (rows, columns))
            tensors[f"{module}.weight"] = weight.astype(np.float32)
            tensors[f"{module}.bias"] = np.ones(rows, dtype=np.float32)
        if reduced:
            for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
                tensors[name] = tensors[name][KEPT]
            tensors["d2t"] = KEPT - np.arange(len(KEPT))
        tensors |= nvfp4("markov_head.markov_w2", tensors["markov_head.markov_w2.weight"])

    edit_tensors(draft, change)
    return target, draft
