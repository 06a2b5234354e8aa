"""Sampled text of the shipped pairs on the CPU."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from edgecc.backends.runtime import SamplingParams
from helpers.chi_square import chi_square_limit

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.3},
]


@pytest.mark.parametrize("options", SETTINGS)
def test_the_same_seed_gives_the_same_text(generator, goldens, options):
    """Plain, with any number of proposals, and with a number that changes on its own."""
    arguments = {"token_ids": goldens["p1"]["ids"], "max_new_tokens": 24, "ignore_eos": True}
    accepted, texts = 0, set()
    for seed in (0, 2**64 - 1):
        params = SamplingParams(**options, seed=seed)
        plain = generator.generate(speculation=False, sampling=params, **arguments)
        assert plain.seed == seed
        for steps in (1, 7):
            found = generator.generate(num_speculative_tokens=steps, sampling=params, **arguments)
            assert found.token_ids == plain.token_ids
            accepted += found.stats.accepted
        found = generator.generate(adaptive_speculation=True, sampling=params, **arguments)
        assert found.token_ids == plain.token_ids
        texts.add(tuple(plain.token_ids))
    assert accepted > 0
    assert len(texts) == 2


def test_tokens_have_the_probabilities_of_the_reference(generator, goldens):
    """Chi-square of the first token over 250 seeds against the logits of transformers."""
    ids, seeds = goldens["p0"]["ids"], 250
    logits = goldens["p0"]["target_logits_last"][0].astype(np.float64)[:4095]
    shares = np.exp(logits - logits.max())
    order = np.argsort(-shares, kind="stable")[:6]
    expected = shares[order] / shares[order].sum() * seeds
    counts = Counter(
        generator.generate(
            token_ids=ids, max_new_tokens=1, temperature=1.0, top_k=6, seed=seed
        ).token_ids[0]
        for seed in range(seeds)
    )
    assert set(counts) <= set(order.tolist())
    found = np.array([counts[token] for token in order.tolist()])
    rare = expected < 5
    if rare.any():
        found = np.append(found[~rare], found[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    statistic = ((found - expected) ** 2 / expected).sum()
    assert statistic < chi_square_limit(max(1, len(expected) - 1))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0, "top_p": 0.9, "seed": 3}])
def test_temperature_zero_is_greedy(generator, goldens, options):
    golden = goldens["p2"]
    found = generator.generate(token_ids=golden["ids"], max_new_tokens=64, **options)
    assert found.token_ids == golden["greedy"].tolist()
    assert found.seed is None
    one = generator.generate(
        token_ids=golden["ids"], max_new_tokens=64, temperature=1.0, top_k=1, seed=4
    )
    assert one.token_ids == golden["greedy"].tolist()


def test_log_probabilities_against_the_reference(generator, goldens):
    golden = goldens["p0"]
    exact = golden["target_logits_last"][0].astype(np.float64)[:4095]
    exact -= np.logaddexp.reduce(exact)
    found = generator.generate(token_ids=golden["ids"], max_new_tokens=8, logprobs=5)
    first, *others = found.logprobs
    assert first.token_id == found.token_ids[0] == int(exact.argmax())
    assert first.logprob == pytest.approx(exact.max(), abs=2e-3)
    assert [p for _, p in first.top] == pytest.approx(np.sort(exact)[::-1][:5], abs=2e-3)
    assert [item.token_id for item in others] == found.token_ids[1:]
    plain = generator.generate(
        token_ids=golden["ids"], max_new_tokens=8, logprobs=5, speculation=False
    )
    assert plain.logprobs == found.logprobs
