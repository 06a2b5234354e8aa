"""Proposals from the text so far: what is found, and that the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.runtime import LookupDecoder, LookupInfo, ModelInfo, Round
from edgecc.backends.runtime.lookup import TokenHistory
from edgecc.backends.runtime.request import check_lookup, check_num_speculative_tokens
from edgecc.backends.runtime.stats import LOOKUP_CAUSES, AcceptanceMonitor
from edgecc.errors import RequestError, UsageError
from edgecc.prompt_lookup import PromptLookup

from .fakes import Pair, by_hash, by_script, continue_greedily, make_pair, on_device
from .test_batch import make as make_batch
from .test_sampled_decoding import LOGITS, NUM_TOKENS, PARAMS, by_definition

LOOKUPS = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(
    lambda pair: PromptLookup(min(pair), max(pair))
)


def by_search(tokens: Sequence[int], lookup: PromptLookup, count: int) -> list[int]:
    """The definition: longest suffix first, then the first place it also is at."""
    for length in range(lookup.max, lookup.min - 1, -1):
        suffix = list(tokens[-length:])
        for first in range(len(tokens) - length):
            if length < len(tokens) and list(tokens[first : first + length]) == suffix:
                return list(tokens[first + length : first + length + count])
    return []


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), LOOKUPS, st.integers(1, 9), st.data())
def test_the_longest_repetition_and_the_first_of_these(
    tokens: list[int], lookup: PromptLookup, count: int, data: st.DataObject
) -> None:
    history = TokenHistory(lookup)
    for end in [*sorted(data.draw(st.sets(st.integers(1, len(tokens))))), len(tokens)]:
        history.follow(tokens[:end])
        assert history.propose(count) == by_search(tokens[:end], lookup, count)


@pytest.mark.parametrize(
    ("tokens", "low", "high", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 1, 3, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 3, 3, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 4, 5, []),  # three repeat
        ([5, 3, 7, 7, 2, 3, 8, 2, 3], 1, 4, [8, 2]),  # two tokens beat the earlier single one
        ([4, 1, 4, 2, 4], 1, 1, [1, 4]),  # the first of two
        ([6, 6, 6, 6], 1, 2, [6, 6]),  # overlaps itself; the first place has most behind it
        ([6, 6], 1, 5, [6]),
        ([6], 1, 5, []),
    ],
)
def test_what_is_found(tokens: list[int], low: int, high: int, found: list[int]) -> None:
    history = TokenHistory(PromptLookup(low, high))
    history.follow(tokens)
    assert history.propose(2) == found


def test_a_history_grows() -> None:
    history = TokenHistory(PromptLookup(2, 2))
    tokens = [*range(5000), 17, 18]
    for end in (1, 900, 1100, len(tokens)):
        history.follow(tokens[:end])
    assert history.propose(3) == [19, 20, 21]


def decode(pair: Pair, prompt: list[int], count: int, **options: Any) -> list[Round]:
    lookup = options.pop("lookup", PromptLookup(1, 3))
    wanted, adaptive = options.pop("wanted", 4), options.pop("adaptive", False)
    decoder = LookupDecoder(pair.session, pair.model, lookup, wanted, adaptive=adaptive)
    return list(decoder.rounds(prompt, count, **options))


def tokens_of(rounds: Sequence[Round]) -> list[int]:
    return [token for made in rounds for token in made.tokens]


@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=20),
    count=st.integers(0, 40),
    capacity=st.integers(22, 48),
    chunk=st.integers(2, 9),
    wanted=st.integers(1, 7),
    lookup=LOOKUPS,
    log_rows=st.sampled_from([0, 0, 1, 2, 8]),
    stops=st.sets(st.integers(0, 2), max_size=1),
    adaptive=st.booleans(),
)
def test_text_is_that_of_plain_decoding(
    prompt: list[int],
    count: int,
    capacity: int,
    chunk: int,
    wanted: int,
    lookup: PromptLookup,
    log_rows: int,
    stops: set[int],
    adaptive: bool,
) -> None:
    """Few tokens, so that much repeats and much is rejected; targets with states as well."""
    pair = make_pair(
        vocab_size=5, num_tokens=3, plan=None, capacity=capacity, prefill_chunk=chunk,
        log_rows=log_rows,
    )  # fmt: skip
    rounds = decode(
        pair, prompt, count, wanted=wanted, lookup=lookup, stop_ids=stops, adaptive=adaptive
    )
    room = min(count, capacity - len(prompt))
    truth = continue_greedily(prompt, room, by_hash(3))
    ends = [place for place, token in enumerate(truth, 1) if token in stops]
    assert tokens_of(rounds) == (truth[: ends[0]] if ends else truth)
    text = list(prompt)
    for made in rounds:
        most = by_search(text, lookup, wanted)
        assert list(made.proposed) == ([] if made.is_prompt else most[: len(made.proposed)])
        text += made.tokens


def test_a_repeated_text_takes_few_calls() -> None:
    """The prompt holds the answer: after one token of it, all of it is known."""
    words = list(range(5, 30))
    prompt = [*words, 1, 2]
    pair = make_pair(choose=by_script(len(prompt), words), plan=None, capacity=96, prefill_chunk=32)
    rounds = decode(pair, prompt, 25, wanted=6, lookup=PromptLookup(1, 3))
    assert tokens_of(rounds) == words
    assert [made.accepted for made in rounds] == [0, 6, 6, 6, 3]
    assert len(pair.target.calls) == 5


def test_a_second_sequence_knows_nothing_of_the_first() -> None:
    pair = make_pair(num_tokens=37, plan=None, capacity=96)
    decoder = LookupDecoder(pair.session, pair.model, PromptLookup(1, 2), 4)
    list(decoder.rounds([1, 2, 3, 4, 5, 6, 7, 8], 8))
    prompt = [9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    first = list(decoder.rounds(prompt, 1))
    text = [*prompt, *first[0].tokens]
    second = list(decoder.rounds(prompt, 2))[1]
    assert list(second.proposed) == by_search(text, PromptLookup(1, 2), 4)[: len(second.proposed)]


def test_rounds_on_the_device_are_not_used() -> None:
    """They know no such proposals; the draft of the bundle is left alone."""
    pair, rounds = on_device(make_pair(num_tokens=3, vocab_size=4, capacity=96))
    prompt = [1, 2, 1, 2, 1]
    assert tokens_of(decode(pair, prompt, 30)) == continue_greedily(prompt, 30, by_hash(3))
    assert not rounds.ran
    assert not pair.draft.calls


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 16), PARAMS, LOOKUPS
)  # fmt: skip
def test_sampled_text_is_that_of_plain_decoding(
    prompt: list[int], count: int, params: Any, lookup: PromptLookup
) -> None:
    """The rule of certain proposals: a token is accepted as often as the target draws it."""
    pair = make_pair(vocab_size=9, num_tokens=NUM_TOKENS, logits=LOGITS, plan=None, capacity=64)
    rounds = decode(pair, prompt, count, sampling=params, lookup=lookup)
    assert tokens_of(rounds) == by_definition(prompt, count, params, set())


@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 2), min_size=1, max_size=20),
            st.integers(0, 20),
            st.one_of(st.none(), LOOKUPS),
        ),
        max_size=6,
    ),
)
def test_batches_with_drafts_and_lookups_side_by_side(slots: int, wanted: list[Any]) -> None:
    generator, _ = make_batch(slots, num_tokens=3, vocab_size=4)
    requests = [
        generator.request(token_ids=prompt, max_new_tokens=count, prompt_lookup=lookup)
        for prompt, count, lookup in wanted
    ]
    found = generator.generate_batch(requests)
    for answer, (prompt, count, _) in zip(found, wanted, strict=True):
        assert answer.token_ids == continue_greedily(prompt, count, by_hash(3))


def model(lookup: LookupInfo | None) -> ModelInfo:
    return ModelInfo(8, 8, frozenset(), 64, 63, 8, lookup=lookup)


def test_requests_to_a_bundle_without_a_draft() -> None:
    compiled = LookupInfo(4, PromptLookup(2, 3))
    info = model(compiled)
    assert check_lookup(None, info) == PromptLookup(2, 3)
    assert check_lookup(PromptLookup(1, 1), info) == PromptLookup(1, 1)
    assert check_num_speculative_tokens(None, True, info) == 4
    assert check_num_speculative_tokens(2, True, info) == 2
    assert check_num_speculative_tokens(None, False, info) == 0
    with pytest.raises(RequestError, match="from 1 to 4"):
        check_num_speculative_tokens(5, True, info)


def test_a_bundle_that_verifies_nothing_cannot_look_up() -> None:
    with pytest.raises(RequestError, match="no room for proposals") as error:
        check_lookup(PromptLookup(1, 2), model(None))
    assert "--spec-method ngram" in str(error.value)
    with pytest.raises(RequestError, match="must be PromptLookup"):
        check_lookup(3, model(LookupInfo(4, PromptLookup(2, 3))))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "found"),
    [((None, None), (5, 5)), ((2, None), (2, 2)), ((None, 4), (4, 4)), ((2, 4), (2, 4))],
)
def test_one_number_stands_for_both(given: Any, found: Any) -> None:
    assert PromptLookup.of(*given) == PromptLookup(*found)


@pytest.mark.parametrize("numbers", [(0, 1), (3, 2), (1, True), (1.0, 2), (-1, 4)])
def test_bad_numbers(numbers: Any) -> None:
    with pytest.raises(UsageError, match="prompt_lookup_m"):
        PromptLookup(*numbers)


def test_warnings_name_causes_of_lookups() -> None:
    prompt = [1, 2] * 8
    pair = make_pair(choose=lambda state, position: 3, plan=None, capacity=4096)
    rounds = decode(pair, prompt, 1400, wanted=4)
    monitor = AcceptanceMonitor(LOOKUP_CAUSES)
    findings = [found for made in rounds if (found := monitor.observe(made))]
    assert len(findings) == 1
    assert "repeats itself over and over" in findings[0]
    assert "draft" not in findings[0]
