"""The number of proposals follows acceptance and times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.runtime.adaptive import AdaptiveLength


def run(
    length: AdaptiveLength, rounds: int, shares: list[float], fixed: float, each: float
) -> list[int]:
    """Rounds of a pair that accepts slot i with `shares[i]`, at `fixed + n * each` seconds."""
    rng = np.random.default_rng(7)
    chosen = []
    for _ in range(rounds):
        count = length.next()
        chosen.append(count)
        misses = [slot for slot in range(count) if rng.random() >= shares[slot]]
        length.observe(count, misses[0] if misses else count, fixed + each * count)
    return chosen


def best(shares: list[float], fixed: float, each: float) -> int:
    survival = np.cumprod(shares)
    numbers = np.arange(1, len(shares) + 1)
    return int(np.argmax((1 + np.cumsum(survival)) / (fixed + each * numbers))) + 1


@pytest.mark.parametrize(
    ("shares", "each"),
    [
        ([0.9, 0.9, 0.85, 0.8, 0.8, 0.7, 0.7], 0.02),
        ([0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2], 0.15),
        ([0.2] * 7, 0.3),
        ([0.8, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9], 0.2),
    ],
)
def test_it_settles_near_the_best(shares, each):
    chosen = run(AdaptiveLength(7), 400, shares, 1.0, each)[100:]
    survival = np.cumprod(shares)

    def speed(count: int) -> float:
        return float((1 + survival[:count].sum()) / (1 + each * count))

    mean = np.mean([speed(count) for count in chosen])
    assert mean > 0.93 * speed(best(shares, 1.0, each))


def test_rows_that_cost_nothing_are_all_used():
    assert set(run(AdaptiveLength(5), 60, [0.3] * 5, 1.0, 0.0)[10:]) == {5}


def test_a_draft_that_errs_is_asked_for_one():
    assert 1 in run(AdaptiveLength(5), 80, [0.0] * 5, 1.0, 0.5)[10:]
    chosen = run(AdaptiveLength(5), 200, [0.0] * 5, 1.0, 0.5)[10:]
    assert np.mean(np.array(chosen) == 1) > 0.8


def test_it_follows_a_change():
    """A text that becomes predictable gets long blocks again: slots not tried are forgotten."""
    length = AdaptiveLength(6)
    poor = run(length, 150, [0.1] * 6, 1.0, 0.2)[50:]
    good = run(length, 150, [0.97] * 6, 1.0, 0.2)[100:]
    assert np.mean(poor) < 2.5
    assert np.mean(good) > 5


def test_a_disturbed_measurement_is_forgotten():
    length = AdaptiveLength(4)
    for count, seconds in ((4, 9.0), (4, 1.4), (2, 1.2), (1, 1.1)):
        assert length.next() == count
        length.observe(count, count, seconds)
    assert length.next() == 4


def test_rounds_without_proposals_teach_nothing():
    length = AdaptiveLength(4)
    length.observe(0, 0, 5.0)
    assert length.next() == 4
    assert AdaptiveLength(1).next() == 1


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.floats(0, 1e3)), max_size=40),
)
def test_any_history(most, history):
    length = AdaptiveLength(most)
    for proposed, accepted, seconds in history:
        assert 1 <= length.next() <= most
        proposed = min(proposed, most)
        length.observe(proposed, min(accepted, proposed), seconds)
    assert 1 <= length.next() <= most
