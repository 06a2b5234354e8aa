"""What a draft is told besides the features of committed tokens, by its speculation method.

All drafts that read states of their target are driven alike: the features of committed positions go
in, each once and in order; rows behind them are garbage that the next call overwrites. So there is
nothing to roll back. They differ in the tokens they want to know.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from edgecc.backends.base import IntArray, Role


class Proposer(ABC):
    """How a kind of draft is called.

    Class attributes:
        role: The input that takes the tokens.
        fewest_rows: Features of a call whose outputs have the bits that they have with any larger
            number: see `docs/adr/0004-same-bits.md`.
    """

    role: ClassVar[Role]
    fewest_rows: ClassVar[int]

    @abstractmethod
    def tokens(self, following: Sequence[int]) -> IntArray:
        """The value of that input.

        Args:
            following: For each row of features the committed token after it.
        """

    @abstractmethod
    def earlier(self, following: Sequence[int]) -> Mapping[Role, IntArray]:
        """What that input gets in front where earlier features are given once more.

        Args:
            following: For each of them the token after it.
        """


class BlockProposer(Proposer):
    """Drafts that fill a block after the newest committed token: DSpark, DFlash."""

    role = Role.ANCHOR
    fewest_rows = 1  # rows of the block come on top

    def tokens(self, following: Sequence[int]) -> IntArray:
        """The last token, i64 `[1]`."""
        return np.array(following[-1:], dtype=np.int64)

    def earlier(self, following: Sequence[int]) -> Mapping[Role, IntArray]:
        """Nothing: there is one newest token."""
        return {}


class ChainProposer(Proposer):
    """Drafts that pair the state at a position with the token after it: EAGLE3, MTP."""

    role = Role.NEXT_TOKEN_IDS
    fewest_rows = 2

    def tokens(self, following: Sequence[int]) -> IntArray:
        """All of them, i64 `[1, c]`."""
        return np.array([following], dtype=np.int64)

    def earlier(self, following: Sequence[int]) -> Mapping[Role, IntArray]:
        """All of them, i64 `[1, k]`."""
        return {self.role: self.tokens(following)}


PROPOSERS: Mapping[str, Proposer] = {
    "dspark": BlockProposer(),
    "dflash": BlockProposer(),
    "eagle3": ChainProposer(),
    "mtp": ChainProposer(),
}
"""By method: every kind of draft the runtime drives."""


def proposer_of(artifact: Mapping[str, Any]) -> Proposer:
    """How the draft of an artifact is called, by the inputs it has."""
    entry = artifact["entries"].get("draft", {"inputs": ()})
    roles = {port["role"] for port in entry["inputs"]}
    return next((p for p in PROPOSERS.values() if p.role in roles), PROPOSERS["dspark"])
