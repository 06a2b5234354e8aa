"""Decoding, plain and speculative: draft, verify, accept.

A round starts from the newest committed token, the anchor. The draft proposes up to N tokens, the
target runs over the anchor and the proposals at once, and the longest prefix that agrees with the
target's own choices is kept, followed by one token that the target chose itself. So each round
commits one token at least, and the text is the one that the target writes alone. How a token is
chosen, greedily or by chance, is the matter of a `Sampler`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter
from typing import TypeAlias

from edgecc.backends.base import IntArray
from edgecc.backends.runtime.adaptive import AdaptiveLength
from edgecc.backends.runtime.calls import Steps
from edgecc.backends.runtime.grammar import Constraint
from edgecc.backends.runtime.image_prompt import PromptImages
from edgecc.backends.runtime.lookup import TokenHistory
from edgecc.backends.runtime.model_info import DraftInfo, ModelInfo
from edgecc.backends.runtime.proposals import ConfidenceThreshold, Proposals
from edgecc.backends.runtime.sampling import Sampler, SamplingParams, TokenLogprobs
from edgecc.backends.runtime.session import Session
from edgecc.errors import BackendError
from edgecc.prompt_lookup import PromptLookup

Choose: TypeAlias = Callable[[int], int]
"""The target's token of a row of a verification. It is asked in order, for rows it commits only."""

_Verified: TypeAlias = tuple[tuple[int, ...], int, Choose]
"""The proposals that were verified, how many were withheld, and the target's tokens."""


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


class Decoder(ABC):
    """Decodes one sequence after another through a session.

    Args:
        session: The state to decode with; each call of `rounds` resets it.
        model: What the bundle says about the model.
    """

    def __init__(self, session: Session, model: ModelInfo) -> None:
        self._session = session
        self._model = model
        self._sampler = Sampler(SamplingParams(), (), model.num_tokens)
        self._threshold = ConfidenceThreshold(0.0)

    @abstractmethod
    def _drafting(self, start: int) -> bool:
        """Whether the draft takes part in a round whose anchor is at position `start`."""

    @abstractmethod
    def _most(self, drafting: bool) -> int:
        """Most proposals of the next verification, at most `session.room`.

        Args:
            drafting: Whether the draft takes part in its round.
        """

    @property
    def _on_device(self) -> bool:
        """Whether rounds run on the device, where they can."""
        return self._session.runs_rounds and not self._sampler.needs_logits

    def _propose(self, most: int) -> Steps[Proposals]:
        """Proposals for the next verification; those after the first `most` are not used."""
        return self._session.propose(most, confidence=self._threshold.active)

    def _start(self) -> None:  # noqa: B027
        """Forget the sequence before."""

    def _learn(self, made: Round) -> None:  # noqa: B027
        """Take notice of a round that is done; most decoders have no use for it."""

    def rounds(
        self,
        token_ids: Sequence[int] | IntArray,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        sampling: SamplingParams | None = None,
        images: PromptImages | None = None,
        constraint: Constraint | None = None,
    ) -> Iterator[Round]:
        """Continue a prompt.

        Args:
            token_ids: The prompt: at least one id, each below `num_tokens`.
            max_new_tokens: Most tokens to commit. The model's length limits it as well.
            stop_ids: Tokens that end the text; the one that does is committed.
            sampling: How tokens are chosen; None means greedily.
            images: What is in the prompt besides text.
            constraint: What the text must follow, at its beginning. The text also ends where
                nothing can be added to it.

        Yields:
            The round of the prompt, with the first token, then one round per target call. The last
            one has a finish reason. Nothing if there is no room for a single token.
        """
        for steps in self.steps(token_ids, max_new_tokens, stop_ids, sampling, images, constraint):
            yield self._session.run(steps)

    def steps(
        self,
        token_ids: Sequence[int] | IntArray,
        max_new_tokens: int,
        stop_ids: Collection[int] = (),
        sampling: SamplingParams | None = None,
        images: PromptImages | None = None,
        constraint: Constraint | None = None,
    ) -> Iterator[Steps[Round]]:
        """Like `rounds`, for a caller that makes the engine calls.

        Yields:
            A coroutine for each round, to be run to its end before the next one is taken.
        """
        session = self._session
        session.reset()
        self._start()
        params = SamplingParams() if sampling is None else sampling
        self._sampler = Sampler(params, token_ids, self._model.num_tokens, constraint)
        room = min(self._model.max_model_len, session.capacity) - len(token_ids)
        limits = _Limits(min(max_new_tokens, room), frozenset(stop_ids), self._sampler)
        if limits.left < 1:
            return
        yield self._first_round(token_ids, limits, images)
        while limits.reason is None:
            yield self._next_round(limits)

    def _first_round(
        self, token_ids: Sequence[int] | IntArray, limits: _Limits, images: PromptImages | None
    ) -> Steps[Round]:
        """Read the prompt and choose a token."""
        session = self._session
        lap = _Lap(session)
        drafting = self._drafting(len(token_ids))
        logits = yield from session.prefill(token_ids, features=drafting, images=images)
        token = self._sampler.choose(logits)
        session.push(token)
        tokens, reason = limits.cut((token,))
        logprobs = self._sampler.take_logprobs()
        return Round(tokens, (), 0, lap.end(), True, reason, logprobs)

    def _next_round(self, limits: _Limits) -> Steps[Round]:
        """One verification."""
        session = self._session
        lap = _Lap(session)
        drafting = self._drafting(session.start)
        most = self._most(drafting)
        if self._on_device:
            proposed, withheld, choose = self._round(most, drafting)
        else:
            proposed, withheld, choose = yield from self._verify(most, drafting)
        accepted, token = accept(choose, proposed, limits.ends)
        session.commit(accepted, token)
        tokens, reason = limits.cut((*proposed[:accepted], token))
        logprobs = self._sampler.take_logprobs()[: len(tokens)]
        made = Round(tokens, proposed, accepted, lap.end(), False, reason, logprobs, withheld)
        self._learn(made)
        return made

    def _verify(self, most: int, drafting: bool) -> Steps[_Verified]:
        """Proposals and the target's choices, by calls of the draft and of the target."""
        drafted = (yield from self._propose(most)) if most else Proposals()
        proposed, withheld = self._kept(drafted, most)
        proposed = self._sampler.possible(proposed)
        logits = yield from self._session.verify(proposed, features=drafting)
        return proposed, withheld, lambda row: self._sampler.choose(logits[row])

    def _round(self, most: int, drafting: bool) -> _Verified:
        """The same from a round on the device, which chooses greedily and verifies all."""
        count = self._model.num_tokens
        drafted, chosen = self._session.round(most, features=drafting)
        return *self._kept(drafted, most), lambda row: _checked(chosen[row], count)

    def _kept(self, drafted: Proposals, most: int) -> tuple[tuple[int, ...], int]:
        """The proposals to be verified, and how many the draft was not sure enough of."""
        tokens = drafted.tokens[:most]
        kept = self._threshold.kept(drafted)[:most]
        return tuple(_valid_prefix(kept, self._model.num_tokens)), len(tokens) - len(kept)


class PlainDecoder(Decoder):
    """One target call per token: the reference that speculation must reproduce."""

    def _drafting(self, start: int) -> bool:
        return False

    def _most(self, drafting: bool) -> int:
        return 0


class ProposingDecoder(Decoder):
    """What decoders with proposals share: how many.

    Args:
        session: The state to decode with.
        model: What the bundle says about the model.
        num_speculative_tokens: N, at least 1.
        adaptive: Propose fewer where measured acceptance and times say that it is faster.
    """

    def __init__(
        self, session: Session, model: ModelInfo, num_speculative_tokens: int, *, adaptive: bool
    ) -> None:
        super().__init__(session, model)
        self._wanted = num_speculative_tokens
        self._length = AdaptiveLength(self._wanted) if adaptive else None

    def _fitting(self) -> int:
        """Proposals worth verifying, as far as there is room."""
        wanted = self._wanted if self._length is None else self._length.next()
        return max(0, min(wanted, self._session.room))

    def _learn(self, made: Round) -> None:
        if self._length is not None and made.finish_reason is None:
            seconds = made.seconds.target + made.seconds.draft + made.seconds.host
            self._length.observe(len(made.proposed), made.accepted, seconds)


class SpeculativeDecoder(ProposingDecoder):
    """Draft, verify, accept.

    A draft with a block always runs all of it, and the first N proposals are used: they are the
    same whatever N is. One that makes a proposal a call is called N times. Either needs positions,
    and rows behind the context in the draft's caches: the draft is left out as soon as a round
    would pass the last position it was made for or the end of its caches. The text does not depend
    on it.

    Args:
        session: The state to decode with; it has a draft.
        model: What the bundle says about the model.
        draft: What the bundle says about the draft.
        num_speculative_tokens: N, from 1 to the compiled number; None means the compiled number.
        adaptive: Propose fewer where measured acceptance and times say that it is faster.
        confidence_threshold: Verify no proposal the draft is less sure of, nor those after it. 0
            verifies all; more needs a draft with a confidence head.
    """

    def __init__(
        self,
        session: Session,
        model: ModelInfo,
        draft: DraftInfo,
        num_speculative_tokens: int | None = None,
        *,
        adaptive: bool = False,
        confidence_threshold: float = 0.0,
    ) -> None:
        wanted = num_speculative_tokens or draft.num_speculative_tokens
        super().__init__(session, model, wanted, adaptive=adaptive)
        self._threshold = ConfidenceThreshold(confidence_threshold)
        reach = min(draft.max_position_embeddings, session.draft_capacity)
        self._last_start = reach - draft.block_size

    def _drafting(self, start: int) -> bool:
        return start <= self._last_start

    def _most(self, drafting: bool) -> int:
        return self._fitting() if drafting else 0


class LookupDecoder(ProposingDecoder):
    """Look up, verify, accept: proposals are what followed the same tokens before, see `lookup`.

    A round proposes nothing where nothing repeats: it is a plain step then. Rounds on a device know
    no such proposals, so the host makes the calls.

    Args:
        session: The state to decode with; a draft that it has is not used.
        model: What the bundle says about the model.
        lookup: How many tokens have to repeat.
        num_speculative_tokens: N, from 1 to the compiled number.
        adaptive: Propose fewer where measured acceptance and times say that it is faster.
    """

    def __init__(
        self,
        session: Session,
        model: ModelInfo,
        lookup: PromptLookup,
        num_speculative_tokens: int,
        *,
        adaptive: bool = False,
    ) -> None:
        super().__init__(session, model, num_speculative_tokens, adaptive=adaptive)
        self._lookup = lookup
        self._history = TokenHistory(lookup)

    def _start(self) -> None:
        self._history = TokenHistory(self._lookup)

    @property
    def _on_device(self) -> bool:
        return False

    def _drafting(self, start: int) -> bool:
        return False

    def _most(self, drafting: bool) -> int:
        return self._fitting()

    def _propose(self, most: int) -> Steps[Proposals]:
        yield from ()  # no call is needed
        self._history.follow(self._session.tokens)
        return Proposals(self._history.propose(most))


def accept(choose: Choose, proposed: Sequence[int], ends: Callable[[int], bool]) -> tuple[int, int]:
    """Keep the proposals that the target would have chosen itself.

    Rows after the first disagreement are not looked at.

    Args:
        choose: The target's token of a row; row i decides about proposal i.
        proposed: The proposals that were verified.
        ends: Whether the token just chosen ends the text. A proposal that does is not accepted but
            chosen: nothing follows it.

    Returns:
        How many proposals are accepted, and the token that the target adds to them.
    """
    for index, proposal in enumerate(proposed):
        token = choose(index)
        if token != proposal or ends(token):
            return index, token
    return len(proposed), choose(len(proposed))


def _checked(token: int, num_tokens: int) -> int:
    """A token that a device chose.

    Raises:
        BackendError: It is none, as happens where no logit is a number.
    """
    if not 0 <= token < num_tokens:
        raise BackendError(
            "runtime/no-token",
            f"the device chose {token}, which is no token",
            help="run `edgecc verify` on the bundle: it finds what differs",
        )
    return token


class _Lap:
    """Times one round from the outside and from the session's own counters."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._target = session.target_seconds
        self._draft = session.draft_seconds
        self._begin = perf_counter()

    def end(self) -> Seconds:
        total = perf_counter() - self._begin
        target = self._session.target_seconds - self._target
        draft = self._session.draft_seconds - self._draft
        return Seconds(target, draft, max(0.0, total - target - draft))


@dataclass(slots=True)
class _Limits:
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


def _valid_prefix(proposals: Sequence[int], num_tokens: int) -> Sequence[int]:
    """The proposals before the first that is no token: the target cannot agree to that one."""
    for index, proposal in enumerate(proposals):
        if not 0 <= proposal < num_tokens:
            return proposals[:index]
    return proposals
