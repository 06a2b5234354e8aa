"""The shipped pairs, each compiled once per session, and their golden values."""

from __future__ import annotations

import pytest

import edgecc
from helpers.goldens import SHIPPED, read_goldens


@pytest.fixture(scope="session", params=SHIPPED)
def pair(request):
    """A pair; every test below runs on each."""
    return SHIPPED[request.param]


@pytest.fixture(scope="session")
def bundle(pair, tmp_path_factory):
    """The pair as `edgecc compile` makes it, with short caches so that edges are near."""
    out = tmp_path_factory.mktemp("pair") / "bundle"
    edgecc.compile(pair.target, pair.draft, out=out, max_model_len=384, prefill_chunk=64)
    return out


@pytest.fixture(scope="session")
def generator(bundle):
    """The bundle, open."""
    with edgecc.load(bundle) as opened:
        yield opened


@pytest.fixture(scope="session")
def full_generator(pair, tmp_path_factory):
    """The pair with the draft's logits and confidences kept as outputs."""
    out = tmp_path_factory.mktemp("pair") / "full"
    edgecc.compile(pair.target, pair.draft, out=out, max_model_len=384, draft_outputs=True)
    with edgecc.load(out) as opened:
        yield opened


@pytest.fixture(scope="session")
def goldens(pair):
    """Golden arrays by prompt and key."""
    return read_goldens(pair.goldens)
