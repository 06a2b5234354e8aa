"""Answers in the shape of OpenAI's API: whole ones, and events of streams."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from edgecc.backends.runtime import Chunk, Generation, Stats, Tokenizer, TokenLogprobs
from edgecc.backends.server.tool_calls import CallPart, Parts, ToolCallParser

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
        piece = self._piece(index, chunk)
        if piece is None:
            return []
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
    def _piece(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """A piece of one; None if it has nothing to tell."""

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
    """`/v1/chat/completions`.

    Args:
        model_name: See `Reply`.
        tokenizer: See `Reply`.
        choices: See `Reply`.
        with_usage: See `Reply`.
        with_rounds: See `Reply`.
        make_parser: Makes what finds calls of tools in an answer; None leaves it as it is.
    """

    prefix = "chatcmpl"
    kind = "chat.completion"
    event_kind = "chat.completion.chunk"

    def __init__(
        self,
        model_name: str,
        tokenizer: Tokenizer | None,
        choices: int,
        *,
        with_usage: bool = False,
        with_rounds: bool = False,
        make_parser: Callable[[], ToolCallParser] | None = None,
    ) -> None:
        super().__init__(
            model_name, tokenizer, choices, with_usage=with_usage, with_rounds=with_rounds
        )
        self._parsers = [] if make_parser is None else [make_parser() for _ in range(choices)]

    def first(self) -> list[dict[str, Any]]:
        """Who speaks, for each choice."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._event([{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}])
            for i in range(self._per_prompt)
        ]

    def _choice(self, index: int, answer: Generation) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        reason = str(answer.finish_reason)
        if self._parsers:
            parser = self._parsers[index]
            told = [parser.push(answer.text), parser.finish()]
            message["content"] = "".join(parts.content for parts in told)
            if parser.calls:
                message["content"] = message["content"] or None
                message["tool_calls"] = _joined([call for parts in told for call in parts.calls])
                reason = _with_calls(reason)
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": reason,
        }

    def _piece(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        reason, delta = _reason(chunk), _delta(Parts(chunk.text))
        if self._parsers:
            parser = self._parsers[index]
            parts = parser.push(chunk.text)
            if reason is not None:
                last = parser.finish()
                parts = Parts(parts.content + last.content, parts.calls + last.calls)
                reason = _with_calls(reason) if parser.calls else reason
            delta = _delta(parts)
        if not (delta or chunk.logprobs or reason is not None):
            return None
        return {
            "index": index,
            "delta": delta,
            "logprobs": self._logprobs(chunk.logprobs),
            "finish_reason": reason,
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

    @cached_property
    def _offsets(self) -> Counter[int]:
        """By choice: characters that are told."""
        return Counter()

    def _choice(self, index: int, answer: Generation) -> dict[str, Any]:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs(index, answer.logprobs),
            "finish_reason": str(answer.finish_reason),
        }

    def _piece(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        if not (chunk.text or chunk.logprobs or chunk.finish_reason is not None):
            return None
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
            best = {self._token(i)[0]: _finite(value) for i, value in item.top}
            top.append({text: values[-1], **best})  # the API always tells the token itself
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _with_calls(reason: str) -> str:
    """Why an answer with calls of tools ended."""
    return "tool_calls" if reason == "stop" else reason


def _delta(parts: Parts) -> dict[str, Any]:
    """What is new of an answer; parts of one call are put together."""
    delta: dict[str, Any] = {"content": parts.content} if parts.content else {}
    if parts.calls:
        delta["tool_calls"] = [{"index": c.index, **_call(c)} for c in _merged(parts.calls)]
    return delta


def _joined(calls: Sequence[CallPart]) -> list[dict[str, Any]]:
    """Whole calls from all their parts."""
    return [_call(call) for call in _merged(calls)]


def _merged(calls: Sequence[CallPart]) -> list[CallPart]:
    found: dict[int, CallPart] = {}
    for call in calls:
        first = found.setdefault(call.index, replace(call, arguments=""))
        first.arguments += call.arguments
    return list(found.values())


def _call(call: CallPart) -> dict[str, Any]:
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


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
