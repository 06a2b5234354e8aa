"""What one round of decoding committed, where its time went, and what ends a text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter

from edgecc.backends.runtime.sampling import Sampler, TokenLogprobs
from edgecc.backends.runtime.session import Session


class FinishReason(StrEnum):
    """Why a text ended: at a stop token or stop string, or at a limit of length."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time of a round went, in seconds: target calls, draft calls, everything else."""

    target: float
    draft: float
    host: float


@dataclass(frozen=True, slots=True)
class Round:
    """What one step of a decoder committed.

    Attributes:
        tokens: The committed tokens, cut at the number of tokens asked for.
        proposed: What the draft proposed and was to be verified.
        accepted: Leading proposals that were kept, before any cut. A stop token is never counted
            as accepted, even if the draft proposed it: it is the round's own token.
        seconds: Where the time went.
        is_prompt: The round that read the prompt and chose the first token, with no verification.
        finish_reason: Set on the last round.
        logprobs: Of each of `tokens`; empty unless asked for.
        withheld: Further proposals, which the draft was not sure enough of.
    """

    tokens: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: int
    seconds: Seconds
    is_prompt: bool = False
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    withheld: int = 0


class Lap:
    """Times one round from the outside and from the session's own counters.

    Args:
        session: Makes the calls of the round.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._target = session.target_seconds
        self._draft = session.draft_seconds
        self._begin = perf_counter()

    def end(self) -> Seconds:
        """Where the time since the beginning went."""
        total = perf_counter() - self._begin
        target = self._session.target_seconds - self._target
        draft = self._session.draft_seconds - self._draft
        return Seconds(target, draft, max(0.0, total - target - draft))


@dataclass(slots=True)
class Limits:
    """What ends a text.

    Attributes:
        left: Tokens that may still be committed.
        stop_ids: Tokens that end it.
        sampler: Knows whether it is complete.
        reason: Why it ended, once it has.
    """

    left: int
    stop_ids: frozenset[int]
    sampler: Sampler
    reason: FinishReason | None = None

    def ends(self, token: int) -> bool:
        """Whether the token just chosen ends the text."""
        return token in self.stop_ids or self.sampler.finished

    def cut(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """As many of the next tokens as may be committed, and whether they end the text."""
        kept = tokens[: self.left]
        self.left -= len(kept)
        if len(kept) == len(tokens) and self.ends(kept[-1]):
            self.reason = FinishReason.STOP
        elif not self.left:
            self.reason = FinishReason.LENGTH
        return kept, self.reason
