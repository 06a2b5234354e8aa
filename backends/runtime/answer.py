"""The answer to a request as it grows, round by round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

from edgecc.backends.runtime.request import Request
from edgecc.backends.runtime.round import FinishReason, Round
from edgecc.backends.runtime.sampling import TokenLogprobs
from edgecc.backends.runtime.stats import AcceptanceMonitor, Stats
from edgecc.backends.runtime.text import TextBuilder
from edgecc.backends.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round added to an answer.

    Text and tokens of one chunk need not belong together: text waits until its characters are
    complete and until it cannot be the beginning of a stop string.

    Attributes:
        text: The next piece of text, in whole characters; may be empty.
        token_ids: The tokens added; several with speculation.
        finish_reason: Set on the last chunk.
        stats: Counts and times so far: one object, which grows until the last chunk.
        logprobs: Of each of `token_ids`; None unless asked for.
        seed: What random numbers follow from; None where there are none.
        proposed: Proposals of the round.
        accepted: Those of them that were accepted.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    seed: int | None = None
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer.

    Attributes:
        token_ids: The tokens generated, up to and with the stop token or the token that completes a
            stop string.
        text: Their text, without special tokens and up to a stop string. A character cut off by the
            length limit shows as U+FFFD.
        finish_reason: `stop` at a stop token or stop string, `length` at a limit.
        prompt_tokens: Tokens of the prompt.
        stats: Counts and times.
        logprobs: Of each of `token_ids`; None unless asked for.
        seed: What random numbers followed from; None where there were none.
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats
    logprobs: list[TokenLogprobs] | None = None
    seed: int | None = None

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Generation:
        """All chunks of an answer, the last one included, in one piece."""
        pieces: list[str] = []
        tokens: list[int] = []
        logprobs: list[TokenLogprobs] | None = None
        stats, reason, seed = Stats(), FinishReason.LENGTH, None
        for chunk in chunks:
            pieces.append(chunk.text)
            tokens += chunk.token_ids
            if chunk.logprobs is not None:
                logprobs = [*(logprobs or ()), *chunk.logprobs]
            stats, reason, seed = chunk.stats, chunk.finish_reason or reason, chunk.seed
        text = "".join(pieces)
        return cls(tokens, text, reason, stats.prompt_tokens, stats, logprobs, seed)


class Answer:
    """Makes chunks of rounds: text, stop strings, statistics.

    Args:
        request: What is answered.
        tokenizer: Decodes tokens; without one there is no text.
        monitor: Watches the rounds.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, monitor: AcceptanceMonitor
    ) -> None:
        self._stats = Stats(prompt_tokens=len(request.token_ids))
        self._builder = TextBuilder(tokenizer, request.stop, request.stop_ids)
        self._monitor = monitor
        self._wants_logprobs = request.sampling.logprobs is not None
        self._seed = None if request.sampling.greedy else request.sampling.seed
        self.finding: str | None = None
        """What the monitor noticed at the last round; it is among the statistics' warnings."""

    def add(self, step: Round) -> Chunk:
        """The chunk of a round. The answer is over if it has a finish reason."""
        begin = perf_counter()
        stats, builder = self._stats, self._builder
        tokens, text = builder.push(step.tokens)
        reason = step.finish_reason
        if reason is not None and not builder.stopped:
            text += builder.finish()
        if builder.stopped:
            reason = FinishReason.STOP
        stats.add(step)
        stats.new_tokens += len(tokens)
        stats.host_seconds += perf_counter() - begin
        self.finding = self._monitor.observe(step)
        if self.finding is not None:
            stats.warnings.append(self.finding)
        logprobs = list(step.logprobs[: len(tokens)]) if self._wants_logprobs else None
        return Chunk(
            text,
            list(tokens),
            reason,
            stats,
            logprobs,
            self._seed,
            proposed=len(step.proposed),
            accepted=step.accepted,
        )

    def end(self) -> Chunk:
        """The chunk of an answer that has no room for a token."""
        empty: list[TokenLogprobs] | None = [] if self._wants_logprobs else None
        return Chunk("", [], FinishReason.LENGTH, self._stats, empty, self._seed)
