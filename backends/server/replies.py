"""Answers in the shape of OpenAI's API: whole ones, and events of streams."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from edgecc.backends.runtime import Chunk, Generation, Stats, Tokenizer, TokenLogprobs

NO_PROBABILITY = -9999.0
"""How the API writes the log-probability of what had none: JSON has no infinity."""


class Reply(ABC):
    """One answer to a client, of one or several choices.

    Args:
        model_name: As the client knows the model.
        tokenizer: For log-probabilities.
        choices: How many there are.
        prompts: How many prompts they answer, as many choices for each.
        with_usage: Whether a stream ends with counts.
        with_rounds: Whether its events tell what the rounds gave that they come from.
    """

    prefix: str
    kind: str
    event_kind: str

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer | None,
        choices: int,
        *,
        prompts: int = 1,
        with_usage: bool = False,
        with_rounds: bool = False,
    ) -> None:
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": model_name,
        }
        self._tokenizer = tokenizer
        self._per_prompt = choices // prompts
        self._with_usage = with_usage
        self._with_rounds = with_rounds
        self._untold: dict[int, Counter[str]] = {}
        self._stats: dict[int, Stats] = {}

    def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """All choices in one piece."""
        self._stats = {index: answer.stats for index, answer in enumerate(generations)}
        choices = [self._choice(i, answer) for i, answer in enumerate(generations)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def events(self, index: int, chunk: Chunk) -> list[dict[str, Any]]:
        """What a chunk is in a stream: nothing while its text is held back."""
        if chunk.finish_reason is not None:
            self._stats[index] = chunk.stats
        told = self._untold.setdefault(index, Counter())
        told.update(_round_of(chunk))
        if not (chunk.text or chunk.logprobs or chunk.finish_reason is not None):
            return []
        piece = self._piece(index, chunk)
        if self._with_rounds:
            piece["edgecc"] = dict(self._untold.pop(index))
        return [self._event([piece])]

    def last(self) -> list[dict[str, Any]]:
        """What a stream ends with: the counts, if they were asked for."""
        return [{**self._event([]), "usage": self._usage()}] if self._with_usage else []

    @abstractmethod
    def _choice(self, index: int, answer: Generation) -> dict[str, Any]:
        """A whole choice."""

    @abstractmethod
    def _piece(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """A piece of one."""

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = {**self._head, "object": self.event_kind, "choices": choices}
        return {**event, "usage": None} if self._with_usage else event

    def _usage(self) -> dict[str, int]:
        """Counts: each prompt once, all choices, and what the draft did for them."""
        stats = self._stats
        firsts = [one for index, one in stats.items() if index % self._per_prompt == 0]
        prompt = sum(one.prompt_tokens for one in firsts)
        new = sum(one.new_tokens for one in stats.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "draft_tokens": sum(one.proposed for one in stats.values()),
            "accepted_tokens": sum(one.accepted for one in stats.values()),
        }

    def _token(self, token_id: int) -> tuple[str, list[int]]:
        """A token as text, and its bytes: those of part of a character are no text alone."""
        tokenizer = self._tokenizer
        if tokenizer is None:
            return f"token_id:{token_id}", []
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        partial = "\N{REPLACEMENT CHARACTER}" in text
        return text, list(tokenizer.token_bytes(token_id) if partial else text.encode())


class ChatReply(Reply):
    """`/v1/chat/completions`."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def first(self) -> list[dict[str, Any]]:
        """Who speaks, for each choice."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._event([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self._per_prompt)
        ]

    def _choice(self, index: int, answer: Generation) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text, "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": str(answer.finish_reason),
        }

    def _piece(self, index: int, chunk: Chunk) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": chunk.text} if chunk.text else {},
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": _reason(chunk),
        }

    def _logprobs(self, items: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        if items is None:
            return None
        content = [
            {
                **self._entry(item.token_id, item.logprob),
                "top_logprobs": [self._entry(*pair) for pair in item.top],
            }
            for item in items
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._token(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": data}


class CompletionReply(Reply):
    """`/v1/completions`."""

    prefix = "cmpl"
    kind = "text_completion"
    event_kind = "text_completion"

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer | None,
        choices: int,
        *,
        prompts: int = 1,
        with_usage: bool = False,
        with_rounds: bool = False,
    ) -> None:
        super().__init__(
            model_name,
            tokenizer,
            choices,
            prompts=prompts,
            with_usage=with_usage,
            with_rounds=with_rounds,
        )
        self._offsets = [0] * choices

    def _choice(self, index: int, answer: Generation) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs(index, answer.logprobs),
            "finish_reason": str(answer.finish_reason),
        }

    def _piece(self, index: int, chunk: Chunk) -> dict[str, Any]:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(index, chunk.logprobs),
            "finish_reason": _reason(chunk),
        }

    def _logprobs(self, index: int, items: Iterable[TokenLogprobs] | None) -> dict[str, Any] | None:
        if items is None:
            return None
        tokens, values, top, offsets = [], [], [], []
        for item in items:
            text, _ = self._token(item.token_id)
            tokens.append(text)
            values.append(_finite(item.logprob))
            top.append({self._token(i)[0]: _finite(value) for i, value in item.top})
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _reason(chunk: Chunk) -> str | None:
    return None if chunk.finish_reason is None else str(chunk.finish_reason)


def _round_of(chunk: Chunk) -> dict[str, int]:
    """What a round gave, under the names of `usage`; `drafts` counts rounds with proposals."""
    return {
        "completion_tokens": len(chunk.token_ids),
        "drafts": int(chunk.proposed > 0),
        "draft_tokens": chunk.proposed,
        "accepted_tokens": chunk.accepted,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NO_PROBABILITY
