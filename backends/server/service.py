"""What the endpoints do, whatever they are called."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi import Response

from edgecc.backends.runtime import Chunk, Generation, Generator, Request
from edgecc.backends.server.answers import AnswerStream
from edgecc.backends.server.engine_thread import EngineThread
from edgecc.backends.server.errors import problem_of
from edgecc.backends.server.http import DONE, EventStream, event, json_response, unless_gone
from edgecc.backends.server.metrics import Metrics
from edgecc.backends.server.options import ServerOptions
from edgecc.backends.server.protocol import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    TokenizeBody,
)
from edgecc.backends.server.reading import RequestReader
from edgecc.backends.server.replies import ChatReply, CompletionReply, Reply
from edgecc.errors import EdgeccError, RequestError

B = TypeVar("B", bound=GenerationBody)

_LOG = logging.getLogger(__name__)

IGNORED_HEADER = "X-Edgecc-Ignored-Fields"
"""Names the fields of a request that nothing reads."""


class Service:
    """One model, served.

    Args:
        generator: Nothing else may run on it until the service is closed.
        options: Of the server.

    Raises:
        EdgeccError: The generator is busy, or a chat template is malformed.
    """

    def __init__(self, generator: Generator, options: ServerOptions) -> None:
        self.options = options
        self.metrics = Metrics(options.model_name)
        self._generator = generator
        self._reader = RequestReader(generator, options)
        generator.prepare_grammars()  # so that no request stops the others for seconds
        self._created = int(time.time())
        self._reading = 0
        try:
            self._tokenizer = generator.tokenizer
        except RequestError:
            self._tokenizer = None  # type: ignore[assignment]
        self.engine = EngineThread(
            generator,
            self.metrics,
            max_queued_requests=options.max_queued_requests,
            queue_timeout_s=options.queue_timeout_s,
        )
        self.metrics.watch(lambda: self.engine.running, lambda: self.engine.waiting)

    def end(self) -> None:
        """Begin to end: answers that are not complete fail."""
        self.engine.end()

    def close(self) -> None:
        """End the engine's thread; answers that are not complete fail."""
        self.engine.close()

    def model(self) -> dict[str, Any]:
        """The model as `/v1/models` describes it."""
        model = self._generator.model
        return {
            "id": self.options.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "edgecc",
            "max_model_len": model.max_model_len,
            "max_input_len": model.max_input_len,
            "num_speculative_tokens": model.draft.num_speculative_tokens if model.draft else 0,
        }

    @property
    def reading(self) -> int:
        """Requests that are read, before they wait for a slot."""
        return self._reading

    def check_room(self) -> None:
        """Check that a request would be taken now: see `EngineThread.check_room`."""
        self.engine.check_room(ahead=self._reading)

    def check_model(self, name: str) -> None:
        """See `RequestReader.check_model`."""
        self._reader.check_model(name)

    async def chat(self, body: ChatBody, http: HttpRequest) -> Response:
        """Answer a chat."""
        requests, headers = await self._read(body, http, self._reader.chat)
        reply = ChatReply(
            self.options.model_name,
            self._tokenizer,
            len(requests),
            with_usage=body.wants_usage,
            make_parser=self._reader.parser(body),
            with_rounds=body.wants_rounds,
        )
        return await self._answer(body, http, requests, reply, headers)

    async def complete(self, body: CompletionBody, http: HttpRequest) -> Response:
        """Continue prompts."""
        requests, headers = await self._read(body, http, self._reader.completion)
        reply = CompletionReply(
            self.options.model_name,
            self._tokenizer,
            len(requests),
            prompts=len(requests) // (body.n or 1),
            with_usage=body.wants_usage,
            with_rounds=body.wants_rounds,
        )
        return await self._answer(body, http, requests, reply, headers)

    async def tokenize(self, body: TokenizeBody) -> Response:
        """The tokens of a prompt."""
        self._reader.check_model(body.model)
        headers = _ignored(self._reader.ignored(body))
        tokens = await asyncio.to_thread(self._reader.tokens, body)
        limit = self._generator.model.max_model_len
        content = {"count": len(tokens), "max_model_len": limit, "tokens": tokens}
        return json_response(content, headers=headers)

    async def _read(
        self, body: B, http: HttpRequest, read: Callable[[B], list[Request]]
    ) -> tuple[list[Request], dict[str, str]]:
        """The requests of a body, and headers of the response.

        Tokenizing, decoding images and compiling grammars take time, so they are not done in the
        event loop, nor at all if there is no room for the request or its client has gone.
        """
        self._reader.check_model(body.model)
        headers = _ignored(self._reader.ignored(body))
        self.check_room()
        self._reading += 1
        try:
            return await unless_gone(http, asyncio.to_thread(read, body)), headers
        finally:
            self._reading -= 1

    async def _answer(
        self,
        body: GenerationBody,
        http: HttpRequest,
        requests: Sequence[Request],
        reply: Reply,
        headers: dict[str, str],
    ) -> Response:
        answers = AnswerStream(self.engine, requests)
        if not body.stream:
            try:
                whole = await unless_gone(http, _collected(answers, len(requests)))
            finally:
                answers.close()
            return json_response(reply.whole(whole), headers=headers)
        try:
            # Before the headers: what fails until then has a status.
            first = await unless_gone(http, anext(answers))
        except BaseException:
            answers.close()
            raise
        return EventStream(_events(reply, first, answers), answers.close, headers)


async def _collected(answers: AnswerStream, count: int) -> list[Generation]:
    chunks: list[list[Chunk]] = [[] for _ in range(count)]
    async for index, chunk in answers:
        chunks[index].append(chunk)
    return [Generation.of(own) for own in chunks]


async def _events(
    reply: Reply, first: tuple[int, Chunk], answers: AnswerStream
) -> AsyncIterator[bytes]:
    """A stream; an error in it is its last event."""
    for data in (*reply.first(), *reply.events(*first)):
        yield event(data)
    try:
        async for index, chunk in answers:
            for data in reply.events(index, chunk):
                yield event(data)
    except EdgeccError as error:
        _LOG.warning("a stream has failed: %s", error.id)
        yield event(problem_of(error).body)
        return
    for data in reply.last():
        yield event(data)
    yield DONE


def _ignored(names: Sequence[str]) -> dict[str, str]:
    return {IGNORED_HEADER: ", ".join(names)} if names else {}
