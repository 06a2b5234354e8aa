"""Decoders that propose: by a draft, or by lookup in the text so far."""

from __future__ import annotations

from edgecc.backends.runtime.adaptive import AdaptiveLength
from edgecc.backends.runtime.calls import Steps
from edgecc.backends.runtime.decoder import Decoder
from edgecc.backends.runtime.lookup import TokenHistory
from edgecc.backends.runtime.model_info import DraftInfo, ModelInfo
from edgecc.backends.runtime.proposals import ConfidenceThreshold, Proposals
from edgecc.backends.runtime.round import Round
from edgecc.backends.runtime.session import Session
from edgecc.prompt_lookup import PromptLookup


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
