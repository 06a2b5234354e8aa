"""The shipped pair, compiled once per session, and its golden values."""

from __future__ import annotations

import pytest

import edgecc
from helpers.goldens import DRAFT, TARGET, read_goldens


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
    return read_goldens()
