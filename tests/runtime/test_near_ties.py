"""Texts that part: fine where both tokens are nearly equally good, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgecc.backends.runtime.near_ties import compare_near_tokens

from .fakes import by_hash, continue_greedily, fold, make_pair

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]  # of two chunks
TEXT = continue_greedily(PROMPT, 24, by_hash(37))


def is_tie(place: int) -> bool:
    """Whether the fake target's logits of all tokens from the best one on are equal there."""
    state = 0
    for token in (*PROMPT, *TEXT[:place]):
        state = fold(state, token)
    return state % 3 == 0 and TEXT[place] < 36


def compare(speculative: list[int], tolerance: float):
    pair = make_pair()
    generator = SimpleNamespace(engine=pair.engine, model=pair.model)
    return compare_near_tokens("x", generator, PROMPT, speculative, TEXT, tolerance)


@pytest.mark.parametrize("tie", [True, False])
def test_where_the_first_difference_is(tie):
    """What comes after it follows from it, and is not looked at."""
    places = [place for place in range(len(TEXT)) if is_tie(place) is tie and TEXT[place] < 36]
    assert len(places) > 2
    for place in places:
        other = TEXT[place] + 1
        check = compare([*TEXT[:place], other, *[0] * (len(TEXT) - place - 1)], 0.02)
        assert check.passed is tie
        second = 3 if tie else -2
        assert check.error == (0.0 if tie else 5 / 3)
        assert check.detail == (
            f"token {place} is {other}, expected {TEXT[place]}, whose logits are {second} and 3"
        )


def test_equal_texts():
    check = compare(TEXT, 0.02)
    assert (check.passed, check.error, check.detail) == (True, 0.0, "")


def test_a_text_that_ends_early():
    check = compare(TEXT[:-1], 0.02)
    assert (check.passed, check.detail) == (False, "23 tokens, expected 24")


def test_no_tolerance():
    """A tie is no excuse where equal rows have equal bits."""
    place = next(p for p in range(len(TEXT)) if is_tie(p))
    check = compare([*TEXT[:place], TEXT[place] + 1], 0.0)
    assert not check.passed
    assert "logits" not in check.detail
