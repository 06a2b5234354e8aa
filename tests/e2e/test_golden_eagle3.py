"""The shipped EAGLE3 pair from a bundle for the portable dialect; its CPU bundle is tested with the
other pairs."""

from __future__ import annotations

import pytest

import edgecc
from edgecc.backends.runtime import Session, SpeculativeDecoder
from edgecc.backends.runtime.proposer import PROPOSERS
from helpers.goldens import SHIPPED, read_goldens

PAIR = SHIPPED["eagle3"]


@pytest.fixture(scope="module")
def onnx(tmp_path_factory):
    out = tmp_path_factory.mktemp("eagle3") / "bundle"
    report = edgecc.compile(
        PAIR.target, PAIR.draft, out=out, device="onnx", max_model_len=384, prefill_chunk=16
    )
    assert "speculation by method eagle3: the draft stores d2t" in report.decisions
    with edgecc.load(out) as opened:
        yield opened


@pytest.mark.parametrize("prompt", ["p0", "p1", "p2", "p3"])
def test_every_round(onnx, prompt):
    """Prompts of several chunks: the draft learns of a token that the next chunk begins with."""
    golden = read_goldens(PAIR.goldens)[prompt]
    model, engine = onnx.model, onnx.engine
    session = Session(
        engine.entry("target"),
        engine.entry("draft"),
        prefill_chunk=model.prefill_chunk,
        proposer=PROPOSERS[model.draft.method],
    )
    decoder = SpeculativeDecoder(session, model, model.draft, 7)
    ids = golden["ids"].tolist()
    assert len(ids) > model.prefill_chunk
    _, *rounds = decoder.rounds(ids, 64, model.eos_token_ids)
    assert [list(r.proposed) for r in rounds] == golden["proposals"].tolist()
    assert [r.accepted for r in rounds] == golden["accepted"].tolist()
