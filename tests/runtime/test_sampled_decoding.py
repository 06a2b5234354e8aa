"""Sampled text, plain and speculative: the same for the same seed, and distributed as it should."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.base import Role
from edgecc.backends.runtime import PlainDecoder, Round, SpeculativeDecoder, Stats
from edgecc.backends.runtime.sampling import SamplingParams, token_logprobs
from edgecc.errors import BackendError
from helpers.chi_square import check_counts

from .fakes import Pair, fold, make_pair, on_device, random_logits
from .sampling import reference
from .sampling.enumeration import Prefix, continuations, ended

NUM_TOKENS = 7
LOGITS = random_logits(NUM_TOKENS)
PROMPT = [3, 1]
WARM = SamplingParams(temperature=0.8, top_k=4, seed=0)

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.9]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    logit_bias=st.sampled_from([{}, {2: -math.inf, 4: 1.0}]),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)


def row_after(tokens: Sequence[int]) -> np.ndarray:
    state = 0
    for token in tokens:
        state = fold(state, token)
    return LOGITS(state)


def by_definition(
    prompt: Sequence[int], count: int, params: SamplingParams, stops: set[int]
) -> list[int]:
    """Token by token, without caches, drafts or rounds."""
    answer: list[int] = []
    while len(answer) < count and not (answer and answer[-1] in stops):
        row = row_after([*prompt, *answer]).tolist()
        answer.append(reference.next_token(row, params, prompt, answer))
    return answer


def sampling_pair(**options: object) -> Pair:
    return make_pair(vocab_size=9, num_tokens=NUM_TOKENS, logits=LOGITS, **options)


def decode(
    pair: Pair, prompt: Sequence[int], count: int, params: SamplingParams, wanted: int, stops=()
) -> list[Round]:
    if not wanted:
        decoder = PlainDecoder(pair.session, pair.model)
    else:
        assert pair.model.draft is not None
        decoder = SpeculativeDecoder(pair.session, pair.model, pair.model.draft, wanted)
    return list(decoder.rounds(prompt, count, stops, params))


def text(rounds: list[Round]) -> list[int]:
    return [token for made in rounds for token in made.tokens]


@given(
    st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=20),
    st.integers(1, 30),
    PARAMS,
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.integers(0, 7),
    st.integers(8, 12),
    st.sets(st.integers(0, NUM_TOKENS - 1), max_size=1),
    st.booleans(),
    st.sampled_from([0, 8]),
)
def test_the_text_depends_on_the_seed_alone(
    prompt, count, params, plan, wanted, chunk, stops, junk, log_rows
):
    """Whatever is proposed, in chunks of any size, and whatever is rolled back how.

    Penalties count the accepted proposals of the same round: the definition counts all tokens.
    """
    pair = sampling_pair(plan=plan, prefill_chunk=chunk, junk=junk, log_rows=log_rows)
    rounds = decode(pair, prompt, count, params, wanted, stops)
    assert text(rounds) == by_definition(prompt, count, params, stops)
    for made in rounds:
        assert len(made.logprobs) == (0 if params.logprobs is None else len(made.tokens))


@given(PARAMS, st.integers(0, 7))
def test_log_probabilities_of_each_token(params, wanted):
    prompt = [1, 2, 3]
    rounds = decode(sampling_pair(plan=[2, 7]), prompt, 12, params, wanted)
    found = [item for made in rounds for item in made.logprobs]
    tokens = text(rounds)
    expected = [
        token_logprobs(row_after([*prompt, *tokens[:place]]), token, params.logprobs or 0)
        for place, token in enumerate(tokens)
        if params.logprobs is not None
    ]
    assert found == expected


def sample(texts: int, length: int, wanted: int, stops: tuple[int, ...] = ()) -> Counter[Prefix]:
    """Texts of as many seeds, of `PROMPT` at a temperature and among the best tokens."""
    pair = sampling_pair(plan=[7, 1, 0])
    seeds = (replace(WARM, seed=seed) for seed in range(texts))
    return Counter(
        tuple(text(decode(pair, PROMPT, length, seeded, wanted, stops))) for seeded in seeds
    )


def share_of(prefix: Prefix) -> np.ndarray:
    """Probabilities of the next token, by definition."""
    row = row_after([*PROMPT, *prefix]).tolist()
    return reference.probabilities(row, WARM)


@pytest.mark.parametrize("wanted", [0, 3])
def test_texts_have_the_targets_distribution(wanted):
    """Chi-square of the first three tokens over 800 seeds, with the rare texts together."""
    check_counts(sample(800, 3, wanted), continuations(share_of, (), 3))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [0, 3], ids=["plain", "speculative"])
def test_many_texts_with_stops_and_a_limit(wanted):
    """100,000 tokens of the decoder, where rounds end at a stop token or at the length."""
    counts = sample(35_000, 4, wanted, stops=(2,))
    assert sum(map(len, counts.elements())) > 100_000
    assert len({len(answer) for answer in counts}) == 4
    check_counts(counts, ended(continuations(share_of, (), 4), stop=2))


def test_proposals_are_accepted_as_often_as_the_target_chooses_them():
    """The probability of a proposal is that of its acceptance: no lossless rule has more."""
    params = SamplingParams(temperature=1.0, seed=0)
    pair = sampling_pair(plan=[7])
    accepted = expected = 0.0
    for seed in range(500):
        seeded = SamplingParams(temperature=1.0, seed=seed)
        first, second = decode(pair, [3, 1], 2, seeded, 1)[:2]
        row = row_after([3, 1, *first.tokens]).tolist()
        expected += reference.probabilities(row, params)[second.proposed[0]]
        accepted += second.accepted
    assert abs(accepted - expected) < 4 * math.sqrt(500 / 4)
    assert accepted > 50


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(logit_bias={2: -math.inf}),
        SamplingParams(logprobs=2),
    ],
)
@pytest.mark.parametrize("log_rows", [0, 8])
def test_rounds_on_the_device_are_for_greedy_choice(params, log_rows):
    """A device that chooses is asked for logits instead, and the draft goes on in step."""
    prompt = [*range(7), 2, 3]
    pair = sampling_pair(plan=[3, 7, 0], capacity=71, max_model_len=64, log_rows=log_rows)
    device, rounds = on_device(pair)
    found = decode(device, prompt, 20, params, 5)
    assert rounds.ran == []
    assert text(found) == by_definition(prompt, 20, params, set())
    assert any(made.accepted for made in found)
    again = decode(device, prompt, 20, SamplingParams(seed=3), 5)
    assert len(rounds.ran) == len(again) - 1
    assert text(again) == by_definition(prompt, 20, SamplingParams(), set())
    assert text(decode(device, prompt, 20, params, 5)) == text(found)


def test_a_target_alone_on_a_device():
    params = SamplingParams(temperature=1.0, seed=5)
    device, rounds = on_device(sampling_pair(plan=None))
    assert text(decode(device, [1], 9, params, 0)) == by_definition([1], 9, params, set())
    assert rounds.ran == []


def test_logits_that_are_not_numbers():
    pair = sampling_pair(plan=[3])
    whole = pair.target.run

    def broken(inputs, outputs):
        results = whole(inputs, outputs)
        if pair.session.start > 4 and Role.LOGITS in results:
            results[Role.LOGITS][..., 2] = np.nan
        return results

    pair.target.run = broken  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="not a number"):
        decode(pair, [1, 2, 3], 12, SamplingParams(temperature=1.0, seed=1), 3)


def test_adaptive_numbers_of_proposals_leave_the_text_as_it_is():
    params = SamplingParams(temperature=0.7, seed=11)
    pair = sampling_pair(plan=[1, 0, 2, 7], capacity=128)
    draft = pair.model.draft
    assert draft is not None
    decoder = SpeculativeDecoder(pair.session, pair.model, draft, 6, adaptive=True)
    stats = Stats()
    tokens = []
    for made in decoder.rounds([1, 2], 100, (), params):
        stats.add(made)
        tokens += made.tokens
    assert tokens == by_definition([1, 2], 100, params, set())
    assert stats.proposed_by_round[:4] == [6, 6, 3, 1]
    assert max(stats.proposed_by_round) <= 6
    assert min(stats.proposed_by_round) >= 1
