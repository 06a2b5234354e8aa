"""Targets with small language models that draft for them, from checkpoint to text."""

from __future__ import annotations

import json

import pytest

import edgecc
from edgecc.backends.runtime.verify import verify_bundle
from edgecc.inspection import inspect_path
from helpers.checkpoints import DROP, write_target
from helpers.command_line import SMALL, in_process
from helpers.draft_models import write_first_layers, write_relative
from helpers.goldens import TARGET
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target

pytestmark = pytest.mark.filterwarnings(
    "ignore:no proposed token:UserWarning", "ignore:each proposed token:UserWarning"
)
"""Pairs that no real one is like."""

PROMPT = [7, 3, 11, 2, 5, 13, 1, 9, 4, 8, 6]
STEPS = 4
OPTIONS = {"max_model_len": 96, "prefill_chunk": 8, "max_batch_size": 3}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    return write_target(folder / "t", **SMALL, quantized=False, eos_token_id=DROP)


@pytest.fixture(scope="module")
def bundles(target, tmp_path_factory):
    """By kind: the target itself, a relative, a stranger; with a target that has states, a relative
    of nothing.
    """
    folder = tmp_path_factory.mktemp("bundles")
    hybrid = write_hybrid_target(folder / "h", HybridSizes(layer_types=(LINEAR, FULL)))
    stranger = write_target(folder / "s", **SMALL, quantized=True, tied=True, seed=9)
    pairs = {
        "itself": (target, target),
        "relative": (target, write_relative(target, folder / "r", 0.15)),
        "stranger": (target, stranger),
        "hybrid": (hybrid, target),
    }
    for name, (one, two) in pairs.items():
        edgecc.compile(
            one, two, out=folder / name, num_speculative_tokens=STEPS, max_batch_size=3,
            max_model_len=96, prefill_chunk=8,
        )  # fmt: skip
    return {name: folder / name for name in pairs}


@pytest.fixture(scope="module", params=["itself", "relative", "stranger", "hybrid"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def generator(bundles, kind):
    with edgecc.load(bundles[kind]) as opened:
        yield opened


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 3}], ids=str)
def test_speculation_changes_no_token(generator, kind, sampling):
    """Several numbers of proposals, and prompts within a chunk, at its edge, and beyond."""
    for length in (1, 8, 9, 11):
        asked = {"token_ids": PROMPT[:length], "max_new_tokens": 40, "ignore_eos": True, **sampling}
        plain = generator.generate(**asked, speculation=False)
        for steps in (1, 2, STEPS):
            found = generator.generate(**asked, num_speculative_tokens=steps)
            assert found.token_ids == plain.token_ids
            assert max(found.stats.proposed_by_round) == steps
            if kind == "itself" and not sampling:
                assert found.stats.accepted == found.stats.proposed
            if kind == "relative" and not sampling:
                assert 0 < found.stats.accepted < found.stats.proposed


def test_the_length_ends_a_text(generator, kind):
    """Also where the draft's caches end, a proposal before the target's."""
    asked = {"token_ids": PROMPT, "max_new_tokens": 200, "ignore_eos": True}
    found = generator.generate(**asked)
    assert len(found.token_ids) == 96 - len(PROMPT)
    assert found.token_ids == generator.generate(**asked, speculation=False).token_ids


def test_a_batch_does_what_each_of_them_does_alone(generator):
    """Each its own length, number of proposals and acceptance: round for round."""
    asked = [
        {"token_ids": PROMPT[:length], "max_new_tokens": 24, "ignore_eos": True}
        | {"num_speculative_tokens": steps, **sampling}
        for length, steps, sampling in (
            (3, 4, {}),
            (11, 1, {}),
            (9, 2, {"temperature": 1.0, "seed": 5}),
            (1, 3, {}),
            (8, 4, {}),
        )
    ]
    together = generator.generate_batch([generator.request(**one) for one in asked])
    for answer, one in zip(together, asked, strict=True):
        alone = generator.generate(**one)
        assert answer.token_ids == alone.token_ids
        assert answer.stats.accepted_by_round == alone.stats.accepted_by_round


def test_fewer_proposals_take_fewer_calls(generator):
    """The draft is called once for each."""
    asked = {"token_ids": PROMPT, "max_new_tokens": 12, "ignore_eos": True}
    counts = {}
    draft = generator._engine.entry("draft")
    run = draft.run
    for steps in (1, STEPS):
        counts[steps] = 0

        def counting(*args, steps=steps, **kwargs):
            counts[steps] += 1
            return run(*args, **kwargs)

        draft.run = counting
        try:
            found = generator.generate(**asked, num_speculative_tokens=steps)
        finally:
            draft.run = run
        chunks = 1  # the first one of two; the last goes in when the draft is first asked
        assert counts[steps] == found.stats.proposed + chunks + 1


def test_verify_compares_the_draft_as_well(bundles):
    for bundle in bundles.values():
        checks = verify_bundle(bundle).checks
        assert all(check.passed for check in checks)
        assert any("draft proposals" in check.name for check in checks)


def test_the_bundle_says_what_it_does(bundles):
    shown = inspect_path(bundles["relative"])
    assert shown["draft"]["method"] == "draft_model"
    assert shown["draft"]["num_speculative_tokens"] == STEPS
    assert shown["draft"]["checkpoint"] == "r"


def test_the_command(target, tmp_path, capsys):
    run = in_process(capsys)
    common = ("compile", target, "-o", tmp_path / "b", "--max-model-len", 64)
    config = {"method": "draft_model", "model": str(target), "num_speculative_tokens": 2}
    made = run(*common, "--speculative-config", json.dumps(config))
    assert made.code == 0
    assert "speculation by method draft_model: it was asked for, and the draft" in made.err
    ids = ",".join(map(str, PROMPT))
    flags = ("--token-ids", ids, "--max-new-tokens", 9, "--ignore-eos", "--json", "-q")
    shown = json.loads(run("run", tmp_path / "b", *flags).out)
    assert shown["accepted"] == shown["proposed"] == [2, 2, 2][: len(shown["proposed"])]


def test_names_that_mean_one_method_do_not_contradict_each_other(target, tmp_path, capsys):
    """vLLM's settings beside edgecc's flag; other methods of vLLM are refused with the reason."""
    run = in_process(capsys)
    common = ("compile", target, "-o", tmp_path / "b", "--max-model-len", 64, "--dry-run")

    def asked(method, *flags):
        config = {"method": method, "num_speculative_tokens": 2, "prompt_lookup_max": 3}
        return run(*common, "--speculative-config", json.dumps(config), *flags)

    assert asked("ngram_gpu", "--spec-method", "ngram").code == 0
    assert asked("ngram_gpu", "--spec-method", "ngram_gpu").code == 0
    assert asked("ngram", "--spec-method", "mtp").id == "usage/contradiction"
    refused = asked("suffix")
    assert (refused.code, refused.id) == (4, "draft/kind")
    assert "known from vLLM: it looks up in earlier answers" in refused.err


TEXTS = ("def main(", "import os\n\nclass ", "    return self.")


def test_a_trained_target_drafts_for_itself(tmp_path):
    """All proposals are accepted, and equal tensors are stored once."""
    for name, draft in (("pair", TARGET), ("alone", None)):
        edgecc.compile(TARGET, draft, out=tmp_path / name, max_model_len=192)
    manifests = [json.loads((tmp_path / n / "bundle.json").read_text()) for n in ("pair", "alone")]
    sizes = [sum(f["bytes"] for f in m["files"].values()) for m in manifests]
    assert sizes[0] < 1.2 * sizes[1]
    shared = {
        w for item in manifests[0]["shared"] if "mlp" in item["symbol"] for w in item["users"]
    }
    assert shared == {"draft", "target"}
    with edgecc.load(tmp_path / "pair") as generator:
        for text in TEXTS:
            plain = generator.generate(text, max_new_tokens=40, speculation=False)
            found = generator.generate(text, max_new_tokens=40)
            assert found.token_ids == plain.token_ids
            assert found.stats.accepted == found.stats.proposed > 0


def test_a_trained_target_and_a_smaller_model(tmp_path):
    """The first layers of a model, with its head, foresee some of what all of them say."""
    draft = write_first_layers(TARGET, tmp_path / "draft", 6)
    edgecc.compile(TARGET, draft, out=tmp_path / "b", num_speculative_tokens=3, max_model_len=192)
    with edgecc.load(tmp_path / "b") as generator:
        accepted = 0
        for text in TEXTS:
            for sampling in ({}, {"temperature": 0.7, "seed": 11}):
                asked = {"max_new_tokens": 48, **sampling}
                plain = generator.generate(text, **asked, speculation=False)
                found = generator.generate(text, **asked)
                assert found.token_ids == plain.token_ids
                accepted += found.stats.accepted
        assert accepted > 20
