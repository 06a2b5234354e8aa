"""Small pairs whose DSpark drafts have a gate, a reduced vocabulary, or both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from helpers.checkpoints import DROP, Tensors, edit_tensors, nvfp4, write_draft, write_target
from helpers.command_line import SMALL, TAPS

RANK = 16
KEPT = np.arange(3, 243, 3)
"""Target ids that a reduced vocabulary has."""


def write_heads(folder: Path, *, gated: bool, reduced: bool) -> tuple[Path, Path]:
    """A target and a draft; W2 of the draft's Markov head is NVFP4.

    Args:
        folder: Where to write them.
        gated: Whether the Markov head has a gate.
        reduced: Whether the draft has fewer ids than the target.
    """
    target = write_target(folder / "t", **SMALL, quantized=False, eos_token_id=DROP)
    options: dict[str, Any] = {
        "markov_rank": RANK,
        "own_head": True,
        "block_size": 4,
        **SMALL,
        **TAPS,
    }
    kind = "gated" if gated else "vanilla"
    draft = write_draft(folder / "d", **options, markov_head_type=kind)

    def change(tensors: Tensors) -> None:
        if gated:
            gate = np.random.default_rng(0).normal(0, 1, (RANK, SMALL["hidden"] + RANK))
            tensors["markov_head.gate_proj.weight"] = gate.astype(np.float32)
            tensors["markov_head.gate_proj.bias"] = np.ones(RANK, dtype=np.float32)
        if reduced:
            for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
                tensors[name] = tensors[name][KEPT]
            tensors["d2t"] = KEPT - np.arange(len(KEPT))
        tensors |= nvfp4("markov_head.markov_w2", tensors["markov_head.markov_w2.weight"])

    edit_tensors(draft, change)
    return target, draft
