"""The answer to a request as it grows, round by round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

from edgecc.backends.runtime.decoder import FinishReason, Round
from edgecc.backends.runtime.request import Request
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
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stats: Stats


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
    """

    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    stats: Stats

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Generation:
        """All chunks of an answer, the last one included, in one piece."""
        pieces: list[str] = []
        tokens: list[int] = []
        stats, reason = Stats(), FinishReason.LENGTH
        for chunk in chunks:
            pieces.append(chunk.text)
            tokens += chunk.token_ids
            stats, reason = chunk.stats, chunk.finish_reason or reason
        return cls(tokens, "".join(pieces), reason, stats.prompt_tokens, stats)


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
        return Chunk(text, list(tokens), reason, stats)

    def end(self) -> Chunk:
        """The chunk of an answer that has no room for a token."""
        return Chunk("", [], FinishReason.LENGTH, self._stats)
