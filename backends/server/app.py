"""The HTTP side: routes, and errors in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

import edgecc
from edgecc.backends.server.chat_page import add_chat_page
from edgecc.backends.server.errors import Problem, UnavailableError, problem_of
from edgecc.backends.server.http import (
    CLIENT_GONE,
    ClientGoneError,
    json_response,
    problem_response,
)
from edgecc.backends.server.middleware import ApiKeys, BodyLimit
from edgecc.backends.server.protocol import ChatBody, CompletionBody, TokenizeBody
from edgecc.backends.server.response_models import (
    ChatAnswer,
    CompletionAnswer,
    ModelAnswer,
    ModelsAnswer,
    StatusAnswer,
    TokenizeAnswer,
    documented,
)
from edgecc.backends.server.service import Service
from edgecc.errors import EdgeccError

_LOG = logging.getLogger(__name__)


def create_app(service: Service) -> FastAPI:
    """The application of a service, which it closes when it shuts down.

    Args:
        service: What is served.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(
        title="edgecc serve",
        version=edgecc.__version__,
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )
    _add_health(app, service)
    _add_models(app, service)
    _add_generation(app, service)
    if service.options.chat_page:
        add_chat_page(app)
    _add_errors(app)
    app.add_middleware(BodyLimit, max_bytes=service.options.max_request_bytes)
    if service.options.api_keys:
        app.add_middleware(ApiKeys, keys=service.options.api_keys)
    return app


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health", responses=documented(StatusAnswer))
    async def health() -> Response:
        """Whether the engine runs."""
        if not service.engine.ready:
            raise UnavailableError("server/closing", "the engine does not run")
        return json_response({"status": "ok"})

    @app.get("/health/ready", responses=documented(StatusAnswer))
    async def ready() -> Response:
        """Whether a request would be taken now."""
        service.check_room()
        return json_response({"status": "ready"})

    if service.options.metrics:

        @app.get("/metrics", response_class=PlainTextResponse)
        async def metrics() -> Response:
            """Metrics for Prometheus."""
            return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=documented(ModelsAnswer))
    async def models() -> Response:
        """The one model that is served."""
        return json_response({"object": "list", "data": [service.model()]})

    @app.get("/v1/models/{name:path}", responses=documented(ModelAnswer))
    async def model(name: str) -> Response:
        """It alone."""
        service.check_model(name)
        return json_response(service.model())


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=documented(ChatAnswer, streamed=True))
    async def chat(body: ChatBody, request: Request) -> Response:
        """Answer a chat."""
        return await service.chat(body, request)

    @app.post("/v1/completions", responses=documented(CompletionAnswer, streamed=True))
    async def complete(body: CompletionBody, request: Request) -> Response:
        """Continue prompts."""
        return await service.complete(body, request)

    @app.post("/tokenize", responses=documented(TokenizeAnswer))
    async def tokenize(body: TokenizeBody) -> Response:
        """The tokens of a prompt."""
        return await service.tokenize(body)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(EdgeccError)
    async def refused(request: Request, error: EdgeccError) -> Response:
        problem = problem_of(error)
        if problem.status >= 500:
            _LOG.warning("%s failed: %s", request.url.path, error.id)
        return problem_response(problem)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        return problem_response(_malformed(error))

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        unreadable = error.status_code == 400  # FastAPI says so of bodies only, and nothing else
        detail = _UNREADABLE if unreadable else str(error.detail)
        problem = Problem(error.status_code, detail, "server/http")
        response = problem_response(problem)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return problem_response(Problem(500, "this is a bug in edgecc", "server/internal"))


_UNREADABLE = "the body cannot be read as JSON in UTF-8 (not compressed), or is nested too deeply"


def _malformed(error: RequestValidationError) -> Problem:
    """What is wrong with a body, without what it says: that is the client's."""
    findings = error.errors()
    first = findings[0]
    if first["type"] == "json_invalid":
        said = first.get("ctx", {}).get("error", "it cannot be read")
        message = f"the body is not JSON: {said}, at character {first['loc'][-1]}"
        return Problem(400, message, "server/bad-json")
    if first["loc"] == ("body",):
        message = "the body is no JSON object; send one, with Content-Type: application/json"
        return Problem(400, message, "server/bad-field")
    place = [str(part) for part in first["loc"] if part != "body"]
    param = ".".join(place) or None
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return Problem(400, f"{param or 'body'}: {first['msg']}{more}", "server/bad-field", param)
