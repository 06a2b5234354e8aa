"""DSpark drafts with a gate and a reduced vocabulary, from checkpoint to text."""

from __future__ import annotations

import pytest

import edgecc
from edgecc.backends.runtime.verify import verify_bundle
from helpers.dspark_heads import write_heads

pytestmark = pytest.mark.filterwarnings("ignore:no proposed token:UserWarning")
"""Random weights."""

PROMPT = [7, 3, 11, 2, 5, 13, 1, 9, 4, 8, 6]


@pytest.mark.parametrize(("gated", "reduced"), [(True, False), (False, True), (True, True)])
def test_speculation_changes_no_token(tmp_path, gated, reduced):
    """The compiled draft proposes what the evaluated graph does, and the text stays."""
    target, draft = write_heads(tmp_path, gated=gated, reduced=reduced)
    out = tmp_path / "b"
    edgecc.compile(target, draft, out=out, max_model_len=64, prefill_chunk=8, verify="full")
    assert all(check.passed for check in verify_bundle(out).checks)
    with edgecc.load(out) as generator:
        asked = {"token_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True}
        plain = generator.generate(**asked, speculation=False)
        found = generator.generate(**asked)
        assert found.token_ids == plain.token_ids
        assert found.stats.proposed > 0
