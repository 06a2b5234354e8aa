"""The trained pair from 16-bit weights, compiled to every format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgecc
from helpers.checkpoints import dense_copy
from helpers.goldens import read_goldens
from helpers.lowered_pairs import REAL_DRAFT, REAL_TARGET

PROMPTS = ("p0", "p1", "p2", "p3")
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "nvfp4": {"quantization": "nvfp4", "quantize_head": True},
    "int8-split": {
        **{"quantization": "nvfp4", "quantize_head": True, "linear_form": "int8-split"},
        "draft_quantization": "nvfp4",
    },
    "fp8": {"quantization": "fp8", "draft_quantization": "fp8-channel"},
    "int8": {"quantization": "int8", "quantize_head": True},
    "int4": {"quantization": "int4", "draft_quantization": "int8"},
}

SLOW = ("fp8", "int8", "int4")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained target with bf16 weights."""
    return dense_copy(REAL_TARGET, tmp_path_factory.mktemp("dense") / "tiny-qwen3-bf16")


@pytest.fixture(scope="module")
def goldens() -> dict[str, dict[str, Any]]:
    """Of the transformer alone."""
    return read_goldens()


@pytest.mark.parametrize(
    "name",
    ["nvfp4", "int8-split", *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)],
)
def test_speculation_changes_no_token_and_pays(
    name: str, dense: Path, goldens: Mapping[str, Mapping[str, Any]], tmp_path: Path
) -> None:
    """The draft was trained for the unquantized target, and still proposes most of its tokens."""
    out = tmp_path / "b"
    report = edgecc.compile(
        dense, REAL_DRAFT, out=out, max_model_len=384, verify="full", **OPTIONS[name]
    )
    assert len(report.checks) == 4
    rounds = accepted = 0
    agreed = []
    with edgecc.load(out) as generator:
        for prompt in PROMPTS:
            ids = goldens[prompt]["ids"]
            plain = generator.generate(token_ids=ids, max_new_tokens=48, speculation=False)
            fast = generator.generate(token_ids=ids, max_new_tokens=48)
            assert fast.token_ids == plain.token_ids
            rounds += fast.stats.rounds
            accepted += sum(fast.stats.accepted_by_round)
            expected = goldens[prompt]["greedy"][: len(plain.token_ids)]
            agreed.append(np.array_equal(plain.token_ids[:8], expected[:8]))
    assert 1 + accepted / rounds > 2.5
    assert sum(agreed) >= 2  # the first tokens are mostly those of the NVFP4 checkpoint
