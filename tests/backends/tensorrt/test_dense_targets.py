"""Targets with windows and biases as networks and engines, against float64 graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgecc
from edgecc.backends.runtime.golden import relative_rms
from edgecc.inspection import inspect_path
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import write_draft
from helpers.dense_models import LAYERS, MODELS, save
from helpers.lifted import Lifted
from helpers.tensorrt_network import NetworkPair

pytest.importorskip("torch")
pytest.importorskip("transformers")

NAMES = ("mistral-window-odd-heads", "ministral", "qwen2-window", "llama-biases")
CHUNKS = (13, 1, 7, 20)
TOLERANCE = 2**-5
"""Root mean square: activations and caches have 16 bits."""


def draft_for(folder: Path, **more: object) -> Path:
    return write_draft(
        folder,
        hidden=32,
        layers=2,
        heads=2,
        head_dim=16,
        vocab=NUM_TOKENS,
        mask_token_id=NUM_TOKENS - 2,
        target_layers=LAYERS,
        target_layer_ids=range(LAYERS),
        **more,
    )


@pytest.mark.parametrize("name", NAMES)
def test_networks(trt, tmp_path, name):
    """Chunks of a prompt longer than the windows, then a round of a draft with a window."""
    target = save(MODELS[name], tmp_path / "t")
    kinds = ["sliding_attention", "full_attention"]
    draft = draft_for(tmp_path / "d", layer_types=kinds, sliding_window=6)
    pairs = Lifted(target, draft), NetworkPair(trt, "sm120", target, draft, max_model_len=64)
    ids = np.random.default_rng(2).integers(0, NUM_TOKENS, sum(CHUNKS)).tolist()
    for rows in CHUNKS:
        start = pairs[0].lengths["target"]
        wanted, found = (pair.target(ids[start : start + rows]) for pair in pairs)
        for output in ("logits", "hidden_tap"):
            assert relative_rms(found[output], wanted[output]) < TOLERANCE
        wanted, found = (pair.draft(wanted["hidden_tap"], ids[start + rows - 1]) for pair in pairs)
        assert relative_rms(found["base_logits"], wanted["base_logits"]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm86", "sm120"])
def test_engines(tmp_path, device):
    """The builder takes masks of windows and stacked biases."""
    target = save(MODELS["qwen2-window"], tmp_path / "t")
    out = tmp_path / "bundle"
    edgecc.compile(target, draft_for(tmp_path / "d"), out=out, device=device, max_model_len=96)
    (facts,) = inspect_path(out)["devices"].values()
    assert facts.startswith("tensorrt, ")
