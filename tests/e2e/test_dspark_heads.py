"""DSpark drafts with a gate, a recurrent cell and a reduced vocabulary: from checkpoint to text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgecc
from edgecc.backends.base import Role
from edgecc.backends.runtime.verify import verify_bundle
from edgecc.ir import NVFP4
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import MASK_ID, edit_json, edit_tensors
from helpers.dspark_heads import BLOCK, packed, write_heads
from helpers.goldens import relative
from helpers.lowered_pairs import LoweredPair, draft_inputs, target_inputs
from helpers.reference import Draft, Target

pytestmark = pytest.mark.filterwarnings("ignore:no proposed token:UserWarning")
"""Random weights."""

PROMPT = [7, 3, 11, 2, 5, 13, 1, 9, 4, 8, 6]
ANCHOR = 12
HEADS = [
    ("vanilla", False),
    ("vanilla", True),
    ("gated", False),
    ("gated", True),
    ("rnn", False),
    ("rnn", True),
]


@pytest.mark.parametrize("device", ["cpu", "onnx"])
@pytest.mark.parametrize(("kind", "reduced"), HEADS)
def test_engines_compute_the_reference(
    tmp_path: Path, kind: str, reduced: bool, device: str
) -> None:
    """Logits, tokens and confidences of a round against float64 NumPy; W2 is NVFP4."""
    target, draft = write_heads(tmp_path, kind=kind, reduced=reduced)
    pair = LoweredPair(tmp_path / "engines", target, draft, device=device)
    model = Target(target)
    features = model.run(PROMPT).taps((0,))
    reference = Draft(draft, model, block_size=BLOCK, mask_token_id=MASK_ID, num_tokens=NUM_TOKENS)
    expected = reference.run(features, ANCHOR, BLOCK)
    engine = pair.engine()
    try:
        taps = engine.entry("target").run(target_inputs(PROMPT, 0), [Role.HIDDEN_TAP])
        wanted = [Role.PROPOSALS, Role.DRAFT_LOGITS, Role.CONFIDENCE]
        found = engine.entry("draft").run(draft_inputs(taps[Role.HIDDEN_TAP][0], ANCHOR, 0), wanted)
        assert found[Role.PROPOSALS][0].tolist() == expected.tokens
        assert expected.confidence is not None
        assert relative(found[Role.DRAFT_LOGITS][0], expected.logits) < 1e-4
        assert relative(found[Role.CONFIDENCE][0], expected.confidence) < 1e-4
    finally:
        engine.close()


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "NVFP4", None])
@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_a_packed_draft(tmp_path: Path, kind: str, algorithm: str | None) -> None:
    """Whether its metadata says so or not: the tensors decide."""
    target, draft = write_heads(tmp_path, kind=kind, reduced=False)
    edit_tensors(draft, packed)
    if algorithm is not None:
        block = {"quant_method": "modelopt", "quant_algo": algorithm}
        kept = ["lm_head", "markov_head.markov_w1", "markov_head.joint_proj", "confidence_head*"]
        edit_json(draft / "config.json", quantization_config={**block, "ignore": kept})
    out = tmp_path / "b"
    report = edgecc.compile(target, draft, out=out, max_model_len=64, verify="full")
    assert all(": ok" in check for check in report.checks)
    model = Target(target)
    features = model.run(PROMPT).taps((0,))
    reference = Draft(draft, model, block_size=BLOCK, mask_token_id=MASK_ID, num_tokens=NUM_TOKENS)
    pair = LoweredPair(tmp_path / "engines", target, draft)
    engine = pair.engine()
    try:
        inputs = draft_inputs(features.astype(np.float32), ANCHOR, 0)
        found = engine.entry("draft").run(inputs, [Role.PROPOSALS, Role.DRAFT_LOGITS])
        expected = reference.run(features, ANCHOR, BLOCK)
        assert found[Role.PROPOSALS][0].tolist() == expected.tokens
        assert relative(found[Role.DRAFT_LOGITS][0], expected.logits) < 1e-4
    finally:
        engine.close()
    stored = pair.reference.weights
    for name in ("fc", "markov_head.markov_w2", "layers.0.mlp.down_proj"):
        assert isinstance(stored[f"draft.{name}.weight"].encoding, NVFP4)
    with edgecc.load(out) as generator:
        asked = {"token_ids": PROMPT, "max_new_tokens": 20, "ignore_eos": True}
        plain = generator.generate(**asked, speculation=False)
        assert generator.generate(**asked).token_ids == plain.token_ids


@pytest.mark.parametrize("device", ["cpu", "onnx"])
@pytest.mark.parametrize(("kind", "reduced"), HEADS)
def test_speculation_changes_no_token(
    tmp_path: Path, kind: str, reduced: bool, device: str
) -> None:
    """The compiled draft proposes what the evaluated graph does, and the text stays."""
    target, draft = write_heads(tmp_path, kind=kind, reduced=reduced)
    out = tmp_path / "b"
    sizes = {"max_model_len": 64, "prefill_chunk": 8}
    edgecc.compile(target, draft, out=out, device=device, verify="full", **sizes)
    assert all(check.passed for check in verify_bundle(out).checks)
    with edgecc.load(out) as generator:
        asked = {"token_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True}
        plain = generator.generate(**asked, speculation=False)
        found = generator.generate(**asked)
        assert found.token_ids == plain.token_ids
        assert found.stats.proposed > 0
