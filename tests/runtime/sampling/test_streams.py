"""Random numbers by place: Philox as published, one number for one place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.runtime.sampling import Purpose, RandomStream

SEEDS = st.integers(-(2**63), 2**64 - 1)


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 from the paper."""
    mask = 2**64 - 1
    for _ in range(10):
        high0, low0 = divmod(counter[0] * 0xD2E7470EE14C6C93, 2**64)
        high1, low1 = divmod(counter[2] * 0xCA5A826395121157, 2**64)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


def test_the_known_answer():
    """Of the test vectors that come with Random123."""
    assert philox([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@given(SEEDS, st.integers(0, 2**63), st.sampled_from(Purpose), st.integers(0, 1000))
def test_numbers_follow_from_the_place(seed, position, purpose, index):
    word = philox([1, position, purpose, index], [seed % 2**64, 0])[0]
    expected = (word >> 11) / 2**53
    assert RandomStream(seed).uniform(position, purpose, index) == expected
    assert 0 <= expected < 1


@pytest.mark.parametrize("seed", [0, -1, 2**63, -(2**63), 2**64 - 1])
def test_seeds_of_64_bits(seed):
    assert RandomStream(seed).uniform(5, Purpose.TOKEN) == RandomStream(seed % 2**64).uniform(
        5, Purpose.TOKEN
    )


def test_places_differ():
    stream = RandomStream(7)
    places = [(p, k, i) for p in range(40) for k in Purpose for i in range(4)]
    numbers = [stream.uniform(*place) for place in places]
    assert len(set(numbers)) == len(numbers)
    assert numbers != [RandomStream(8).uniform(*place) for place in places]


def test_numbers_are_uniform():
    """Of neighbouring seeds and positions: 64 classes, and no class knows the next."""
    numbers = np.array(
        [RandomStream(s).uniform(p, Purpose.TOKEN) for s in range(80) for p in range(80)]
    )
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    expected = len(numbers) / 64
    assert ((counts - expected) ** 2 / expected).sum() < 103.4  # chi-square, 63 degrees, 0.1 %
    pairs = np.bincount((numbers[:-1] * 8).astype(int) * 8 + (numbers[1:] * 8).astype(int))
    assert ((pairs - expected) ** 2 / expected).sum() < 103.4
