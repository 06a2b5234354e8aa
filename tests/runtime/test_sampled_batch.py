"""Batches with a sampler for each request: neighbours change neither tokens nor probabilities."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.runtime import Generation
from edgecc.backends.runtime.sampling import SamplingParams, token_logprobs
from edgecc.errors import RequestError

from .test_batch import make
from .test_sampled_decoding import LOGITS, NUM_TOKENS, PARAMS, by_definition, row_after

REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, NUM_TOKENS - 1), min_size=1, max_size=20),
        st.integers(0, 16),
        st.integers(0, 7),
        PARAMS,
    ),
    max_size=6,
)


@given(st.integers(1, 3), REQUESTS, st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_each_answer_is_its_own(slots: int, wanted: list[Any], plan: list[int]) -> None:
    """Greedy, sampled and penalized requests side by side, some with the same seed."""
    generator, _ = make(slots, vocab_size=9, num_tokens=NUM_TOKENS, logits=LOGITS, plan=plan)
    requests = (  # any iterable will do
        generator.request(
            token_ids=prompt,
            max_new_tokens=count,
            speculation=steps > 0,
            num_speculative_tokens=steps or None,
            sampling=params,
        )
        for prompt, count, steps, params in wanted
    )
    found = generator.generate_batch(requests)
    for answer, (prompt, count, _, params) in zip(found, wanted, strict=True):
        assert answer.token_ids == by_definition(prompt, count, params, set())
        assert answer.seed == (None if params.greedy else params.seed)
        check_logprobs(answer, prompt, params)


def check_logprobs(answer: Generation, prompt: list[int], params: SamplingParams) -> None:
    if params.logprobs is None:
        assert answer.logprobs is None
        return
    tokens = answer.token_ids
    assert answer.logprobs == [
        token_logprobs(row_after([*prompt, *tokens[:place]]), token, params.logprobs)
        for place, token in enumerate(tokens)
    ]


def test_options_are_checked_when_a_request_is_made() -> None:
    generator, engine = make(2)
    with pytest.raises(RequestError, match="without a temperature"):
        generator.request(token_ids=[1], top_k=3)
    assert not engine.target.sizes


def test_adaptive_numbers_differ_by_request() -> None:
    """Each request learns from its own rounds."""
    generator, _ = make(2, vocab_size=9, num_tokens=NUM_TOKENS, logits=LOGITS, plan=[7])
    params = SamplingParams(temperature=1.0, seed=2)
    requests = [
        generator.request(
            token_ids=[4, 5], max_new_tokens=30, sampling=params, adaptive_speculation=adaptive
        )
        for adaptive in (True, False)
    ]
    adaptive, fixed = generator.generate_batch(requests)
    assert adaptive.token_ids == fixed.token_ids == by_definition([4, 5], 30, params, set())
    assert adaptive.stats.proposed_by_round[:4] == [7, 7, 4, 1]
    assert set(fixed.stats.proposed_by_round) == {7}
