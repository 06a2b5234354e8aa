"""What stands before every request: the API key, and the size of its body.

Plain ASGI, so that a refused body is never read into memory, and streams pass through untouched.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgecc.backends.server.chat_page import PAGE_PATHS
from edgecc.backends.server.errors import TooLargeError, UnauthorizedError, problem_of
from edgecc.backends.server.http import problem_response

OPEN_PATHS = frozenset({"/health", "/health/ready", "/metrics", *PAGE_PATHS})
"""What needs no key: nothing there tells about requests of others, or costs anything."""


class ApiKeys:
    """Lets requests through that have one of the keys.

    Args:
        app: What they are let through to.
        keys: The keys.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, or pass on."""
        guarded = scope["type"] == "http" and scope["path"] not in OPEN_PATHS
        if guarded and not self._allowed(Headers(scope=scope).get("authorization", "")):
            error = UnauthorizedError(
                "server/unauthorized",
                "the API key is missing or wrong",
                help="send it as 'Authorization: Bearer KEY'",
            )
            await problem_response(problem_of(error))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, header: str) -> bool:
        kind, _, key = header.partition(" ")
        given = key.strip().encode("latin-1", "replace")
        # All of them are compared, each in the same time: how long it takes tells nothing.
        found = [hmac.compare_digest(given, known) for known in self._keys]
        return kind.lower() == "bearer" and any(found)


class BodyLimit:
    """Refuses bodies that are too long, by what they say and by what comes.

    Args:
        app: What is behind.
        max_bytes: Longest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 413, or pass on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._max_bytes):
            await self._refuse(scope, receive, send)
            return
        taken = 0
        started = False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise _TooLong
            return message

        async def watched(message: Message) -> None:
            # Whoever reads bodies makes an error of its own of ours: that is not sent.
            nonlocal started
            if started or taken <= self._max_bytes:
                started = True
                await send(message)

        with suppress(_TooLong):
            await self._app(scope, counted, watched)
        if not started and taken > self._max_bytes:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = TooLargeError(
            "server/request-too-large",
            f"the body of the request has more than {self._max_bytes} bytes",
            help="send less, or serve with a larger --max-request-bytes",
        )
        await problem_response(problem_of(error))(scope, receive, send)


class _TooLong(Exception):
    """A body has become too long."""
