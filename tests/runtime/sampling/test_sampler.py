"""Tokens of one sequence: bias and penalties, seeds, log-probabilities, and broken rows."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from edgecc.backends.runtime.sampling import (
    Sampler,
    SamplingParams,
    TokenLogprobs,
    best_token,
    token_logprobs,
)
from edgecc.backends.runtime.sampling.penalties import LogitChanges
from edgecc.errors import BackendError, InternalError
from helpers.chi_square import chi_square_limit

from . import reference

V = 12
IDS = st.integers(0, V - 1)
ROWS = st.lists(st.floats(-20, 20, width=32), min_size=V, max_size=V).map(
    lambda values: np.array(values, dtype=np.float32)
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.83]),
    min_p=st.sampled_from([0.0, 0.07]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.31]),
    logit_bias=st.dictionaries(IDS, st.sampled_from([-3.0, 2.0, -math.inf]), max_size=4),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@given(ROWS, PARAMS, st.lists(IDS, min_size=1, max_size=8), st.lists(IDS, max_size=8))
def test_bias_and_penalties(row, params, prompt, answer):
    changes = LogitChanges(params, [*prompt, V + 3], V)
    for token in answer:
        changes.add(token)
    found = changes.apply(row)
    assert found == pytest.approx(np.array(reference.changed(row, params, prompt, answer)))
    assert found.dtype == np.float64


@given(
    ROWS,
    st.dictionaries(IDS, st.floats(-5, 5), min_size=1, max_size=4),
    st.floats(0.5, 2),
    st.lists(IDS, min_size=1, max_size=8),
    st.lists(IDS, max_size=8),
)
def test_bias_and_repetition_penalty_against_transformers(row, bias, penalty, prompt, answer):
    params = SamplingParams(logit_bias=bias, repetition_penalty=penalty)
    changes = LogitChanges(params, prompt, V)
    for token in answer:
        changes.add(token)
    ids = torch.tensor([[*prompt, *answer]])
    scores = torch.tensor(row, dtype=torch.float64)[None]
    scores = SequenceBiasLogitsProcessor({(t,): b for t, b in bias.items()})(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(penalty)(ids, scores)
    assert changes.apply(row) == pytest.approx(scores[0].numpy(), abs=1e-5)


@given(st.lists(ROWS, min_size=1, max_size=6), PARAMS, st.lists(IDS, min_size=1, max_size=5))
def test_tokens_are_those_of_the_definition(rows, params, prompt):
    sampler = Sampler(params, prompt, V)
    answer: list[int] = []
    for row in rows:
        padded = np.concatenate([row, np.full(4, 99, dtype=np.float32)])
        expected = reference.next_token(row.tolist(), params, prompt, answer)
        answer.append(sampler.choose(padded))
        assert answer[-1] == expected


@given(ROWS, st.integers(0, 2**64 - 1), st.sampled_from([0.0, 1e-6]))
def test_temperature_zero_is_greedy(row, seed, temperature):
    params = SamplingParams(temperature=temperature, seed=seed, top_k=3, top_p=0.4, min_p=0.2)
    assert not params.needs_logits
    assert Sampler(params, [1], V).choose(row) == best_token(row, V)


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 6}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 2.5, "top_k": 10}],
)
def test_samples_have_the_distribution(options):
    """Chi-square over 1500 seeds, and over 1500 positions of one seed."""
    params = SamplingParams(**{"temperature": 0.7, **options})
    row = np.random.default_rng(5).normal(0, 1, V).astype(np.float32)
    expected = reference.probabilities(row.tolist(), params) * 1500
    possible = expected > 0

    def sample(seed: int, position: int) -> int:
        seeded = SamplingParams(**{"temperature": 0.7, **options}, seed=seed)
        return Sampler(seeded, range(position), V).choose(row)

    for places in ([(s, 3) for s in range(1500)], [(8, p) for p in range(1500)]):
        counts = Counter(sample(*place) for place in places)
        observed = np.array([counts[token] for token in range(V)])
        assert not observed[~possible].any()
        differences = (observed - expected)[possible] ** 2 / expected[possible]
        assert differences.sum() < chi_square_limit(int(possible.sum()) - 1)


@given(st.lists(ROWS, min_size=2, max_size=6), st.integers(0, 2**64 - 1))
def test_random_numbers_go_by_position(rows, seed):
    """What was drawn before does not matter, only where."""
    params = SamplingParams(temperature=1.5, seed=seed)
    sampler = Sampler(params, [1, 2], V)
    tokens = [sampler.choose(row) for row in rows]
    later = Sampler(params, range(1 + len(rows)), V)
    assert later.choose(rows[-1]) == tokens[-1]


def test_the_same_seed_for_ever():
    """What a seed means is part of the interface: this test must never need another answer."""
    row = np.linspace(-1, 1, 1000).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1234), [0], 1000)
    assert [sampler.choose(row) for _ in range(6)] == THE_SAME


THE_SAME = [464, 877, 471, 614, 629, 904]


@given(ROWS, st.integers(0, V), IDS)
def test_log_probabilities(row, count, token):
    exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
    found = token_logprobs(row, token, count)
    assert found.token_id == token
    assert found.logprob == pytest.approx(exact[token], abs=1e-6)
    order = sorted(range(V), key=lambda i: (-row[i], i))[:count]
    assert [i for i, _ in found.top] == order
    assert [p for _, p in found.top] == pytest.approx(exact[order], abs=1e-6)


def test_log_probabilities_of_a_large_vocabulary():
    row = np.random.default_rng(2).normal(0, 4, 248_320).astype(np.float32)
    exact = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
    found = token_logprobs(row, 77, 20)
    assert found.logprob == pytest.approx(exact[77], abs=1e-6)
    assert [p for _, p in found.top] == pytest.approx(np.sort(exact)[::-1][:20], abs=1e-6)


def test_log_probabilities_are_the_targets_own():
    """Before bias, penalties and temperature, without padding rows."""
    row = np.array([1, 2, 3, 60], dtype=np.float32)
    params = SamplingParams(temperature=5, logit_bias={2: -100.0}, top_k=1, logprobs=1, seed=1)
    sampler = Sampler(params, [0], 3)
    assert sampler.choose(row) == 1
    (found,) = sampler.take_logprobs()
    total = math.log(sum(math.exp(x) for x in (1, 2, 3)))
    assert found.logprob == pytest.approx(2 - total, abs=1e-6)
    assert found.top == ((2, pytest.approx(3 - total, abs=1e-6)),)
    assert sampler.take_logprobs() == ()


def test_impossible_tokens_in_json():
    found = TokenLogprobs(3, -0.5, ((3, -0.5), (1, -math.inf)))
    assert found.as_dict() == {
        "token_id": 3,
        "logprob": -0.5,
        "top": [{"token_id": 3, "logprob": -0.5}, {"token_id": 1, "logprob": None}],
    }


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.0, seed=1, top_k=2),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(logprobs=2),
    ],
)
def test_rows_that_are_not_numbers(params):
    row = np.array([1, np.nan, 2, 0], dtype=np.float32)
    with pytest.raises(BackendError, match="token 1 is not a number"):
        Sampler(params, [0], 4).choose(row)
    assert Sampler(params, [0], 1).choose(row) == 0  # a padding row may be anything


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0, seed=1), SamplingParams(logprobs=0)]
)
def test_rows_without_probabilities(params):
    with pytest.raises(BackendError, match="the largest logit is inf"):
        Sampler(params, [0], 3).choose(np.array([0, np.inf, 1], dtype=np.float32))


def test_banned_tokens_are_never_chosen():
    row = np.zeros(4, dtype=np.float32)
    bias = {0: -math.inf, 1: -math.inf, 3: -math.inf}
    for seed in range(20):
        params = SamplingParams(temperature=50.0, seed=seed, logit_bias=bias)
        assert Sampler(params, [0], 4).choose(row) == 2
    assert Sampler(SamplingParams(logit_bias=bias), [0], 4).choose(row) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[-np.inf, 3, -np.inf], [1, np.inf, 0]])
def test_only_banned_tokens_are_left(temperature, row):
    params = SamplingParams(temperature=temperature, seed=1, logit_bias={1: -math.inf})
    with pytest.raises(BackendError, match=r"the largest logit is (-inf|nan)"):
        Sampler(params, [0], 3).choose(np.array(row, dtype=np.float32))


def test_a_seed_is_needed():
    with pytest.raises(InternalError, match="seed"):
        Sampler(SamplingParams(temperature=1.0), [0], 4)
