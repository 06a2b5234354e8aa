"""One sequence and the grammar that it follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.errors import InternalError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class _Next:
    """What may follow.

    Attributes:
        allowed: bool `[V]`: the tokens.
        finished: Nothing but the end.
    """

    allowed: Mask
    finished: bool


class Constraint:
    """What may follow the tokens of one sequence.

    It goes forward only: a token is told when it is committed, so a proposal that is rejected
    leaves nothing to take back.

    Args:
        matcher: At the beginning of the text; moved on by this object alone.
        num_tokens: V, tokens of the model.
        end_id: The token that stands for the end in the matcher.
        stop_ids: Tokens that end the sequence; where there are none it ends when it is complete.
        special_ids: Tokens that are allowed only where the grammar names them.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        num_tokens: int,
        end_id: int,
        stop_ids: frozenset[int],
        special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._end_id = end_id
        self._stop_ids = stop_ids
        self._stops = np.array(sorted(i for i in stop_ids if i < num_tokens), dtype=np.int64)
        special = sorted(i for i in special_ids - stop_ids if i < num_tokens)
        self._special = np.array(special, dtype=np.int64)
        self._ended = False
        self._next: _Next | None = None

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can be added to it.

        Raises:
            RequestError: See `allowed`.
        """
        return self._ended or self._look().finished

    @property
    def allowed(self) -> Mask:
        """The tokens that may follow, bool `[V]`; not to be changed.

        Those that end the sequence are among them where the text is complete.

        Raises:
            RequestError: The grammar turns out to be too complex, or no token continues the text.
        """
        return self._look().allowed

    def advance(self, token: int) -> None:
        """Take a token that was allowed."""
        if token in self._stop_ids:
            self._ended = True
            return
        if not self._matcher.consume_token(token):
            self._check()
            raise InternalError("runtime/grammar", f"token {token} was not allowed")
        self._next = None

    def count_allowed(self, proposals: Sequence[int]) -> int:
        """How many proposals may follow one another, each of them a token of the model."""
        told: list[int] = []
        for proposal in proposals:
            if proposal == self._end_id:
                break
            ends = proposal in self._stop_ids
            told.append(self._end_id if ends else proposal)
            if ends:
                break
        return self._matcher.validate_tokens(told)

    def _look(self) -> _Next:
        if self._next is None:
            self._next = self._compute()
        return self._next

    def _compute(self) -> _Next:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        known = np.unpackbits(bits, bitorder="little").view(np.bool_)
        # A range of ids may name the end as well, and a rule may stop at it.
        complete = bool(known[self._end_id]) and self._matcher.is_accepting()
        allowed = np.zeros(self._num_tokens, dtype=np.bool_)
        count = min(self._num_tokens, len(known))
        allowed[:count] = known[:count]
        allowed[self._stops] = False
        if self._end_id < self._num_tokens:
            allowed[self._end_id] = False
        # To a complement such as `~"a"` a special token is one more byte.
        for token in self._special[allowed[self._special]]:
            allowed[token] = self._matcher.validate_tokens([int(token)]) == 1
        finished = not allowed.any()
        if finished and not complete:
            raise _no_token()
        allowed[self._stops] = complete
        return _Next(allowed, finished)

    def _check(self) -> None:
        """Check that the matcher is in order.

        Raises:
            RequestError: It has met one of its limits, or no text fits it.
        """
        if self._matcher.is_error():
            found = self._matcher.get_error().splitlines()
            if found and found[0].startswith("NoExtension"):
                raise _no_token()
            raise RequestError(
                "grammar/too-complex",
                "the grammar is too complex: " + (found[0] if found else "no reason is known"),
                help="use a smaller one, with fewer alternatives and smaller repetitions",
            )


def _no_token() -> RequestError:
    return RequestError(
        "grammar/no-token",
        "no token of the model continues the text as the grammar wants it",
        help="no text fits the grammar, or the vocabulary lacks a byte of it",
    )
