"""Errors of the server, and every error in the shape of OpenAI's API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from edgecc.errors import EdgeccError, InputError, RequestError, UnsupportedError

RETRY_AFTER_S = 1
"""Seconds that a client is asked to wait: about how long a short answer takes."""

_CODES = {"request/prompt-too-long": "context_length_exceeded"}
"""Where OpenAI's clients look for a code of their own."""


class ServerError(EdgeccError):
    """What only a server refuses; a subclass says with which status."""

    status = HTTPStatus.BAD_REQUEST


class UnauthorizedError(ServerError):
    """The API key is missing or wrong."""

    status = HTTPStatus.UNAUTHORIZED


class UnknownModelError(ServerError):
    """Another model was asked for than the one that is served."""

    status = HTTPStatus.NOT_FOUND


class TooLargeError(ServerError):
    """The body of a request has too many bytes."""

    status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class QueueFullError(ServerError):
    """All slots are taken, and so are all places to wait."""

    status = HTTPStatus.TOO_MANY_REQUESTS


class UnavailableError(ServerError):
    """The request was not answered in time, or the server ends."""

    status = HTTPStatus.SERVICE_UNAVAILABLE


def bad_tools(where: str, message: str, help: str = "") -> RequestError:
    """The error for tools, or calls of them, that are not as they should be."""
    return RequestError("server/bad-tools", message, where=where, help=help)


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as HTTP tells it.

    Attributes:
        status: The status.
        message: For people.
        code: For programs.
        param: The field of the request that is at fault.
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None

    @property
    def headers(self) -> dict[str, str]:
        """What goes with the status."""
        if self.status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
            return {"Retry-After": str(RETRY_AFTER_S)}
        if self.status == HTTPStatus.UNAUTHORIZED:
            return {"WWW-Authenticate": "Bearer"}
        return {}

    @property
    def body(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, _default_type(self.status)),
                "param": self.param,
                "code": self.code,
            }
        }


_TYPES: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}


def problem_of(error: EdgeccError) -> Problem:
    """How an error is told: what the client can mend with 4xx, all else as ours."""
    finding = error.diagnostics[0]
    if isinstance(error, ServerError):
        status = error.status
    elif isinstance(error, InputError | UnsupportedError):
        status = HTTPStatus.BAD_REQUEST
    else:
        status = HTTPStatus.INTERNAL_SERVER_ERROR
    parts = (finding.message, *finding.notes, finding.help)
    message = "; ".join(part for part in parts if part)
    return Problem(status, message, _CODES.get(error.id, error.id), finding.where or None)


def _default_type(status: int) -> str:
    return "server_error" if status >= 500 else "invalid_request_error"
