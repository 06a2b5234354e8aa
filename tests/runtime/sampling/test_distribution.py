"""What temperature, top-k, top-p and min-p leave, against transformers and a plain definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from edgecc.backends.runtime.sampling import (
    Distribution,
    SamplingParams,
    best_token,
    sampled_distribution,
)
from edgecc.backends.runtime.sampling.distribution import largest
from edgecc.errors import BackendError

from .reference import probabilities

LOGITS = st.floats(-30, 30, width=32)
TEMPERATURES = st.floats(0.05, 5)


def rows(logits: st.SearchStrategy[float], *, unique: bool = False):
    lists = st.lists(logits, min_size=1, max_size=24, unique=unique)
    return lists.map(lambda values: np.array(values, dtype=np.float32))


def by_transformers(row: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Probabilities after the warpers of transformers, in its order."""
    scores = torch.tensor(row, dtype=torch.float64)[None]
    ids = torch.zeros((1, 1), dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return torch.softmax(scores, dim=-1)[0].numpy()


def is_close_call(row: np.ndarray, params: SamplingParams) -> bool:
    """Whether rounding decides what top-p or min-p keeps."""
    after = probabilities(
        row.tolist(), SamplingParams(temperature=params.temperature, top_k=params.top_k)
    )
    sums = np.cumsum(np.sort(after)[::-1])[:-1]
    shares = np.delete(after, after.argmax()) / after.max()
    p_close = params.top_p < 1 and (abs(sums - params.top_p) < 1e-7).any()
    return bool(p_close or (params.min_p > 0 and (abs(shares - params.min_p) < 1e-7).any()))


@given(
    rows(LOGITS, unique=True),
    TEMPERATURES,
    st.integers(0, 30),
    st.one_of(st.just(1.0), st.floats(0, 1)),
    st.one_of(st.just(0.0), st.floats(0, 1)),
)
def test_against_transformers(row, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(not is_close_call(row, params))
    found = sampled_distribution(row, params).dense(len(row))
    expected = by_transformers(row, params)
    assert np.array_equal(found > 1e-30, expected > 1e-30)
    assert np.abs(found - expected).sum() / 2 < 1e-6


@given(
    rows(st.sampled_from([-2.0, 0.0, 0.5, 1.0])),
    TEMPERATURES,
    st.integers(-1, 30),
    st.one_of(st.just(1.0), st.floats(0, 1)),
    st.one_of(st.just(0.0), st.floats(0, 1)),
)
def test_equal_logits_are_taken_in_the_order_of_ids(row, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(not is_close_call(row, params))
    found = sampled_distribution(row, params).dense(len(row))
    assert np.abs(found - probabilities(row.tolist(), params)).sum() / 2 < 1e-6


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 30.0])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 0.9},
        {"top_p": 0.999999},
        {"top_k": 50, "top_p": 0.5},
        {"min_p": 0.02},
        {"top_k": 3000, "top_p": 0.99, "min_p": 1e-4},
    ],
)
def test_large_vocabulary(spread, options):
    """What is computed in 32 bits, or not at all, is less than a millionth of the whole."""
    row = np.random.default_rng(3).normal(0, 1, 60_000).astype(np.float32) * np.float32(spread)
    params = SamplingParams(temperature=0.8, **options)
    scaled = (row.astype(np.float64) - float(row.max())) / 0.8
    expected = np.exp(scaled)
    order = np.argsort(-row, kind="stable")[: params.top_k or None]
    kept = np.zeros(len(row), dtype=bool)
    sums = np.cumsum(expected[order])
    kept[order[: np.searchsorted(sums, params.top_p * sums[-1]) + 1]] = True
    kept &= expected >= params.min_p
    expected = np.where(kept, expected, 0) / expected[kept].sum()
    found = sampled_distribution(row, params).dense(len(row))
    assert np.abs(found - expected).sum() / 2 < 2e-7


@given(rows(LOGITS), st.sampled_from([{"top_k": 1}, {"top_p": 0.0}]))
def test_one_token_is_the_greedy_one(row, options):
    found = sampled_distribution(row, SamplingParams(temperature=1.0, **options))
    assert found.ids.tolist() == [best_token(row, len(row))]


@given(rows(LOGITS), TEMPERATURES)
def test_neutral_settings_keep_all(row, temperature):
    plain = sampled_distribution(row, SamplingParams(temperature=temperature))
    neutral = SamplingParams(temperature=temperature, top_k=len(row), top_p=1.0, min_p=0.0)
    assert np.array_equal(sampled_distribution(row, neutral).weights, plain.weights)
    assert len(plain.ids) == len(row)


def test_the_largest_vocabulary_at_a_tiny_temperature():
    row = np.full(248_320, -3.4e38, dtype=np.float32)
    row[[7, 9]] = 3.4e38, 3.3e38
    found = sampled_distribution(row, SamplingParams(temperature=1e-5, top_p=0.5))
    assert found.ids.tolist() == [7]
    found = sampled_distribution(row, SamplingParams(temperature=1e-5))
    assert found.dense(len(row))[7] == 1.0


def test_a_huge_temperature_is_uniform():
    found = sampled_distribution(
        np.array([-30, 0, 30], dtype=np.float32), SamplingParams(temperature=1e300)
    )
    assert found.dense(3).tolist() == [1 / 3] * 3


@pytest.mark.parametrize(
    "options",
    [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.99, "min_p": 0.1}],
)
def test_all_but_one_impossible(options):
    row = np.full(6, -np.inf, dtype=np.float32)
    row[4] = -3
    found = sampled_distribution(row, SamplingParams(temperature=2.0, **options))
    assert found.dense(6).tolist() == [0, 0, 0, 0, 1, 0]
    assert {found.token(u) for u in (0.0, 0.5, 1 - 2**-53)} == {4}


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_infinite_rows_have_no_probabilities(value):
    with pytest.raises(BackendError, match="largest logit is"):
        sampled_distribution(np.full(3, value, dtype=np.float32), SamplingParams(temperature=1.0))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 25))
def test_largest(values, count):
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    assert largest(np.array(values, dtype=float), count).tolist() == sorted(order[:count])


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=1, max_size=8), st.floats(0, 1))
def test_tokens_take_up_intervals(weights, uniform):
    """A token is drawn if the sum before it is at most the place, and the sum with it above."""
    assume(any(weights))
    uniform = min(uniform, 1 - 2**-53)
    token = Distribution(np.arange(len(weights)), np.array(weights)).token(uniform)
    place, before = uniform * sum(weights), sum(weights[:token])
    assert weights[token] > 0
    assert before <= place
    assert place < before + weights[token] or sum(weights[token + 1 :]) == 0


@given(st.integers(0, 1000), st.floats(0, 1, exclude_max=True), st.integers(0, 3))
def test_tokens_of_a_large_vocabulary(seed, uniform, quiet):
    """Sums are taken in parts, some of which may weigh nothing: the intervals are the same."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 3, 50_000) * 0.25  # exact sums
    weights[quiet * 16_384 : (quiet + 1) * 16_384] = 0
    sums = np.cumsum(weights)
    expected = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    assert Distribution(np.arange(50_000), weights).token(uniform) == expected


def test_the_end_of_the_last_interval():
    weights = np.zeros(40_000)
    weights[[3, 20_000, 20_001]] = 0.1, 0.2, 0.4
    found = Distribution(np.arange(40_000), weights)
    assert found.token(1 - 2**-53) == 20_001
    assert found.token(0.0) == 3


def test_probabilities_of_some_tokens():
    found = Distribution(np.array([2, 5, 6]), np.array([1.0, 2.0, 1.0]))
    assert found.probabilities(np.array([0, 2, 3, 5, 6, 7])).tolist() == [0, 0.25, 0, 0.5, 0.25, 0]
    assert found.probability(5) == 0.5
    assert Distribution.certain(3).dense(5).tolist() == [0, 0, 0, 1, 0]
    assert Distribution.of(np.array([0.0, 0.5, 0.0, 0.5])).ids.tolist() == [1, 3]
