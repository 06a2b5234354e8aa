"""Responses, and what happens when a client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from edgecc.backends.server.errors import Problem

T = TypeVar("T")

CLIENT_GONE = 499
"""Nginx's status for a client that did not wait; nobody reads it but logs."""

EVENTS = "text/event-stream"
"""The type of a stream."""

DONE = b"data: [DONE]\n\n"
"""The end of a stream of OpenAI's API."""


class ClientGoneError(Exception):
    """The client has closed its connection."""


class EventStream(StreamingResponse):
    """A response that is sent as it grows (server-sent events).

    Args:
        events: The events, framed.
        on_end: Called once the response has ended, in whichever way: also if not even its first
            event was asked for, in which case the iterator would not know.
        headers: Further headers.
    """

    media_type = EVENTS

    def __init__(
        self,
        events: AsyncIterator[bytes],
        on_end: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        # Proxies keep nothing back.
        kept = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers={**headers, **kept})
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()


def json_response(
    body: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON body; what is no Unicode in it, such as half surrogates, is escaped."""
    return Response(
        json.dumps(body, allow_nan=False, separators=(",", ":")),
        status,
        dict(headers or {}),
        "application/json",
    )


def problem_response(problem: Problem) -> Response:
    """An error."""
    return json_response(problem.body, status=problem.status, headers=problem.headers)


def event(data: Mapping[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode()


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for something as long as the client does.

    Args:
        request: Its body must have been read.
        work: Cancelled when the client goes away.

    Raises:
        ClientGoneError: It has gone away.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
