"""Targets with DFlash drafts, from checkpoint to text."""

from __future__ import annotations

import pytest

import edgecc
from edgecc.backends.runtime.verify import verify_bundle
from helpers.dflash import write_dflash_pair

pytestmark = pytest.mark.filterwarnings(
    "ignore:no proposed token:UserWarning", "ignore:each proposed token:UserWarning"
)
"""Pairs that no real one is like."""

PROMPT = [7, 3, 11, 2, 5, 13, 1, 9, 4, 8, 6]


@pytest.mark.parametrize("kind", ["random", "agreeing", "hybrid", "reduced"])
def test_speculation_changes_no_token(tmp_path, kind):
    target, draft = write_dflash_pair(tmp_path, kind)
    report = edgecc.compile(
        target, draft, out=tmp_path / "b", max_model_len=64, prefill_chunk=8, max_batch_size=2
    )
    assert "speculation by method dflash: the draft stores fc.weight" in report.decisions
    with edgecc.load(tmp_path / "b") as generator:
        asked = {"token_ids": PROMPT, "max_new_tokens": 50, "ignore_eos": True}
        for sampling in ({}, {"temperature": 1.0, "seed": 3}):
            plain = generator.generate(**asked, speculation=False, **sampling)
            for steps in (1, 4):
                found = generator.generate(**asked, num_speculative_tokens=steps, **sampling)
                assert found.token_ids == plain.token_ids
        if kind == "agreeing":
            greedy = generator.generate(**asked)
            assert greedy.stats.accepted_by_round[:9] == [4] * 9
            assert greedy.token_ids == [0] * 50
        requests = [
            generator.request(token_ids=PROMPT[:n], max_new_tokens=12, ignore_eos=True)
            for n in (3, 11, 7)
        ]
        together = generator.generate_batch(requests)
        alone = [
            generator.generate(token_ids=PROMPT[:n], max_new_tokens=12, ignore_eos=True)
            for n in (3, 11, 7)
        ]
        assert [a.token_ids for a in together] == [a.token_ids for a in alone]


@pytest.mark.parametrize("kind", ["random", "reduced"])
def test_verify_compares_the_draft_as_well(tmp_path, kind):
    target, draft = write_dflash_pair(tmp_path, kind)
    edgecc.compile(target, draft, out=tmp_path / "b", max_model_len=64, prefill_chunk=8)
    checks = verify_bundle(tmp_path / "b").checks
    assert all(check.passed for check in checks)
    assert any("draft" in check.name or "proposal" in check.name for check in checks)


@pytest.mark.parametrize("kind", ["random", "agreeing"])
def test_the_last_positions(tmp_path, kind):
    """A block of masks that fill needs one row more than it proposes: the last one has it.

    Texts run to the end of the caches, beside others whose rows nothing may touch.
    """
    target, draft = write_dflash_pair(tmp_path, kind)
    out = tmp_path / "b"
    edgecc.compile(target, draft, out=out, max_model_len=32, prefill_chunk=8, max_batch_size=3)
    with edgecc.load(out) as generator:

        def ask(length, speculation=True):
            return {
                "token_ids": (PROMPT * 3)[:length],
                "max_new_tokens": 64,
                "ignore_eos": True,
                "speculation": speculation,
            }

        lengths = (1, 11, 27, 31, 22)
        plain = [generator.generate(**ask(n, False)).token_ids for n in lengths]
        assert [len(tokens) for tokens in plain] == [32 - n for n in lengths]
        assert [generator.generate(**ask(n)).token_ids for n in lengths] == plain
        together = generator.generate_batch([generator.request(**ask(n)) for n in lengths])
        assert [answer.token_ids for answer in together] == plain
