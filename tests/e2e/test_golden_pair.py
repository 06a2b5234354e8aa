"""The shipped pairs against values computed by transformers (see tests/data/pairs/README.md)."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc.backends.runtime import Session, SpeculativeDecoder
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.roles import Role
from helpers.goldens import PROMPTS, relative

TOLERANCE = 1e-4

DRAFT_OUTPUTS = {
    "dspark": {
        "block_logits_before_markov": Role.BASE_LOGITS,
        "block_logits_after_markov": Role.DRAFT_LOGITS,
        "block_confidence_logits": Role.CONFIDENCE,
    },
    "eagle3": {"block_logits": Role.DRAFT_LOGITS},
}
"""Golden values of the first round and the outputs that have them, by method."""


def run_target(generator, ids, rows):
    """Logits of some rows and the tapped states of a whole prompt, in one call."""
    target = generator.engine.entry("target")
    inputs = {
        Role.TOKEN_IDS: ids[None].astype(np.int64),
        Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
        Role.LOGIT_ROWS: np.asarray(rows, dtype=np.int64),
    }
    if target.log_rows:
        inputs[Role.REPLAY_LENGTH] = np.zeros(1, dtype=np.int64)
        inputs[Role.COMMIT_LENGTH] = np.array([len(ids)])
    out = target.run(inputs, [Role.LOGITS, Role.HIDDEN_TAP])
    return {role: value.copy() for role, value in out.items()}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_target_logits_match(generator, goldens, prompt):
    golden = goldens[prompt]
    ids = golden["ids"]
    out = run_target(generator, ids, [len(ids) - 1])
    assert relative(out[Role.LOGITS][0], golden["target_logits_last"]) <= TOLERANCE


@pytest.mark.parametrize("prompt", PROMPTS)
def test_target_choice_at_every_position(generator, goldens, prompt):
    golden = goldens[prompt]
    ids = golden["ids"]
    out = run_target(generator, ids, np.arange(len(ids)))
    assert np.argmax(out[Role.LOGITS][0], axis=-1).tolist() == golden["target_top1"].tolist()


def test_hidden_taps_match(generator, goldens):
    golden = goldens["p0"]
    out = run_target(generator, golden["ids"], [0])
    assert relative(out[Role.HIDDEN_TAP][0], golden["draft_input_states"]) <= TOLERANCE


@pytest.mark.parametrize("prompt", ["p0", "p1"])
def test_draft_logits_match(pair, full_generator, goldens, prompt):
    golden = goldens[prompt]
    ids = golden["ids"]
    taps = run_target(full_generator, ids, [len(ids) - 1])[Role.HIDDEN_TAP]
    proposer = PROPOSERS[pair.method]
    out = full_generator.engine.entry("draft").run(
        {
            Role.FEATURES: taps,
            proposer.role: proposer.tokens([*ids[1:], golden["greedy"][0]]),
            Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
        },
        [*DRAFT_OUTPUTS[pair.method].values(), Role.PROPOSALS],
    )
    for key, role in DRAFT_OUTPUTS[pair.method].items():
        assert relative(out[role][0], golden[key]) <= TOLERANCE, key
    assert out[Role.PROPOSALS][0].tolist() == golden["block_tokens"].tolist()


@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_match(generator, goldens, prompt, speculation):
    golden = goldens[prompt]
    result = generator.generate(token_ids=golden["ids"], max_new_tokens=64, speculation=speculation)
    assert result.token_ids == golden["greedy"].tolist()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_every_round_matches(generator, goldens, prompt):
    golden = goldens[prompt]
    model = generator.model
    engine = generator.engine
    session = Session(
        engine.entry("target"),
        engine.entry("draft"),
        prefill_chunk=model.prefill_chunk,
        proposer=PROPOSERS[model.draft.method],
    )
    decoder = SpeculativeDecoder(session, model, model.draft, 7)
    rounds = [
        r
        for r in decoder.rounds(golden["ids"].astype(np.int64), 64, model.eos_token_ids)
        if not r.is_prompt
    ]
    assert [list(r.proposed) for r in rounds] == golden["proposals"].tolist()
    assert [r.accepted for r in rounds] == golden["accepted"].tolist()


def test_text_of_the_chat_prompt_ends_at_its_stop_token(generator, goldens):
    golden = goldens["p3"]
    result = generator.generate(token_ids=golden["ids"], max_new_tokens=64)
    assert result.finish_reason == "stop"
    assert result.token_ids[-1] in generator.model.eos_token_ids
    assert "<|im_end|>" not in result.text
