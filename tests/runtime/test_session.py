"""Commit and rollback against a plain list of tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from edgecc.backends.base import Role
from edgecc.backends.runtime import Session
from edgecc.errors import InternalError

from .fakes import by_hash, continue_greedily, fold, make_pair

NUM_TOKENS = 37
TOKEN = st.integers(0, NUM_TOKENS - 1)


class SessionMachine(RuleBasedStateMachine):
    """A session beside the list of what was committed.

    Here the caller may commit any token, so nothing but the session's own counting keeps caches,
    features and tokens together.
    """

    @initialize(
        chunk=st.integers(1, 9),
        proposals=st.integers(1, 7),
        log_rows=st.sampled_from([0, 1, 4, 8]),
        method=st.sampled_from(["dspark", "mtp", "draft_model"]),
    )
    def make(self, chunk: int, proposals: int, log_rows: int, method: str) -> None:
        self.pair = make_pair(
            prefill_chunk=chunk,
            proposals=proposals,
            plan=[2, 0, 7],
            log_rows=log_rows,
            method=method,
        )
        self.most_open = min(chunk, log_rows or chunk)
        self.session = self.pair.session
        self.tokens: list[int] = []
        self.features = True
        self.proposed = False

    def next_token(self, tokens: list[int]) -> int:
        return continue_greedily(tokens, 1, by_hash(NUM_TOKENS))[0]

    @rule(prompt=st.lists(TOKEN, min_size=1, max_size=40), features=st.booleans(), token=TOKEN)
    def start(self, prompt: list[int], features: bool, token: int) -> None:
        self.session.reset()
        row = self.session.run(self.session.prefill(prompt, features=features))
        assert int(row[:NUM_TOKENS].argmax()) == self.next_token(prompt)
        assert self.session.start == len(prompt)
        self.session.push(token)
        self.tokens = [*prompt, token]
        self.features, self.proposed = features, False

    @precondition(lambda self: self.tokens and self.features and not self.proposed)
    @rule()
    def propose(self) -> None:
        count = self.pair.draft.proposals
        proposals = self.session.run(self.session.propose(count)).tokens
        assert len(proposals) == count
        assert self.session.pending == 0
        if self.session.draft_rows > self.session.draft_length:
            assert self.session.draft_rows == self.session.start + count
        self.drafted = proposals
        self.proposed = True

    @precondition(lambda self: self.tokens and self.session.room >= 0)
    @rule(
        proposals=st.lists(TOKEN, max_size=7),
        drafted=st.integers(0, 7),
        features=st.booleans(),
        data=st.data(),
    )
    def step(self, proposals: list[int], drafted: int, features: bool, data: st.DataObject) -> None:
        if self.proposed:
            proposals = [*self.drafted[:drafted], *proposals]
        proposals = proposals[: self.session.room]
        features = features and self.features
        accepted = data.draw(st.integers(0, len(proposals)))
        token = data.draw(TOKEN)
        logits = self.session.run(self.session.verify(proposals, features=features))
        for row, scores in enumerate(logits):
            best = int(scores[:NUM_TOKENS].argmax())
            assert best == self.next_token([*self.tokens, *proposals[:row]])
        assert len(logits) == len(proposals) + 1
        self.session.commit(accepted, token)
        self.tokens += [*proposals[:accepted], token]
        self.features, self.proposed = features, False

    @invariant()
    def lengths_agree(self) -> None:
        if not self.tokens:
            return
        session, start = self.session, len(self.tokens) - 1
        assert session.tokens == self.tokens
        assert session.start == start
        assert session.room == min(64 - start, self.most_open) - 1
        recurrent = self.pair.target.recurrent
        if recurrent is not None:
            assert recurrent.rows + session.replay == start
            logged = self.tokens[recurrent.rows : start]
            assert recurrent.log[: session.replay] == logged
        assert self.pair.target.tokens[:start] == self.tokens[:start]
        if self.features:
            assert session.draft_length + session.pending == start
            assert (
                self.pair.draft.tokens[: session.draft_length]
                == self.tokens[: session.draft_length]
            )
        state = 0
        for token, stored in zip(self.tokens[:start], self.pair.target.states, strict=False):
            state = fold(state, token)
            assert stored == state


def test_session_against_a_list() -> None:
    run_state_machine_as_test(SessionMachine)


def test_chunks_of_a_prompt_go_into_the_draft_caches_without_a_block() -> None:
    pair = make_pair(prefill_chunk=8)
    pair.session.run(pair.session.prefill(list(range(20)), features=True))
    tap, last = (Role.HIDDEN_TAP,), (Role.LOGITS, Role.HIDDEN_TAP)
    assert pair.target.calls == [(0, 8, tap), (8, 8, tap), (16, 4, last)]
    assert pair.draft.calls == [(0, 8, ()), (8, 8, ())]
    assert (pair.session.draft_length, pair.session.pending) == (16, 4)
    pair.session.push(1)
    pair.session.run(pair.session.propose())
    assert pair.draft.calls[2:] == [(16, 4, (Role.PROPOSALS,))]
    assert (pair.session.draft_length, pair.session.pending) == (20, 0)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16])
def test_chunk_edges(length: int) -> None:
    pair = make_pair(prefill_chunk=8)
    pair.session.run(pair.session.prefill([1] * length, features=False))
    assert [rows for _, rows, _ in pair.target.calls] == [8] * ((length - 1) // 8) + [
        (length - 1) % 8 + 1
    ]
    assert pair.target.calls[-1][2] == (Role.LOGITS,)
    assert pair.draft.calls == []


def test_features_of_a_step_without_proposals_reach_the_draft() -> None:
    pair = make_pair(prefill_chunk=8)
    session = pair.session
    session.run(session.prefill([1, 2, 3], features=True))
    session.push(4)
    for token in (5, 6):
        session.run(session.verify([], features=True))
        session.commit(0, token)
    session.run(session.propose())
    assert [call[:2] for call in pair.draft.calls] == [(0, 3), (3, 1), (4, 1)]


def started(features: bool = True) -> Session:
    session = make_pair(prefill_chunk=8).session
    session.run(session.prefill([1, 2, 3], features=features))
    session.push(4)
    return session


def twice_proposed() -> None:
    session = started()
    session.run(session.propose())
    session.run(session.propose())


def proposed_without_features() -> None:
    session = started(features=False)
    session.run(session.propose())


def proposed_after_a_gap() -> None:
    session = started()
    session.run(session.verify([5], features=False))
    session.commit(1, 6)
    session.run(session.verify([], features=True))
    session.commit(0, 7)
    session.run(session.propose())


def verified_twice() -> None:
    session = started()
    session.run(session.verify([], features=True))
    session.run(session.verify([], features=True))


def verified_too_much() -> None:
    session = started()
    session.run(session.verify([1] * 8, features=True))


def verified_past_the_capacity() -> None:
    session = make_pair(capacity=4).session
    session.run(session.prefill([1, 2, 3], features=False))
    session.push(4)
    session.run(session.verify([5], features=False))


def committed_too_much() -> None:
    session = started()
    session.run(session.verify([5], features=True))
    session.commit(2, 6)


def committed_nothing() -> None:
    started().commit(0, 5)


def pushed_twice() -> None:
    started().push(5)


def pushed_first() -> None:
    make_pair().session.push(5)


def prefilled_twice() -> None:
    session = started()
    session.run(session.prefill([1], features=True))


def prefilled_nothing() -> None:
    session = make_pair().session
    session.run(session.prefill([], features=True))


def featured_without_a_draft() -> None:
    session = make_pair(plan=None).session
    session.run(session.prefill([1] * 9, features=True))


@pytest.mark.parametrize(
    "misuse",
    [
        twice_proposed,
        proposed_without_features,
        proposed_after_a_gap,
        verified_twice,
        verified_too_much,
        verified_past_the_capacity,
        committed_too_much,
        committed_nothing,
        pushed_twice,
        pushed_first,
        prefilled_twice,
        prefilled_nothing,
        featured_without_a_draft,
    ],
)
def test_misuse_is_noticed(misuse: Callable[[], None]) -> None:
    with pytest.raises(InternalError) as caught:
        misuse()
    assert caught.value.id == "runtime/session-misuse"


def test_what_is_replayed_is_what_was_accepted() -> None:
    """Rows replayed: those of the last verification that stay, in the next call, once."""
    pair = make_pair(prefill_chunk=8, log_rows=8, plan=[7])
    session, state = pair.session, pair.target.recurrent
    assert state is not None
    session.run(session.prefill(list(range(20)), features=True))
    session.push(1)
    assert (state.rows, session.replay) == (20, 0)
    expected = 0
    for proposals, accepted in (([2, 3, 4], 1), ([5, 6], 2), ([7], 0), ([], 0), ([8, 9], 0)):
        session.run(session.verify(proposals, features=True))
        assert state.replayed == expected
        session.commit(accepted, 3)
        assert session.replay == (accepted + 1 if proposals else 0)
        expected += session.replay
    assert expected == 2 + 3 + 1 + 1
    session.reset()
    session.run(session.prefill([1], features=False))
    assert (state.rows, state.replayed) == (1, expected - 1)


def test_no_more_proposals_than_the_log_holds() -> None:
    pair = make_pair(prefill_chunk=8, log_rows=3)
    pair.session.run(pair.session.prefill([1, 2], features=False))
    pair.session.push(3)
    assert pair.session.room == 2
    with pytest.raises(InternalError, match="4 rows that may be rejected, at most 3 can"):
        pair.session.run(pair.session.verify([1, 2, 3], features=False))
