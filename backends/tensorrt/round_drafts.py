"""The draft's part of a greedy round on the GPU: which calls it makes, and what goes in and out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeAlias

from edgecc.backends.base import Role
from edgecc.backends.tensorrt.cuda import Stream
from edgecc.backends.tensorrt.executable import MakeContext, TrtExecutable
from edgecc.backends.tensorrt.plan import Context

INTEGER = 8
"""Bytes of a token, a length or a row number."""

Calls: TypeAlias = Sequence[Iterable[Context]]
"""The engines of each call, in order."""


class RoundDraft(ABC):
    """How a kind of draft takes part.

    Class attributes:
        role: The input that takes tokens.

    Args:
        draft: The draft.
        proposals: Of a round.
        row_numbers: Device memory with the numbers of the rows of a verification, from 0.
    """

    role: ClassVar[Role]

    def __init__(self, draft: TrtExecutable, proposals: int, row_numbers: int) -> None:
        self.draft = draft
        self.proposals = proposals
        self.row_numbers = row_numbers
        self.names = {role: port.name for role, port in draft.interface.inputs.items()}

    @property
    def most_told(self) -> int:
        """Most tokens that a round is told."""
        return 1

    @property
    def tells(self) -> bool:
        """Whether it says how sure it is of its proposals."""
        return Role.CONFIDENCE in self.draft.interface.outputs

    def told(self, rows: int) -> int:
        """How many tokens a round is told, by its new rows: the last one is the anchor."""
        return 1

    def lengths(self, rows: int, length: int) -> list[int]:
        """Valid rows of the caches before each call of a round."""
        return [length]

    @abstractmethod
    def calls(self, rows: int, make: MakeContext) -> Calls:
        """Contexts of each call.

        Args:
            rows: New rows of the first one.
            make: Gives contexts.
        """

    def enqueue(
        self, stream: Stream, calls: Calls, rows: int, lengths: int, following: int, proposed: int
    ) -> None:
        """All calls of a round, without waiting for any of them.

        Args:
            stream: Where they go.
            calls: From `calls`.
            rows: As for them.
            lengths: Device memory with what `lengths` says.
            following: Device memory with the tokens that the round is told.
            proposed: Device memory that takes the proposals.
        """
        draft = self.draft
        stream.copy(draft.address(self.role), following, self.told(rows) * INTEGER)
        stream.copy(draft.address(Role.CACHE_LENGTH), lengths, INTEGER)
        for context in calls[0]:
            context.enqueue(stream.handle)
        stream.copy(proposed, draft.address(Role.PROPOSALS), self.proposals * INTEGER)


class BlockDraft(RoundDraft):
    """One call with features and the anchor."""

    role = Role.ANCHOR

    def calls(self, rows: int, make: MakeContext) -> Calls:
        """One."""
        width = int(self.draft.interface.inputs[Role.FEATURES].shape[2])
        shapes: dict[str, tuple[int, ...]] = {
            self.names[Role.FEATURES]: (1, rows, width),
            self.names[self.role]: self._tokens_shape(rows),
            self.names[Role.CACHE_LENGTH]: (1,),
        }
        wanted = [Role.PROPOSALS, *([Role.CONFIDENCE] if self.tells else [])]
        return [self.draft.calls(shapes, wanted, make)]

    def _tokens_shape(self, rows: int) -> tuple[int, ...]:
        return (1,)


class ChainDraft(BlockDraft):
    """One call with features and the token after each of them."""

    role = Role.NEXT_TOKEN_IDS

    @property
    def most_told(self) -> int:
        """One for each row of features."""
        return int(self.draft.values[self.names[self.role]].shape[1])

    def told(self, rows: int) -> int:
        """One for each row of features."""
        return max(rows, 1)

    def _tokens_shape(self, rows: int) -> tuple[int, ...]:
        return (1, rows)


class TokenDraft(RoundDraft):
    """A language model of its own: a call for each proposal, each with the one before."""

    role = Role.TOKEN_IDS

    @property
    def most_told(self) -> int:
        """The anchor, and a last proposal that was accepted but never read."""
        return 2

    def told(self, rows: int) -> int:
        """All new rows."""
        return max(rows, 1)

    def lengths(self, rows: int, length: int) -> list[int]:
        """After the first call each adds one row."""
        return [length, *(length + max(rows, 1) + i for i in range(self.proposals - 1))]

    def calls(self, rows: int, make: MakeContext) -> Calls:
        """One for each proposal; those after the first are the same."""
        first = tuple(self._call(rows, make))
        later = first if rows == 1 else tuple(self._call(1, make))
        return [first, *[later] * (self.proposals - 1)]

    def _call(self, rows: int, make: MakeContext) -> Iterable[Context]:
        shapes: dict[str, tuple[int, ...]] = {
            self.names[self.role]: (1, rows),
            self.names[Role.CACHE_LENGTH]: (1,),
            self.names[Role.LOGIT_ROWS]: (1,),
        }
        return self.draft.calls(shapes, [Role.PROPOSALS], make)

    def enqueue(
        self, stream: Stream, calls: Calls, rows: int, lengths: int, following: int, proposed: int
    ) -> None:
        """See `RoundDraft.enqueue`."""
        draft = self.draft
        tokens, count = following, rows
        for index, call in enumerate(calls):
            stream.copy(draft.address(self.role), tokens, count * INTEGER)
            stream.copy(draft.address(Role.CACHE_LENGTH), lengths + index * INTEGER, INTEGER)
            last = self.row_numbers + (count - 1) * INTEGER
            stream.copy(draft.address(Role.LOGIT_ROWS), last, INTEGER)
            for context in call:
                context.enqueue(stream.handle)
            tokens, count = proposed + index * INTEGER, 1
            stream.copy(tokens, draft.address(Role.PROPOSALS), INTEGER)


def round_draft(draft: TrtExecutable, proposals: int, row_numbers: int) -> RoundDraft:
    """The part of a draft, by the inputs it has; see `RoundDraft`."""
    kinds = (ChainDraft, TokenDraft, BlockDraft)
    made = next(k for k in kinds if k.role in draft.interface.inputs)
    return made(draft, proposals, row_numbers)
