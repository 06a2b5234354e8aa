"""Speculative output equals plain output, token for token."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.goldens import SHIPPED

PROMPTS = ("p0", "p1", "p2", "p3")
BLOCK = 7


def both(generator, ids, max_new_tokens, steps, **more):
    plain = generator.generate(
        token_ids=ids, max_new_tokens=max_new_tokens, speculation=False, **more
    )
    fast = generator.generate(
        token_ids=ids, max_new_tokens=max_new_tokens, num_speculative_tokens=steps, **more
    )
    return plain, fast


@pytest.mark.parametrize("steps", range(1, BLOCK + 1))
@pytest.mark.parametrize("prompt", PROMPTS)
def test_goldens_for_every_number_of_proposals(generator, goldens, prompt, steps):
    result = generator.generate(
        token_ids=goldens[prompt]["ids"], max_new_tokens=64, num_speculative_tokens=steps
    )
    assert result.token_ids == goldens[prompt]["greedy"].tolist()


def random_prompts(more):
    """Prompts of lengths around one token, the block, the prefill chunk, several chunks; more."""
    random = np.random.default_rng(7)
    special = [1, 2, 3, 5, 6, 7, 8, 9, 13, 14, 15, 62, 63, 64, 65, 66, 127, 128, 129, 192]
    lengths = special + random.integers(1, 200, more).tolist()
    return [random.integers(0, 4095, n) for n in lengths]


@pytest.fixture(scope="module")
def plain_answers(pair, generator):
    """Each random prompt with its plain continuation of 16 tokens."""
    answers = []
    for ids in random_prompts(40 if pair is SHIPPED["qwen3"] else 10):
        plain = generator.generate(
            token_ids=ids, max_new_tokens=16, speculation=False, ignore_eos=True
        )
        assert len(plain.token_ids) == 16
        answers.append((ids, plain.token_ids))
    return answers


@pytest.mark.parametrize("steps", range(1, BLOCK + 1))
def test_random_prompts(generator, plain_answers, steps):
    assert len(plain_answers) >= 30
    for ids, expected in plain_answers:
        fast = generator.generate(
            token_ids=ids, max_new_tokens=16, num_speculative_tokens=steps, ignore_eos=True
        )
        assert fast.token_ids == expected, f"prompt of {len(ids)} tokens"


@pytest.mark.parametrize("room", [1, 2, 3, 6, 7, 8, 9, 15])
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_capacity_edge(generator, room, steps):
    capacity = generator.model.max_model_len
    ids = np.random.default_rng(room).integers(0, 4095, capacity - room)
    plain, fast = both(generator, ids, 100, steps, ignore_eos=True)
    assert fast.token_ids == plain.token_ids
    assert len(fast.token_ids) == room
    assert fast.finish_reason == plain.finish_reason == "length"


def test_two_runs_of_one_generator_do_not_touch_each_other(generator, goldens):
    first = generator.generate(token_ids=goldens["p1"]["ids"], max_new_tokens=20)
    generator.generate(token_ids=goldens["p0"]["ids"], max_new_tokens=33)
    again = generator.generate(token_ids=goldens["p1"]["ids"], max_new_tokens=20)
    assert again.token_ids == first.token_ids
    assert again.stats.accepted_by_round == first.stats.accepted_by_round


def test_stop_strings_cut_both_the_same(generator, goldens):
    text = generator.generate(token_ids=goldens["p1"]["ids"], max_new_tokens=64).text
    stop = text[10:14]
    plain, fast = both(generator, goldens["p1"]["ids"], 64, 7, stop=stop)
    assert plain.text == fast.text == text[: text.index(stop)]
    assert fast.finish_reason == "stop"
