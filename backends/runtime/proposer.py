"""How a draft is called, by its speculation method.

All drafts that read states of their target are driven alike: the features of committed positions go
in, each once and in order; rows behind them are garbage that the next call overwrites. So there is
nothing to roll back. They differ in the tokens they want to know.

A draft that is a language model of its own reads tokens alone, and makes one proposal a call. Its
caches are those of a target: rows of its own proposals are right if these are accepted, and have to
be taken back if not.
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
        reads_states: It reads states of the target, and answers with all proposals of a round.
            Others read all committed tokens, answer with one, and have to be rolled back.
        fewest_rows: Features of a call whose outputs have the bits that they have with any larger
            number: see `docs/adr/0004-same-bits.md`.
    """

    role: ClassVar[Role]
    reads_states: ClassVar[bool] = True
    fewest_rows: ClassVar[int]

    @property
    def roles(self) -> frozenset[Role]:
        """Inputs and outputs a draft of this kind has, besides its caches."""
        given = Role.FEATURES if self.reads_states else Role.LOGIT_ROWS
        return frozenset({given, self.role, Role.CACHE_LENGTH, Role.PROPOSALS})

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


class TokenProposer(Proposer):
    """Drafts that are language models of their own."""

    role = Role.TOKEN_IDS
    reads_states = False
    fewest_rows = 1

    def tokens(self, following: Sequence[int]) -> IntArray:
        """The next tokens, i64 `[1, c]`."""
        return np.array([following], dtype=np.int64)

    def earlier(self, following: Sequence[int]) -> Mapping[Role, IntArray]:
        """Nothing: its calls are padded at the end, as those of a target."""
        return {}


PROPOSERS: Mapping[str, Proposer] = {
    "dspark": BlockProposer(),
    "dflash": BlockProposer(),
    "eagle3": ChainProposer(),
    "mtp": ChainProposer(),
    "draft_model": TokenProposer(),
}
"""By method: every kind of draft the runtime drives."""


def proposer_of(artifact: Mapping[str, Any]) -> Proposer:
    """How the draft of an artifact is called, by the inputs it has."""
    entry = artifact["entries"].get("draft", {"inputs": ()})
    roles = {port["role"] for port in entry["inputs"]}
    return next((p for p in PROPOSERS.values() if p.role in roles), PROPOSERS["dspark"])
