"""Speculation without a draft, from checkpoint to text: prompt lookup."""

from __future__ import annotations

import json

import numpy as np
import pytest

import edgecc
from edgecc.backends.bundle_manifest import check_manifest
from edgecc.backends.runtime.verify import verify_bundle
from edgecc.errors import BundleError, UsageError
from edgecc.inspection import inspect_path
from edgecc.ir import print_module
from helpers.checkpoints import write_draft, write_target
from helpers.command_line import SMALL, TAPS, in_process
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target

pytestmark = pytest.mark.filterwarnings("ignore:no proposed token:UserWarning")
"""Drafts of random weights."""

LENGTH, CHUNK, STEPS = 160, 32, 4


def compiled(target, out, **options):
    edgecc.compile(
        target, out=out, max_model_len=LENGTH, prefill_chunk=CHUNK, force=True, **options
    )
    return out


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """A target of attention layers, and a hybrid, whose states have to go back."""
    folder = tmp_path_factory.mktemp("targets")
    return {
        "attention": write_target(folder / "attention", **SMALL, quantized=False),
        "hybrid": write_hybrid_target(folder / "hybrid", HybridSizes(layer_types=(LINEAR, FULL))),
    }


@pytest.fixture(scope="module", params=["attention", "hybrid"])
def bundle(request, targets, tmp_path_factory):
    out = tmp_path_factory.mktemp("ngram") / "bundle"
    options = {"num_speculative_tokens": STEPS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    return compiled(targets[request.param], out, spec_method="ngram", **options)


@pytest.fixture(scope="module")
def generator(bundle):
    with edgecc.load(bundle) as opened:
        yield opened


def prompt_of(seed, repeated):
    words = np.random.default_rng(seed).integers(0, 250, 12).tolist()
    return words * repeated


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 5}])
def test_text_is_that_of_plain_decoding(generator, steps, sampling):
    for seed, repeated in ((1, 1), (2, 3), (3, 8)):
        asked = {"token_ids": prompt_of(seed, repeated), "max_new_tokens": 48, "ignore_eos": True}
        plain = generator.generate(**asked, speculation=False, **sampling)
        found = generator.generate(**asked, num_speculative_tokens=steps, **sampling)
        assert found.token_ids == plain.token_ids
        assert max(found.stats.proposed_by_round) <= steps
        assert plain.stats.proposed == 0


def test_repeated_text_is_proposed_and_accepted(generator):
    """A model that falls into a loop is foreseen; fewer calls make the same text."""
    found = generator.generate(token_ids=prompt_of(2, 8), max_new_tokens=60, ignore_eos=True)
    assert found.stats.accepted > 0
    assert found.stats.rounds < 59
    assert found.stats.draft_seconds == 0.0


def test_other_numbers_at_run_time(generator):
    asked = {"token_ids": prompt_of(4, 6), "max_new_tokens": 40, "ignore_eos": True}
    found = {
        n: generator.generate(**asked, prompt_lookup=edgecc.PromptLookup(n, n)) for n in (1, 12)
    }
    assert found[1].token_ids == found[12].token_ids
    assert found[1].stats.proposed > found[12].stats.proposed


def test_verify_compares_speculation(bundle):
    checks = verify_bundle(bundle).checks
    assert sum("speculation with" in check.name for check in checks) >= 2
    assert all(check.passed for check in checks)


def test_the_bundle_says_what_it_does(bundle):
    shown = inspect_path(bundle)
    assert shown["draft"] == {
        "checkpoint": "none: looked up in the text",
        "method": "ngram",
        "num_speculative_tokens": STEPS,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
    (said,) = [d for d in shown["decisions"] if "speculation by method" in d]
    assert said.endswith("it was asked for; up to 4 tokens that followed the last 3 to 1 before")


def test_a_bundle_with_a_draft_can_look_up(targets, tmp_path, capsys):
    """No compiling for it: the verification has the rows."""
    draft = write_draft(tmp_path / "draft", **SMALL, **TAPS)
    out = compiled(targets["attention"], tmp_path / "pair", draft=draft)
    ids = prompt_of(2, 8)
    with edgecc.load(out) as generator:
        asked = {"token_ids": ids, "max_new_tokens": 40, "ignore_eos": True}
        drafted = generator.generate(**asked)
        looked = generator.generate(**asked, prompt_lookup=edgecc.PromptLookup(1, 3))
        again = generator.generate(**asked)
    assert drafted.token_ids == looked.token_ids == again.token_ids
    assert drafted.stats.draft_seconds > 0.0 == looked.stats.draft_seconds
    assert again.stats.accepted_by_round == drafted.stats.accepted_by_round
    assert looked.stats.accepted > 0
    text = ",".join(map(str, ids))
    flags = ("--token-ids", text, "--max-new-tokens", 40, "--ignore-eos", "--json", "-q")
    lengths = ("--prompt-lookup-max", 3, "--prompt-lookup-min", 1)
    made = in_process(capsys)("run", out, *flags, *lengths)
    shown = json.loads(made.out)
    assert shown["token_ids"] == looked.token_ids
    assert shown["proposed"] == looked.stats.proposed_by_round


def test_the_text_of_a_module_keeps_it(targets, tmp_path):
    options = {"spec_method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    module = edgecc.lift(targets["attention"], **options)
    path = tmp_path / "lifted.eir"
    path.write_text(print_module(module))
    report = edgecc.compile(path, dry_run=True)
    assert any("ngram" in d for d in report.decisions)
    with pytest.raises(UsageError, match="prompt-lookup-max 2: the module was lifted for 4"):
        edgecc.compile(path, dry_run=True, prompt_lookup_max=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_method": "ngram", "draft": True}, "needs no draft"),
        ({"prompt_lookup_max": 3}, "goes with --spec-method ngram, not with auto"),
        ({"spec_method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 2}, "more than"),
        ({"spec_method": "ngram", "prompt_lookup_min": 0}, "positive number"),
        ({"spec_method": "ngram", "lm_head": "share"}, "--lm-head share needs --draft"),
        ({"spec_method": "ngram", "num_speculative_tokens": 32}, "of this draft has 33"),
        ({"num_speculative_tokens": 4}, "speculative tokens need a draft"),
    ],
)
def test_what_cannot_be(targets, tmp_path, options, message):
    if "draft" in options:
        options = options | {"draft": write_draft(tmp_path / "draft", **SMALL, **TAPS)}
    with pytest.raises(UsageError, match=message):
        compiled(targets["attention"], tmp_path / "bundle", **options)
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_lookup_min": 4}, "larger than draft.prompt_lookup_max"),
        ({"prompt_lookup_min": None}, "prompt_lookup_min"),
        ({"method": "eagle3", "max_position_embeddings": 64}, "'draft' is missing"),
    ],
)
def test_damaged_manifests(bundle, change, message):
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["draft"] = {k: v for k, v in (manifest["draft"] | change).items() if v is not None}
    with pytest.raises(BundleError, match=message):
        check_manifest(manifest, bundle)


def test_the_command_takes_what_vllm_does(targets, tmp_path, capsys):
    edgecc_command = in_process(capsys)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    common = ("compile", targets["attention"], "-o", tmp_path / "b", "--dry-run")
    given = (*common, "--speculative-config", json.dumps(config))
    made = edgecc_command(*given)
    assert made.code == 0
    assert "up to 3 tokens that followed the last 4 before" in made.err
    assert edgecc_command(*given, "--prompt-lookup-max", 4, "--spec-method", "ngram").code == 0
    assert edgecc_command(*given, "--prompt-lookup-max", 5).id == "usage/contradiction"
    bad = json.dumps(config | {"prompt_lookup_min": 0})
    refused = edgecc_command(*common, "--speculative-config", bad)
    assert refused.id == "usage/speculative-config"
