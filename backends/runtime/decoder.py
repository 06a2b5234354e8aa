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
from typing import TypeAlias

from edgecc.backends.base import IntArray
from edgecc.backends.runtime.calls import Steps
from edgecc.backends.runtime.grammar import Constraint
from edgecc.backends.runtime.image_prompt import PromptImages
from edgecc.backends.runtime.model_info import ModelInfo
from edgecc.backends.runtime.proposals import ConfidenceThreshold, Proposals
from edgecc.backends.runtime.round import Lap, Limits, Round
from edgecc.backends.runtime.sampling import Sampler, SamplingParams
from edgecc.backends.runtime.session import Session
from edgecc.errors import BackendError

Choose: TypeAlias = Callable[[int], int]
"""The target's token of a row of a verification. It is asked in order, for rows it commits only."""

_Verified: TypeAlias = tuple[tuple[int, ...], int, Choose]
"""The proposals that were verified, how many were withheld, and the target's tokens."""


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
        limits = Limits(min(max_new_tokens, room), frozenset(stop_ids), self._sampler)
        if limits.left < 1:
            return
        yield self._first_round(token_ids, limits, images)
        while limits.reason is None:
            yield self._next_round(limits)

    def _first_round(
        self, token_ids: Sequence[int] | IntArray, limits: Limits, images: PromptImages | None
    ) -> Steps[Round]:
        """Read the prompt and choose a token."""
        session = self._session
        lap = Lap(session)
        drafting = self._drafting(len(token_ids))
        logits = yield from session.prefill(token_ids, features=drafting, images=images)
        token = self._sampler.choose(logits)
        session.push(token)
        tokens, reason = limits.cut((token,))
        logprobs = self._sampler.take_logprobs()
        return Round(tokens, (), 0, lap.end(), True, reason, logprobs)

    def _next_round(self, limits: Limits) -> Steps[Round]:
        """One verification."""
        session = self._session
        lap = Lap(session)
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


def _valid_prefix(proposals: Sequence[int], num_tokens: int) -> Sequence[int]:
    """The proposals before the first that is no token: the target cannot agree to that one."""
    for index, proposal in enumerate(proposals):
        if not 0 <= proposal < num_tokens:
            return proposals[:index]
    return proposals
