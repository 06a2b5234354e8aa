"""The Qwen3 frontend against values that transformers computed (tests/data/reference)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from helpers.checkpoints import Array, read_tensors, write_draft
from helpers.lifted import Lifted

DATA = Path(__file__).parents[1] / "data" / "reference"
TOLERANCE = 2e-5
"""Relative: transformers computed in float32."""


@pytest.fixture(scope="module")
def stored() -> dict[str, Array]:
    return read_tensors(DATA)


@pytest.fixture(scope="module")
def lifted(tmp_path_factory: pytest.TempPathFactory) -> Lifted:
    """The stored checkpoint as a folder, with a draft that taps everything."""
    folder = tmp_path_factory.mktemp("transformers")
    target = folder / "t"
    target.mkdir()
    source = DATA / "qwen3-bias-yarn.safetensors"
    (target / "model.safetensors").write_bytes(source.read_bytes())
    with safe_open(source, "np") as file:
        config = json.loads(file.metadata()["config"])
    (target / "config.json").write_text(json.dumps(config))
    draft = write_draft(
        folder / "d",
        hidden=config["hidden_size"],
        vocab=config["vocab_size"],
        mask_token_id=config["vocab_size"] - 1,
        target_layers=3,
        target_layer_ids=(-1, 0, 1, 2),
        bos_token_id=1,
        eos_token_id=2,
    )
    return Lifted(target, draft, max_model_len=96)


def relative(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def test_logits_at_every_position(lifted: Lifted, stored: dict[str, Array]) -> None:
    lifted.reset()
    out = lifted.target(stored["golden.ids"].tolist())
    assert relative(out["logits"], stored["golden.logits"].astype(np.float64)) < TOLERANCE


def test_outputs_of_every_layer(lifted: Lifted, stored: dict[str, Array]) -> None:
    """The output of a layer is `hidden_states[layer + 1]`; of the last, before the final norm."""
    lifted.reset()
    out = lifted.target(stored["golden.ids"].tolist())
    states = stored["golden.hidden_states"].astype(np.float64)
    for index, expected in enumerate(states):
        found = out["hidden_tap"][:, index * 32 : (index + 1) * 32]
        assert relative(found, expected) < TOLERANCE, f"hidden_states[{index}]"


def test_token_by_token(lifted: Lifted, stored: dict[str, Array]) -> None:
    lifted.reset()
    for token, expected in zip(
        stored["golden.ids"][:8].tolist(), stored["golden.logits"][:8], strict=True
    ):
        found = lifted.target([token])["logits"]
        assert relative(found[0], expected.astype(np.float64)) < TOLERANCE


def test_biases_and_scaling_matter(stored: dict[str, Array]) -> None:
    """The golden would not notice a missing bias if there were none."""
    biases = [name for name in stored if name.endswith("_proj.bias")]
    assert len(biases) == 12
    assert all(np.abs(stored[name].astype(np.float32)).max() > 0.1 for name in biases)
