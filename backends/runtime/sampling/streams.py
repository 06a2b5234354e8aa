"""Random numbers by place instead of by order.

A number depends on the seed, the position of the token it decides about, and what it is for. So a
text does not depend on how many tokens a round proposes, on its neighbours in a batch, or on how
often a rule of acceptance draws. The generator is Philox4x64-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011), which computes any place of its sequence directly.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

_UNIT = 2.0**-53


class Purpose(IntEnum):
    """What a random number decides. The values are part of what a seed means: never change one."""

    TOKEN = 0
    """A token from the target's distribution."""
    PROPOSAL = 1
    """A token from the draft's distribution."""
    ACCEPT = 2
    """Whether a proposal is accepted."""
    CORRECTION = 3
    """The token in place of a rejected proposal."""


class RandomStream:
    """The random numbers of one sequence.

    Args:
        seed: Any whole number; its 64 lowest bits count.
    """

    def __init__(self, seed: int) -> None:
        self._key = np.array([seed % 2**64, 0], dtype=np.uint64)

    def uniform(self, position: int, purpose: Purpose, index: int = 0) -> float:
        """A number of 53 bits in [0, 1).

        Args:
            position: Of the token in the sequence, prompt included.
            purpose: What the number decides.
            index: Of the slot, where `position` is that of a round: what a round draws for slots
                that it drops must not come again in a later round.
        """
        # The lowest word counts the numbers of one place; `random_raw` steps before it computes.
        counter = np.array([0, position, purpose, index], dtype=np.uint64)
        bits = int(np.random.Philox(counter=counter, key=self._key).random_raw())
        return (bits >> 11) * _UNIT
