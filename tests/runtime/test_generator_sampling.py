"""Sampling options of requests, over a fake pair and the small pair's real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgecc.backends.runtime import Generator, SamplingParams, Tokenizer
from edgecc.backends.runtime.sampling import token_logprobs
from edgecc.errors import RequestError

from .fakes import Pair, fold, make_pair, random_logits

TOKENIZER = Tokenizer.from_directory(
    Path(__file__).parents[1] / "data" / "pairs" / "tiny-qwen3-nvfp4"
)
LOGITS = random_logits(4095, 4.0)
PROMPT = [472, 2241, 65]


def make(**options: Any) -> tuple[Generator, Pair]:
    defaults = {"capacity": 256, "prefill_chunk": 16, "vocab_size": 4096, "num_tokens": 4095}
    pair = make_pair(logits=LOGITS, **(defaults | options))
    engine: Any = pair.engine
    return Generator(engine, pair.model, TOKENIZER, generation_config={"temperature": 0.5}), pair


def test_options_and_parameters_are_the_same():
    generator, _ = make(plan=[2, 7, 0])
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 50, "seed": 3}
    found = generator.generate(token_ids=PROMPT, max_new_tokens=30, **options)
    params = SamplingParams(**options)
    arguments: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 30}
    assert generator.generate(**arguments, sampling=params).token_ids == found.token_ids
    replaced = generator.generate(**arguments, sampling=SamplingParams(top_k=9), **options)
    assert replaced.token_ids == found.token_ids
    chunks = list(generator.stream(**arguments, **options))
    assert [t for chunk in chunks for t in chunk.token_ids] == found.token_ids
    assert {chunk.seed for chunk in chunks} == {3}
    assert {chunk.logprobs for chunk in chunks if chunk.logprobs} == set()
    assert found.text == generator.generate(**arguments, speculation=False, **options).text


def test_greedy_is_the_default():
    generator, _ = make()
    found = generator.generate(token_ids=PROMPT, max_new_tokens=8)
    zero = generator.generate(token_ids=PROMPT, max_new_tokens=8, temperature=0)
    assert found.token_ids == zero.token_ids
    assert found.seed is None
    assert found.logprobs is None


def test_a_drawn_seed_is_told():
    generator, _ = make()
    arguments: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 12, "temperature": 1.5}
    first, second = generator.generate(**arguments), generator.generate(**arguments)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    assert generator.generate(**arguments, seed=first.seed).token_ids == first.token_ids


def test_log_probabilities_end_where_the_text_does():
    """A stop string cuts a round: what belongs to its other tokens is cut as well."""
    generator, _ = make(plan=[7])
    free = generator.generate(token_ids=PROMPT, max_new_tokens=40, logprobs=2)
    middle = TOKENIZER.decode(free.token_ids[4:6])
    assert middle.strip()
    for speculation in (True, False):
        found = generator.generate(
            token_ids=PROMPT, max_new_tokens=40, logprobs=2, stop=middle, speculation=speculation
        )
        assert len(found.token_ids) < 40
        assert found.logprobs == free.logprobs[: len(found.token_ids)]
    state, expected = 0, []
    for token in PROMPT:
        state = fold(state, token)
    for token in free.token_ids:
        expected.append(token_logprobs(LOGITS(state), token, 2))
        state = fold(state, token)
    assert free.logprobs == expected


def test_no_tokens_have_no_log_probabilities():
    generator, _ = make()
    found = generator.generate(token_ids=PROMPT, max_new_tokens=0, logprobs=2, temperature=1.0)
    assert found.logprobs == []
    assert found.seed is not None


def test_what_the_checkpoint_recommends():
    generator, _ = make()
    assert generator.recommended_sampling == SamplingParams(temperature=0.5)
    params = generator.recommended_sampling
    arguments: dict[str, Any] = {"token_ids": PROMPT, "max_new_tokens": 12, "seed": 7}
    found = generator.generate(**arguments, sampling=params)
    assert found.token_ids == generator.generate(**arguments, temperature=0.5).token_ids


@pytest.mark.parametrize(
    ("options", "identifier"),
    [
        ({"temperature": -1}, "request/bad-temperature"),
        ({"logit_bias": {4095: 1.0}}, "request/token-out-of-range"),
        ({"top_p": 0.5}, "request/no-temperature"),
        ({"logprobs": 4096}, "request/bad-logprobs"),
        ({"n": 2}, "request/unknown-option"),
        ({"sampling": {}}, "request/bad-sampling"),
    ],
)
def test_requests_that_cannot_be_run(options: dict[str, Any], identifier: str):
    generator, pair = make()
    with pytest.raises(RequestError) as caught:
        generator.stream(token_ids=PROMPT, **options)
    assert caught.value.diagnostics[0].id == identifier
    assert not pair.target.calls
