"""The shipped pair, compiled once per session, and its golden values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

import edgecc

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
TARGET = PAIRS / "tiny-qwen3-nvfp4"
DRAFT = PAIRS / "tiny-qwen3-dspark"
GOLDENS = PAIRS / "goldens-tiny-qwen3-dspark.safetensors"


@pytest.fixture(scope="session")
def bundle(tmp_path_factory):
    """The pair as `edgecc compile` makes it, with short caches so that edges are near."""
    out = tmp_path_factory.mktemp("pair") / "bundle"
    edgecc.compile(TARGET, DRAFT, out=out, max_model_len=384, prefill_chunk=64)
    return out


@pytest.fixture(scope="session")
def generator(bundle):
    """The bundle, open."""
    with edgecc.load(bundle) as opened:
        yield opened


@pytest.fixture(scope="session")
def full_generator(tmp_path_factory):
    """The pair with the draft's logits and confidences kept as outputs."""
    out = tmp_path_factory.mktemp("pair") / "full"
    edgecc.compile(TARGET, DRAFT, out=out, max_model_len=384, draft_outputs=True)
    with edgecc.load(out) as opened:
        yield opened


@pytest.fixture(scope="session")
def goldens():
    """Golden arrays by prompt and key."""
    with safe_open(GOLDENS, "np") as file:
        values: dict[str, dict[str, np.ndarray]] = {}
        for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
            prompt, _, key = name.partition(".")
            values.setdefault(prompt, {})[key] = file.get_tensor(name)
    return values
