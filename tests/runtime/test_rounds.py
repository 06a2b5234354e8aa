"""Rounds on the device: the same text, the same accounts, and fewer read-backs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.base import GreedyRound
from edgecc.backends.runtime import PlainDecoder, SpeculativeDecoder
from edgecc.backends.runtime.round import Round
from edgecc.errors import BackendError, InternalError

from .fakes import Pair, by_hash, continue_greedily, make_pair, on_device

NUM_TOKENS = 37


def decode(pair: Pair, prompt: list[int], count: int, wanted: int | None, stops=()) -> list[Round]:
    if wanted == 0 or pair.model.draft is None:
        decoder = PlainDecoder(pair.session, pair.model)
    else:
        decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft, wanted)
    return list(decoder.rounds(prompt, count, stops))


def facts(rounds: list[Round]) -> list[tuple[object, ...]]:
    return [(r.tokens, r.proposed, r.accepted, r.is_prompt, r.finish_reason) for r in rounds]


@given(
    st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=30),
    st.integers(1, 40),
    st.lists(st.integers(0, 7), min_size=1, max_size=5),
    st.integers(1, 7),
    st.sets(st.integers(0, NUM_TOKENS - 1), max_size=3),
    st.integers(8, 12),
    st.booleans(),
    st.sampled_from(["dspark", "eagle3", "draft_model"]),
    st.sampled_from([0, 8]),
)
def test_rounds_on_the_device_do_what_two_calls_do(
    prompt, count, plan, wanted, stops, chunk, junk, method, log_rows
):
    """Token for token and round for round, wherever the draft errs, stops or ends.

    Also where the target has states, into which only what was accepted may go.
    """

    def pair(capacity: int) -> Pair:
        return make_pair(
            plan=plan,
            prefill_chunk=chunk,
            capacity=capacity,
            max_model_len=64,
            junk=junk,
            method=method,
            log_rows=log_rows,
        )

    expected = decode(pair(64), prompt, count, wanted, stops)
    device, rounds = on_device(pair(64 + 7))
    found = decode(device, prompt, count, wanted, stops)
    assert facts(found) == facts(expected)
    assert len(rounds.ran) == len(found) - 1  # one for each but the prompt
    plain = decode(on_device(pair(64 + 7))[0], prompt, count, 0, stops)
    flat = [t for r in found for t in r.tokens]
    assert [t for r in plain for t in r.tokens] == flat
    assert flat == continue_greedily(prompt, len(flat), by_hash(NUM_TOKENS))


@pytest.mark.parametrize("log_rows", [0, 1])
def test_a_target_alone(log_rows):
    device, rounds = on_device(make_pair(plan=None, log_rows=log_rows))
    found = decode(device, [3, 1, 4], 9, None)
    assert [t for r in found for t in r.tokens] == continue_greedily([3, 1, 4], 9, by_hash(37))
    assert rounds.ran == [0] * 8


@pytest.mark.parametrize("log_rows", [0, 8])
def test_the_draft_is_left_out_at_its_last_position(log_rows):
    """Of a target with states, the first row without the draft follows rows of the log."""
    device, rounds = on_device(
        make_pair(draft_positions=20, capacity=71, max_model_len=64, log_rows=log_rows)
    )
    found = decode(device, list(range(8)), 30, None)
    made = [t for r in found for t in r.tokens]
    assert made == continue_greedily(range(8), 30, by_hash(37))
    assert rounds.ran[0] == 8
    assert rounds.ran[-1] == 0


def test_features_of_a_prompt_and_of_accepted_tokens_are_counted():
    device, rounds = on_device(make_pair(plan=[7, 2, 0], capacity=71, max_model_len=64))
    decode(device, list(range(11)), 20, None)
    assert rounds.ran == [3, 8, 3, 1][: len(rounds.ran)]
    assert device.session.draft_length + device.session.pending == device.session.start


def test_a_plain_step_after_rounds_takes_features_back():
    """Calls and rounds may alternate: what waits for the draft is read from the device."""
    device, _ = on_device(make_pair(plan=[2], capacity=71, max_model_len=64))
    session = device.session
    session.run(session.prefill([1, 2, 3], features=True))
    tokens = continue_greedily([1, 2, 3], 12, by_hash(37))
    session.push(tokens[0])
    proposals, chosen = session.round(7, features=True)
    assert proposals.tokens[:2] == tokens[1:3]
    session.commit(2, chosen[2])
    logits = session.run(session.verify([], features=True))
    session.commit(0, int(logits[0, :37].argmax()))
    assert session.tokens == [1, 2, 3, *tokens[:5]]
    assert session.run(session.propose()).tokens[:2] == tokens[5:7]


@pytest.mark.parametrize("token", [-1, NUM_TOKENS])
def test_a_token_that_is_none(token):
    device, rounds = on_device(make_pair())
    run = rounds.run

    def broken(*args: int) -> GreedyRound:
        made = run(*args)
        return GreedyRound(made.proposals, np.full_like(made.chosen, token))

    rounds.run = broken  # type: ignore[method-assign]
    with pytest.raises(BackendError, match=f"the device chose {token}"):
        decode(device, [1, 2], 9, None)


def test_a_round_whose_proposals_are_not_looked_at():
    """The anchor is in the log all the same: the draft took part in the round."""
    device, _ = on_device(make_pair(capacity=71, max_model_len=64, log_rows=8))
    session = device.session
    session.run(session.prefill([1, 2, 3], features=True))
    tokens = continue_greedily([1, 2, 3], 4, by_hash(37))
    session.push(tokens[0])
    for after in tokens[1:]:
        proposals, chosen = session.round(0, features=True)
        assert (proposals.tokens, chosen) == ([], [after])
        session.commit(0, chosen[0])
        assert session.replay == 1


def test_misuse():
    device, _ = on_device(make_pair())
    with pytest.raises(InternalError, match="round follows push"):
        device.session.round(3, features=True)
    device.session.run(device.session.prefill([1, 2], features=False))
    device.session.push(4)
    with pytest.raises(InternalError, match="lacks the features"):
        device.session.round(3, features=True)
    device.session.round(0, features=False)
    with pytest.raises(InternalError, match="round follows push"):
        device.session.round(0, features=False)
    with pytest.raises(InternalError, match="round follows push"):
        make_pair().session.round(1, features=True)
