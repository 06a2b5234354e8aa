"""The shipped hybrid pair, lifted, against values of transformers (tests/data/pairs/README.md).

The interpreter runs the graphs as lifted, with states and caches kept and restored by the test.
What the engine makes of them is compared in test_golden_pair.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from edgecc.frontends.lift import lift
from edgecc.ir.encodings import FP8, NVFP4
from edgecc.ir.ops.base import WeightView
from helpers.lifted import Lifted

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
TARGET = PAIRS / "tiny-qwen3_5-mixed"
DRAFT = PAIRS / "tiny-qwen3_5-dspark"
PROMPTS = ("p0", "p1", "p2", "p3")
ENDS = (4092, 4094)
TOLERANCE = 5e-6
"""Relative; transformers computed in float32 as well."""


@pytest.fixture(scope="module")
def hybrid_goldens():
    values: dict[str, dict[str, np.ndarray]] = {}
    with safe_open(PAIRS / "goldens-tiny-qwen3_5-mixed-dspark.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
            prompt, _, key = name.partition(".")
            values.setdefault(prompt, {})[key] = file.get_tensor(name)
    return values


@pytest.fixture(scope="module", params=[np.float32, np.float64], ids=["float32", "float64"])
def lifted(request):
    return Lifted(TARGET, DRAFT, dtype=request.param, max_model_len=128)


def relative(found, expected):
    """Largest difference, relative to the largest reference value."""
    assert found.shape == expected.shape
    return np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_first_round(lifted, hybrid_goldens, prompt):
    """Prompt pass and first block: logits, tapped states, block logits, confidence, proposals."""
    golden = hybrid_goldens[prompt]
    lifted.reset()
    out = lifted.target(golden["ids"].tolist())
    assert relative(out["logits"][-1:], golden["target_logits_last"]) <= TOLERANCE
    assert np.argmax(out["logits"], axis=-1).tolist() == golden["target_top1"].tolist()
    block = lifted.draft(out["hidden_tap"], int(golden["greedy"][0]))
    assert relative(block["confidence"], golden["block_confidence_logits"]) <= TOLERANCE
    assert block["proposals"].tolist() == golden["block_tokens"].tolist()
    for key, name in (
        ("draft_input_states", "hidden_tap"),
        ("block_logits_before_markov", "base_logits"),
        ("block_logits_after_markov", "draft_logits"),
    ):
        if key in golden:
            assert relative({**out, **block}[name], golden[key]) <= TOLERANCE, name


@pytest.fixture
def decoded(monkeypatch):
    """Weights are decoded once and kept; the interpreter would decode them anew for each call."""
    kept: dict[str, list] = {}
    decode = WeightView.blocks

    def blocks(view, *size):
        if (view.symbol, size) not in kept:
            kept[view.symbol, size] = list(decode(view, *size))
        return iter(kept[view.symbol, size])

    monkeypatch.setattr(WeightView, "blocks", blocks)


@pytest.mark.parametrize(
    "prompt",
    [pytest.param(p, marks=[pytest.mark.slow] if p in ("p0", "p2") else []) for p in PROMPTS],
)
def test_every_round(decoded, hybrid_goldens, prompt):
    """Greedy speculation to 64 tokens, the chat prompt to its end token.

    A wrong state after a partly accepted block would change later proposals or tokens.
    """
    golden = hybrid_goldens[prompt]
    lifted = Lifted(TARGET, DRAFT, dtype=np.float32, max_model_len=128)
    out = lifted.target(golden["ids"].tolist())
    tokens = [int(np.argmax(out["logits"][-1]))]
    features, proposed, accepted = out["hidden_tap"], [], []
    for _ in golden["accepted"]:
        proposals = lifted.draft(features, tokens[-1])["proposals"].tolist()
        verified = [tokens[-1], *proposals]
        out = lifted.target(verified, keep=0)
        choices = np.argmax(out["logits"], axis=-1).tolist()
        count = 0
        while count < 7 and proposals[count] == choices[count] and choices[count] not in ENDS:
            count += 1
        tokens += choices[: count + 1]
        lifted.target(verified[: count + 1])
        features = out["hidden_tap"][: count + 1]
        proposed.append(proposals)
        accepted.append(count)
    assert proposed == golden["proposals"].tolist()
    assert accepted == golden["accepted"].tolist()
    assert tokens[: len(golden["greedy"])] == golden["greedy"].tolist()
    assert 0 < sum(accepted) < 7 * len(accepted)
    if prompt == "p3":
        assert tokens[-1] in ENDS


def test_precisions():
    """FP8 mixers, NVFP4 MLPs and head; what is small or a table stays as stored."""
    module = lift(TARGET, DRAFT)
    kinds = {
        symbol.removeprefix("target."): type(weight.encoding)
        for symbol, weight in module.weights.items()
        if symbol.startswith("target.") and type(weight.encoding) in (FP8, NVFP4)
    }
    assert sum(kind is FP8 for kind in kinds.values()) == 6 * 3 + 2 * 4
    assert sum(kind is NVFP4 for kind in kinds.values()) == 8 * 3 + 1
    assert kinds["lm_head.weight"] is NVFP4
    assert kinds["model.layers.0.linear_attn.in_proj_qkv.weight"] is FP8
    assert "target weights as stored: bf16 x 13, fp8 x 26, nvfp4 x 25" in module.decisions
    assert not module.weights.readers["target"].findings
