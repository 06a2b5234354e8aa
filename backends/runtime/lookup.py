"""Proposals from a sequence's own tokens: what followed the same tokens before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgecc.backends.base import IntArray
from edgecc.prompt_lookup import PromptLookup


class TokenHistory:
    """The tokens of one sequence, to be searched for its last ones.

    The longest repetition counts, of equally long ones the first: most tokens follow that one. vLLM
    chooses alike.

    Args:
        lookup: How many tokens have to repeat.
    """

    def __init__(self, lookup: PromptLookup) -> None:
        self._lookup = lookup
        self._tokens: IntArray = np.empty(1024, dtype=np.int64)
        self._length = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Take what is new.

        Args:
            tokens: All tokens of the sequence: those known so far, and possibly more.
        """
        length = len(tokens)
        if length > len(self._tokens):
            wider = np.empty(max(length, 2 * len(self._tokens)), dtype=np.int64)
            wider[: self._length] = self._tokens[: self._length]
            self._tokens = wider
        self._tokens[self._length : length] = tokens[self._length : length]
        self._length = length

    def propose(self, count: int) -> list[int]:
        """What followed the longest repetition of the last tokens.

        Args:
            count: Most proposals.

        Returns:
            At most so many; none where too few tokens repeat.
        """
        tokens = self._tokens[: self._length]
        # Ends of possible repetitions: at least one token follows each.
        ends: IntArray = np.arange(self._length - 1)
        found = -1
        for back in range(min(self._lookup.max, self._length - 1)):
            ends = ends[ends >= back]
            ends = ends[tokens[ends - back] == tokens[-1 - back]]
            if not ends.size:
                break
            if back + 1 >= self._lookup.min:
                found = int(ends[0])
        proposed: list[int] = [] if found < 0 else tokens[found + 1 :][:count].tolist()
        return proposed
