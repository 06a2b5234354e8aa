"""Pairs that kernels with narrow counters or narrow numbers get wrong, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgecc.devices import DEVICES
from edgecc.roles import Role
from helpers.checkpoints import Tensors, edit_tensors
from helpers.goldens import relative
from helpers.lowered_pairs import LoweredPair, draft_inputs, target_inputs, write_pair
from helpers.reference import Draft, Target

IDS = [3, 141, 59, 26, 53, 58, 97, 93]
SMALL = {"hidden": 32, "layers": 3, "heads": 2, "kv_heads": 1, "head_dim": 16, "intermediate": 48}
LIMIT = 65_536


def reference(target: Path, draft: Path, vocab: int) -> tuple[Target, Draft]:
    its = Target(target)
    return its, Draft(draft, its, block_size=4, mask_token_id=vocab - 1, num_tokens=vocab)


@pytest.mark.parametrize(
    ("quantized", "form"), [(False, "dense"), (True, "dense"), (True, "int8-split")]
)
def test_heads_with_more_rows_than_16_bits_count(tmp_path: Path, quantized: bool, form: str):
    """Kernels have left the rest of the vocabulary at zero."""
    vocab = LIMIT + 600
    folders = write_pair(tmp_path, **SMALL, vocab=vocab, quantized=quantized, tokenizer=False)
    target, draft = reference(*folders, vocab)
    pair = LoweredPair(tmp_path / "out", *folders, form=form)
    engine = pair.engine()

    found = engine.entry("target").run(target_inputs(IDS, 0), [Role.LOGITS, Role.HIDDEN_TAP])
    logits, taps = found[Role.LOGITS][0].copy(), found[Role.HIDDEN_TAP][0].copy()
    expected = target.run(IDS)
    assert relative(logits[:, LIMIT:], expected.logits[:, LIMIT:]) < 10 * pair.tolerance

    outputs = [Role.PROPOSALS, Role.DRAFT_LOGITS]
    proposed = engine.entry("draft").run(draft_inputs(taps, 79, 0), outputs)
    block = draft.run(expected.taps((0, 2)), 79, 4)
    assert proposed[Role.PROPOSALS][0].tolist() == block.tokens
    rest = proposed[Role.DRAFT_LOGITS][0][:, LIMIT:]
    assert relative(rest, block.logits[:, LIMIT:]) < 10 * pair.tolerance


def test_a_projection_beyond_float16(tmp_path: Path):
    """`fc` gives values above 65504, the largest of float16, which the norm after it takes back."""
    folders = write_pair(tmp_path, **SMALL, quantized=False, tokenizer=False)

    def large(tensors: Tensors) -> None:
        tensors["fc.weight"] = tensors["fc.weight"].astype(np.float32) * 3e5

    edit_tensors(folders[1], large)
    target, draft = reference(*folders, 288)
    features = target.run(IDS).taps((0, 2))
    assert np.abs(draft.linear(features, "fc")).max() > np.finfo(np.float16).max

    pair = LoweredPair(tmp_path / "out", *folders)
    outputs = [Role.PROPOSALS, Role.DRAFT_LOGITS]
    found = pair.engine().entry("draft").run(draft_inputs(features, 79, 0), outputs)
    block = draft.run(features, 79, 4)
    assert found[Role.PROPOSALS][0].tolist() == block.tokens
    assert relative(found[Role.DRAFT_LOGITS][0], block.logits) < pair.tolerance


def test_no_device_computes_in_float16():
    """Which would overflow there: drafts were trained in bfloat16."""
    assert {device.compute_type for device in DEVICES.values()} <= {"f32", "bf16"}
