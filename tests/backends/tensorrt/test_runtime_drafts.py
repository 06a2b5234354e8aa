"""Prompt lookup, DFlash drafts and draft models on a simulated GPU: by calls, and by rounds."""

from __future__ import annotations

import pytest

from edgecc.backends.tensorrt.profiles import verify_rows
from edgecc.prompt_lookup import DEFAULT_PROPOSALS, PromptLookup
from helpers.checkpoints import DROP, write_draft, write_target
from helpers.command_line import SMALL
from helpers.dflash import write_dflash_pair
from helpers.draft_models import write_relative
from helpers.dspark_heads import write_heads
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.simulated_bundle import SimulatedBundle, lowered

PROMPT = [7, 3, 11, 2, 5, 13] * 3


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_lookups_change_no_token(tmp_path, trt, cuda_runtime, kind):
    """A round without a draft has one final row, though engines pad it to a verification's."""
    if kind == "attention":
        target = write_target(tmp_path / "t", **SMALL, quantized=False)
    else:
        sizes = HybridSizes(layer_types=(LINEAR, FULL))
        target = write_hybrid_target(tmp_path / "t", sizes)
    module = lowered(target, None, method="ngram")
    assert verify_rows(module) == DEFAULT_PROPOSALS + 1
    bundle = SimulatedBundle(tmp_path / "bundle", trt, cuda_runtime, module)
    with bundle.generator() as generator:
        asked = {"token_ids": PROMPT, "max_new_tokens": 40, "ignore_eos": True}
        plain = generator.generate(**asked, speculation=False)
        found = generator.generate(**asked, prompt_lookup=PromptLookup(1, 3))
        again = generator.generate(**asked, speculation=False)
    assert found.token_ids == plain.token_ids == again.token_ids
    assert found.stats.proposed > found.stats.accepted > 0


@pytest.mark.filterwarnings("ignore:each proposed token:UserWarning")
def test_rounds_of_a_dflash_draft(tmp_path, trt, cuda_runtime):
    """Rounds on the device: the block's first slot is the anchor, which proposes nothing."""
    target, draft = write_dflash_pair(tmp_path, "agreeing")
    bundle = SimulatedBundle(tmp_path / "bundle", trt, cuda_runtime, lowered(target, draft))
    with bundle.generator() as generator:
        asked = {"token_ids": PROMPT, "max_new_tokens": 30, "ignore_eos": True}
        plain = generator.generate(**asked, speculation=False)
        found = generator.generate(**asked)
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted_by_round[:5] == [4] * 5


@pytest.mark.filterwarnings("ignore:no proposed token:UserWarning")
@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_rounds_of_a_markov_head_with_a_reduced_vocabulary(tmp_path, trt, cuda_runtime, kind):
    target, draft = write_heads(tmp_path, kind=kind, reduced=True)
    bundle = SimulatedBundle(tmp_path / "bundle", trt, cuda_runtime, lowered(target, draft))
    with bundle.generator() as generator:
        asked = {"token_ids": PROMPT, "max_new_tokens": 20, "ignore_eos": True}
        plain = generator.generate(**asked, speculation=False)
        found = generator.generate(**asked)
    assert found.token_ids == plain.token_ids
    assert found.stats.proposed > 0


@pytest.mark.filterwarnings(
    "ignore:no proposed token:UserWarning", "ignore:each proposed token:UserWarning"
)
@pytest.mark.parametrize(
    ("kind", "amount"), [("attention", 0.0), ("attention", 0.15), ("hybrid", 0.15)]
)
def test_rounds_of_a_draft_model(tmp_path, trt, cuda_runtime, kind, amount):
    """A call for each proposal, all in one round: rows of accepted proposals are not made again.

    Sampled requests make the same calls from the host, and alternate with rounds.
    """
    same = write_target(tmp_path / "t", **SMALL, quantized=False, eos_token_id=DROP)
    draft = write_relative(same, tmp_path / "d", amount)
    target = same
    if kind == "hybrid":
        sizes = HybridSizes(layer_types=(LINEAR, FULL))
        target = write_hybrid_target(tmp_path / "h", sizes, eos_token_id=DROP)
    module = lowered(target, draft)
    bundle = SimulatedBundle(tmp_path / "bundle", trt, cuda_runtime, module)
    with bundle.generator() as generator:
        asked = {"token_ids": PROMPT, "max_new_tokens": 18, "ignore_eos": True}
        for sampling in ({}, {"temperature": 0.7, "seed": 2}):
            plain = generator.generate(**asked, speculation=False, **sampling)
            for steps in (5, 2):
                found = generator.generate(**asked, num_speculative_tokens=steps, **sampling)
                assert found.token_ids == plain.token_ids
                assert found.stats.proposed > 0
                if kind == "attention" and not sampling:
                    everything = found.stats.accepted == found.stats.proposed
                    assert everything == (amount == 0)
        session = generator._session
        assert session.draft_length + session.pending == session.start


@pytest.mark.filterwarnings("ignore:no proposed token:UserWarning")
def test_a_round_of_a_draft_model_is_one_graph_for_each_number_of_new_tokens(
    tmp_path, trt, cuda_runtime
):
    """One token to read, or two after a round in which all were accepted; none is read back."""
    target = write_target(tmp_path / "t", **SMALL, quantized=False, eos_token_id=DROP)
    draft = write_relative(target, tmp_path / "d", 0.1)
    bundle = SimulatedBundle(tmp_path / "bundle", trt, cuda_runtime, lowered(target, draft))
    with bundle.generator() as generator:
        rounds = generator._session._rounds
        generator.generate(token_ids=PROMPT, max_new_tokens=24, ignore_eos=True)
        assert {features for features, _ in rounds._works} <= {0, 1, 2}
        assert all(work.graph is not None for work in rounds._works.values())


@pytest.mark.filterwarnings("ignore:no proposed token:UserWarning")
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_rounds_leave_out_what_the_draft_is_not_sure_of(tmp_path, trt, cuda_runtime, kind):
    """Rounds on the device bring its confidence along, and calls ask for it."""
    if kind == "attention":
        target, draft = write_heads(tmp_path, kind="rnn", reduced=False)
    else:
        target = write_hybrid_target(tmp_path / "t", HybridSizes(layer_types=(LINEAR, FULL)))
        draft = write_draft(
            tmp_path / "d", hidden=32, layers=1, target_layers=2, target_layer_ids=(0, 1)
        )
    bundle = SimulatedBundle(tmp_path / "bundle", trt, cuda_runtime, lowered(target, draft))
    with bundle.generator() as generator:
        asked = {"token_ids": PROMPT, "max_new_tokens": 24, "ignore_eos": True}
        for sampled in ({}, {"temperature": 0.8, "seed": 1}):
            plain = generator.generate(**asked, **sampled, speculation=False)
            everything = generator.generate(**asked, **sampled)
            found = generator.generate(**asked, **sampled, confidence_threshold=0.5)
            assert found.token_ids == plain.token_ids == everything.token_ids
            assert 0 < found.stats.proposed < everything.stats.proposed
            assert found.stats.withheld > everything.stats.withheld == 0
            nothing = generator.generate(**asked, **sampled, confidence_threshold=1)
            assert nothing.token_ids == plain.token_ids
            assert nothing.stats.proposed == 0
