"""Speculative decoding against plain decoding, and both against greedy choice without caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from edgecc.backends.base import Role
from edgecc.backends.runtime import (
    Decoder,
    FinishReason,
    PlainDecoder,
    Round,
    SpeculativeDecoder,
    Stats,
)
from edgecc.backends.runtime.decoder import accept
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.backends.runtime.sampling import best_token
from edgecc.errors import BackendError

from .fakes import Pair, by_hash, by_script, continue_greedily, make_pair

NUM_TOKENS = 37
PAIRS = Path(__file__).parents[1] / "data" / "pairs"


@dataclass
class Setting:
    """One decoding problem, with what the draft gets right."""

    prompt: list[int]
    capacity: int
    max_model_len: int
    prefill_chunk: int
    plan: list[int]
    proposals: int
    wanted: int
    draft_positions: int
    draft_capacity: int
    max_new_tokens: int
    stop_ids: set[int]
    junk: bool
    log_rows: int
    method: str

    @property
    def limit(self) -> int:
        return min(self.capacity, self.max_model_len)

    @cached_property
    def truth(self) -> list[int]:
        count = self.capacity + 10
        return self.prompt + continue_greedily(self.prompt, count, by_hash(NUM_TOKENS))

    @cached_property
    def answer(self) -> list[int]:
        """What any decoder must commit."""
        room = min(self.max_new_tokens, self.limit - len(self.prompt))
        tokens = self.truth[len(self.prompt) :][: max(0, room)]
        ends = [place for place, token in enumerate(tokens, 1) if token in self.stop_ids]
        return tokens[: ends[0]] if ends else tokens

    def pair(self) -> Pair:
        return make_pair(
            num_tokens=NUM_TOKENS,
            capacity=self.capacity,
            max_model_len=self.max_model_len,
            prefill_chunk=self.prefill_chunk,
            plan=self.plan,
            proposals=self.proposals,
            draft_positions=self.draft_positions,
            draft_capacity=self.draft_capacity,
            truth=self.truth,
            junk=self.junk,
            log_rows=self.log_rows,
            method=self.method,
        )

    def rounds(self, *, speculative: bool) -> tuple[list[Round], Pair]:
        pair = self.pair()
        decoder: Decoder = PlainDecoder(pair.session, pair.model)
        if speculative:
            assert pair.model.draft is not None
            decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft, self.wanted)
        return list(decoder.rounds(self.prompt, self.max_new_tokens, self.stop_ids)), pair


@st.composite
def settings(draw: st.DrawFn) -> Setting:
    proposals = draw(st.integers(1, 7))
    capacity = draw(st.integers(2, 60))
    prompt = draw(st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=40))
    stops = st.sets(st.integers(0, NUM_TOKENS - 1), max_size=3)
    reach = st.one_of(st.just(10_000), st.integers(0, capacity + 10))
    return Setting(
        prompt=prompt[: draw(st.integers(1, capacity))],
        capacity=capacity,
        max_model_len=draw(st.one_of(st.just(capacity), st.integers(2, capacity + 10))),
        prefill_chunk=draw(st.integers(1, 12)),
        plan=draw(st.lists(st.integers(0, proposals), min_size=1, max_size=8)),
        proposals=proposals,
        wanted=draw(st.integers(1, proposals)),
        draft_positions=draw(reach),
        draft_capacity=draw(st.one_of(st.just(capacity + proposals), st.integers(0, capacity))),
        max_new_tokens=draw(st.integers(0, 50)),
        stop_ids=draw(stops),
        junk=draw(st.booleans()),
        log_rows=draw(st.sampled_from([0, proposals + 1])),
        method=draw(st.sampled_from(sorted(PROPOSERS))),
    )


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for step in rounds for token in step.tokens]


def expected_rounds(setting: Setting) -> list[tuple[int, int]]:
    """(proposed, accepted) of each round after the prompt, by the rules alone."""
    answer, truth = setting.answer, setting.truth
    rounds: list[tuple[int, int]] = []
    done, blocks = 1, 0
    while done < len(answer):
        start = len(setting.prompt) + done - 1
        reach = min(setting.draft_positions, setting.draft_capacity) - setting.proposals
        room = min(setting.capacity - start, setting.prefill_chunk) - 1
        proposed = accepted = 0
        if start <= reach and room > 0:
            right = setting.plan[blocks % len(setting.plan)]
            blocks += 1
            proposed = min(setting.wanted, room)
            if setting.junk:
                proposed = min(proposed, right)
            for token in truth[start + 1 :][: min(proposed, right)]:
                if token in setting.stop_ids:
                    break
                accepted += 1
        rounds.append((proposed, accepted))
        done += accepted + 1
    return rounds


@given(settings())
def test_both_decoders_commit_the_greedy_choice(setting: Setting) -> None:
    for speculative in (False, True):
        rounds, _ = setting.rounds(speculative=speculative)
        assert tokens_of(rounds) == setting.answer


@given(settings())
def test_rounds_follow_the_rules_of_acceptance(setting: Setting) -> None:
    rounds, _ = setting.rounds(speculative=True)
    counts = [(len(step.proposed), step.accepted) for step in rounds[1:]]
    assert counts == expected_rounds(setting)


@given(settings())
def test_only_the_last_round_finishes_and_only_the_first_reads_the_prompt(setting: Setting) -> None:
    for speculative in (False, True):
        rounds, _ = setting.rounds(speculative=speculative)
        assert bool(rounds) == bool(setting.answer)
        assert [step.is_prompt for step in rounds] == [True] * bool(rounds) + [False] * (
            len(rounds) - 1
        )
        assert all(step.finish_reason is None for step in rounds[:-1])
        for step in rounds[-1:]:
            stopped = step.tokens[-1] in setting.stop_ids
            assert step.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


@given(settings())
def test_stats_add_up(setting: Setting) -> None:
    rounds, _ = setting.rounds(speculative=True)
    stats = Stats(prompt_tokens=len(setting.prompt))
    for step in rounds:
        stats.add(step)
        stats.new_tokens += len(step.tokens)
    after = rounds[1:]
    assert stats.new_tokens == len(setting.answer)
    assert stats.rounds == len(after)
    assert stats.proposed == sum(len(step.proposed) for step in after)
    assert stats.accepted == sum(step.accepted for step in after)
    assert stats.accepted_by_round == [step.accepted for step in after]
    committed = sum(step.accepted + 1 for step in after)
    assert stats.tokens_per_step * stats.rounds == pytest.approx(committed)
    for slot, share in enumerate(stats.acceptance_by_position):
        reached = [s for s in after if len(s.proposed) > slot and s.accepted >= slot]
        assert share == sum(s.accepted > slot for s in reached) / len(reached)
    assert len(stats.acceptance_by_position) == max(
        [min(step.accepted + 1, len(step.proposed)) for step in after], default=0
    )


@given(settings())
def test_the_target_is_asked_for_no_more_than_needed(setting: Setting) -> None:
    rounds, pair = setting.rounds(speculative=True)
    chunks = -(-len(setting.prompt) // setting.prefill_chunk) if rounds else 0
    assert len(pair.target.calls) == chunks + max(0, len(rounds) - 1)
    assert all(Role.LOGITS not in outputs for _, _, outputs in pair.target.calls[: chunks - 1])
    assert all(Role.LOGITS in outputs for _, _, outputs in pair.target.calls[chunks - 1 :])
    _, plain = setting.rounds(speculative=False)
    assert all(Role.HIDDEN_TAP not in outputs for _, _, outputs in plain.target.calls)
    assert plain.draft.calls == []


@given(settings())
def test_the_block_runs_once_a_round_and_not_for_the_prompt(setting: Setting) -> None:
    rounds, pair = setting.rounds(speculative=True)
    blocks = [call for call in pair.draft.calls if call[2]]
    assert all(outputs == (Role.PROPOSALS,) for _, _, outputs in blocks)
    if not setting.junk:
        assert len(blocks) == sum(bool(step.proposed) for step in rounds)


def test_a_decoder_can_be_used_again() -> None:
    pair = make_pair(plan=[3, 0, 7])
    assert pair.model.draft is not None
    decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft)
    for prompt in ([1, 2, 3] * 9, [4], [1, 2, 3] * 9):
        pair.draft.truth = prompt + continue_greedily(prompt, 60, by_hash(NUM_TOKENS))
        got = tokens_of(list(decoder.rounds(prompt, 20)))
        assert got == pair.draft.truth[len(prompt) :][:20]


def test_a_stop_token_in_an_accepted_run_ends_the_text_there() -> None:
    script = [5, 6, 7, 8, 9, 10, 11, 12]
    for place, stop in enumerate(script):
        pair = make_pair(choose=by_script(2, script), plan=[7])
        assert pair.model.draft is not None
        decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft)
        rounds = list(decoder.rounds([1, 2], 50, [stop]))
        assert tokens_of(rounds) == script[: place + 1]
        assert rounds[-1].finish_reason is FinishReason.STOP
        # The stop token is the round's own token, not an accepted one: nothing follows it.
        assert [step.accepted for step in rounds[1:]] == ([place - 1] if place else [])
        assert pair.session.tokens == [1, 2, *script[: place + 1]]


def test_the_last_round_proposes_in_full_and_is_cut() -> None:
    pair = make_pair(plan=[7], max_model_len=64)
    assert pair.model.draft is not None
    decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft)
    rounds = list(decoder.rounds([1, 2, 3], 12))
    assert [len(step.proposed) for step in rounds] == [0, 7, 7]
    assert [step.accepted for step in rounds] == [0, 7, 7]
    assert [len(step.tokens) for step in rounds] == [1, 8, 3]


@pytest.mark.parametrize("prompt", ["p0", "p1", "p2", "p3"])
def test_acceptance_follows_the_golden_rounds(prompt: str) -> None:
    """The proposals of a real pair, replayed: rounds and counts as the reference recorded them."""
    goldens = load_file(PAIRS / "goldens-tiny-qwen3-dspark.safetensors")
    ids, greedy, proposals, accepted = (
        goldens[f"{prompt}.{name}"].tolist() for name in ("ids", "greedy", "proposals", "accepted")
    )
    # The last round may run past the recorded text; what it accepted tells how the text goes on.
    done = 1 + sum(count + 1 for count in accepted[:-1])
    script = [*greedy[:done], *proposals[-1][: accepted[-1]], 4095]
    script[: len(greedy)] = greedy
    pair = make_pair(
        choose=by_script(len(ids), script),
        vocab_size=4096,
        num_tokens=4096,
        capacity=256,
        truth=ids + script,
    )
    pair.draft.recorded = proposals
    assert pair.model.draft is not None
    decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft)
    rounds = list(decoder.rounds(ids, 64, [4094, 4092]))
    assert tokens_of(rounds) == greedy
    assert [list(step.proposed) for step in rounds[1:]] == proposals
    assert [step.accepted for step in rounds[1:]] == accepted


def test_capacity_reached_with_drafted_tokens_in_flight() -> None:
    prompt = [1] * 60
    pair = make_pair(plan=[3], proposals=3, capacity=64)
    assert pair.model.draft is not None
    decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft)
    rounds = list(decoder.rounds(prompt, 100))
    assert tokens_of(rounds) == continue_greedily(prompt, 4, by_hash(NUM_TOKENS))
    assert rounds[-1].finish_reason is FinishReason.LENGTH
    assert max(start + rows for start, rows, _ in pair.target.calls) == 64


@pytest.mark.parametrize(("length", "made"), [(62, 2), (63, 1), (64, 0)])
def test_prompts_near_the_capacity(length: int, made: int) -> None:
    pair = make_pair(plan=[3], capacity=64)
    decoder = PlainDecoder(pair.session, pair.model)
    assert len(tokens_of(list(decoder.rounds([1] * length, 5)))) == made


def test_past_its_own_last_position_the_draft_is_off_and_the_text_goes_on() -> None:
    prompt = [3, 1, 4]
    pair = make_pair(plan=[2], proposals=3, capacity=64, draft_positions=48)
    assert pair.model.draft is not None
    decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft)
    rounds = list(decoder.rounds(prompt, 100))
    assert tokens_of(rounds) == continue_greedily(prompt, 61, by_hash(NUM_TOKENS))
    widths = [len(step.proposed) for step in rounds[1:]]
    assert widths == sorted(widths, reverse=True)
    # A block needs positions start to start + 2 below 48; rounds after that draft nothing.
    assert widths.count(3) == 15
    assert widths.count(0) == 61 - 1 - 15 * 3
    features_asked = [Role.HIDDEN_TAP in outputs for _, _, outputs in pair.target.calls]
    assert features_asked == [True] * 16 + [False] * 15


def test_a_prompt_past_the_drafts_last_position_collects_no_features() -> None:
    pair = make_pair(plan=[2], proposals=3, capacity=64, draft_positions=32)
    assert pair.model.draft is not None
    decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft)
    assert len(tokens_of(list(decoder.rounds([1] * 30, 4)))) == 4
    assert pair.draft.calls == []
    assert all(Role.HIDDEN_TAP not in outputs for _, _, outputs in pair.target.calls)


@given(
    rows=st.lists(st.lists(st.integers(-2, 2), min_size=6, max_size=6), min_size=1, max_size=5),
    data=st.data(),
)
def test_acceptance_against_its_definition(rows: list[list[int]], data: st.DataObject) -> None:
    token = st.integers(0, 3)
    proposed = data.draw(st.lists(token, min_size=len(rows) - 1, max_size=len(rows) - 1))
    stops = frozenset(data.draw(st.sets(token)))
    best = [row[:4].index(max(row[:4])) for row in rows]
    accepted = 0
    while accepted < len(proposed) and proposed[accepted] == best[accepted]:
        if best[accepted] in stops:
            break
        accepted += 1
    logits = np.array(rows, dtype=np.float32)
    assert accept(lambda i: best_token(logits[i], 4), proposed, stops.__contains__) == (
        accepted,
        best[accepted],
    )


def test_rows_after_the_first_disagreement_are_not_read() -> None:
    logits = np.full((4, 3), np.nan, dtype=np.float32)
    logits[:2] = [[0, 1, 0], [1, 0, 0]]
    assert accept(lambda i: best_token(logits[i], 3), (1, 2, 0), lambda token: False) == (1, 0)


def test_a_nan_in_the_logits_is_an_error() -> None:
    row = np.zeros(5, dtype=np.float32)
    row[4] = np.nan
    assert best_token(row, 4) == 0
    row[2] = np.nan
    with pytest.raises(BackendError, match="token 2") as caught:
        best_token(row, 4)
    assert caught.value.id == "runtime/logits-not-a-number"


def test_infinite_logits_are_numbers() -> None:
    assert best_token(np.array([-np.inf, np.inf, np.inf], dtype=np.float32), 3) == 1
    assert best_token(np.full(3, -np.inf, dtype=np.float32), 3) == 0


def test_seconds_cover_the_round() -> None:
    pair = make_pair(plan=[2])
    assert pair.model.draft is not None
    decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft)
    rounds = list(decoder.rounds([1, 2, 3], 12))
    for step in rounds:
        assert step.seconds.target > 0
        assert (step.seconds.draft > 0) is not step.is_prompt
        assert step.seconds.host >= 0
    total = sum(step.seconds.target for step in rounds)
    assert pair.session.target_seconds == pytest.approx(total)
