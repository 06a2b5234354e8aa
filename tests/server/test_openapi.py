"""The OpenAPI document against the server: what schemathesis makes of it, good and bad.

Each request gets an answer that the document describes; bad ones are the client's fault, in
OpenAI's shape, and the server answers the next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import Phase, given, settings

if TYPE_CHECKING:
    from edgecc.backends.server import Server

httpx = pytest.importorskip("httpx")
schemathesis = pytest.importorskip("schemathesis")

MOST = 3
"""Tokens of an answer: what they are is tested elsewhere."""


OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/health/ready"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
]


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.fixture(scope="module", autouse=True)
def alive(server: Server) -> Iterator[None]:
    yield
    body = {"prompt": "def f(x):", "max_tokens": MOST}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    engine = server.service.engine
    assert (engine.running, engine.waiting) == (0, 0)


def short(body: Any) -> Any:
    """The same request for a short answer of the model that is there.

    What is wrong with it otherwise stays wrong.
    """
    if not isinstance(body, dict):
        return body
    if isinstance(body.get("model"), str):
        body["model"] = "tiny"
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name, MOST + 1)
        if value is None or (type(value) is int and value > MOST):
            body[name] = MOST
    return body


def test_the_operations_are_these(document: Any) -> None:
    found = {(one.ok().method.upper(), one.ok().path) for one in document.get_all_operations()}

    assert found == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *((method, path, "positive") for method, path in OPERATIONS),
        *((method, path, "negative") for method, path in OPERATIONS if method == "POST"),
    ],
)
def test_every_request(document: Any, method: str, path: str, mode: str) -> None:
    operation = document[path][method]

    # Without shrinking: a request is small, and a server is slow.
    @settings(phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def send(case: Any) -> None:
        case.body = short(case.body)
        answer = case.call(timeout=60)
        # What is good by the document may still be too much for this model: that is a 400 as well.
        case.validate_response(
            answer, excluded_checks=[schemathesis.checks.positive_data_acceptance]
        )
        if path.startswith("/v1/models/"):
            assert answer.status_code == 404
        elif method == "GET":
            assert answer.status_code == 200
        else:
            assert answer.status_code in (200, 400)
        if answer.status_code >= 400:
            assert answer.json()["error"]["type"] in ("invalid_request_error", "not_found_error")

    send()
