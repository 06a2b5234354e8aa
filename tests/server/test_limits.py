"""What a server refuses: strangers, long bodies, more than it can take, and requests at its end."""

from __future__ import annotations

import json
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edgecc.backends.runtime import Generator
from edgecc.backends.runtime.stats import CAUSES, AcceptanceMonitor

httpx = pytest.importorskip("httpx")

BODY = {"prompt": "def f(x):", "max_tokens": 300, "ignore_eos": True}


def test_keys(serve: Any) -> None:
    with serve(api_keys=("first", "second")) as server:
        codes = {
            key: httpx.get(
                f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"}
            ).status_code
            for key in ("first", "second", "third", "firs")
        }
        nothing = httpx.get(f"{server.url}/v1/models")
        health = httpx.get(f"{server.url}/health").status_code

    assert codes == {"first": 200, "second": 200, "third": 401, "firs": 401}
    assert nothing.status_code == 401
    assert nothing.json()["error"]["type"] == "authentication_error"
    assert health == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_long_bodies(serve: Any, chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * 2000 + b'"}'
    with serve(max_request_bytes=1000) as server:
        answer = httpx.post(
            f"{server.url}/v1/completions",
            content=iter([body[:900], body[900:]]) if chunked else body,
            headers={"Content-Type": "application/json"},
        )

    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "server/request-too-large"


def test_unknown_fields_of_a_strict_server(serve: Any) -> None:
    with serve(strict=True) as server:
        url = f"{server.url}/v1/completions"
        refused = httpx.post(url, json={"prompt": "a", "bogus": 1})
        taken = httpx.post(url, json={"prompt": "a", "max_tokens": 1, "user": "me"})

    assert (refused.status_code, taken.status_code) == (400, 200)
    assert refused.json()["error"]["param"] == "bogus"


def test_a_confidence_threshold_for_all_requests(serve: Any) -> None:
    """A request may have another one, or none."""
    body = {"prompt": "def f(x):", "max_tokens": 24, "temperature": 0}
    with serve(confidence_threshold=1.0) as server:
        url = f"{server.url}/v1/completions"
        own = [{}, {"confidence_threshold": 0}, {"confidence_threshold": 0.5}]
        none, everything, some = (httpx.post(url, json=body | o).json() for o in own)

    assert none["choices"] == everything["choices"] == some["choices"]
    counts = [a["usage"]["draft_tokens"] for a in (none, some, everything)]
    assert counts[0] == 0 < counts[1] < counts[2]


def test_a_full_queue(serve: Any) -> None:
    with serve(max_queued_requests=1) as server:
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=BODY | {"n": 4, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            refused = httpx.post(url, json=BODY)
            ready = httpx.get(f"{server.url}/health/ready").status_code
            alive = httpx.get(f"{server.url}/health").status_code

    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) > 0
    assert (alive, ready) == (200, 429)


def test_requests_that_are_still_read_take_room(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or any number of them could keep the server busy with images and grammars."""
    body = {"prompt": "def f(x):", "max_tokens": 1}
    go = threading.Event()
    with serve(max_queued_requests=0) as server, ThreadPoolExecutor(3) as pool:
        service = server.service
        read = service._reader.completion

        def slowly(body: Any) -> Any:
            assert go.wait(30)
            return read(body)

        monkeypatch.setattr(service._reader, "completion", slowly)
        url = f"{server.url}/v1/completions"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=body, timeout=0.2)
        while service.reading:  # the client has gone
            time.sleep(0.01)
        taken = [pool.submit(httpx.post, url, json=body, timeout=60) for _ in range(3)]
        while service.reading < 3:
            time.sleep(0.01)
        refused = httpx.post(url, json=body)
        ready = httpx.get(f"{server.url}/health/ready").status_code
        go.set()
        codes = [answer.result().status_code for answer in taken]

    assert (refused.status_code, ready) == (429, 429)
    assert codes == [200] * 3
    assert service.reading == 0


def test_a_request_that_waits_too_long(serve: Any) -> None:
    with serve(queue_timeout_s=0.01) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"n": 4}, timeout=60)

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server/queue-timeout"


def test_what_is_under_way_is_completed_at_the_end(serve: Any) -> None:
    got: list[str] = []
    begun = threading.Event()

    def read(url: str) -> None:
        body = BODY | {"stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                got.append(line)
                begun.set()

    with serve(shutdown_timeout_s=25) as server:  # for a busy machine
        reader = threading.Thread(target=read, args=(server.url,), daemon=True)
        reader.start()
        assert begun.wait(30)
    reader.join(30)

    assert "data: [DONE]" in got
    assert not server.service.engine.ready


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_completed_in_time_is_told(
    serve: Any, stream: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    got: list[Any] = []
    begun = threading.Event()

    def read(url: str) -> None:
        body = BODY | {"stream": stream}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            got.extend((answer.status_code, answer.headers.get("Retry-After")))
            for line in answer.iter_lines():
                got.append(line)
                begun.set()

    with serve(shutdown_timeout_s=0) as server:
        reader = threading.Thread(target=read, args=(server.url,), daemon=True)
        reader.start()
        while not (begun.wait(0.01) if stream else server.service.engine.running):
            assert reader.is_alive()
    reader.join(30)

    assert got[:2] == ([200, None] if stream else [503, "1"])
    error = json.loads([line for line in got[2:] if line][-1].removeprefix("data: "))["error"]
    assert error["code"] == "server/closing"
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_cut_short_at_the_end_is_told_so(
    serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []
    waited: list[Any] = []
    begun = threading.Event()

    def stream(url: str) -> None:
        with httpx.stream("POST", url, json=BODY | {"stream": True, "n": 3}) as answer:
            for line in answer.iter_lines():
                lines.append(line)
                begun.set()

    def wait(url: str) -> None:
        waited.append(httpx.post(url, json=BODY, timeout=60))

    with serve(shutdown_timeout_s=0) as server:
        url = f"{server.url}/v1/completions"
        readers = [
            threading.Thread(target=work, args=(url,), daemon=True) for work in (stream, wait)
        ]
        readers[0].start()
        assert begun.wait(30)
        readers[1].start()
        while not server.service.engine.waiting:
            time.sleep(0.01)
    for reader in readers:
        reader.join(30)

    last = json.loads([line for line in lines if line][-1].removeprefix("data: "))
    (refused,) = waited
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert last == refused.json()
    assert last["error"]["code"] == "server/closing"
    assert not any(record.exc_info for record in caplog.records)


def test_a_draft_that_is_never_right_is_logged_once(
    serve: Any,
    loaded: Generator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What Python's warnings tell is lost in a server."""
    monkeypatch.setattr(AcceptanceMonitor, "NONE_LIMIT", 1)
    monkeypatch.setattr(loaded, "_monitor", AcceptanceMonitor(CAUSES["dspark"]))
    with serve() as server, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            body = {"prompt": "9 8 x", "max_tokens": 48, "temperature": 1.5, "seed": 3}
            answer = httpx.post(f"{server.url}/v1/completions", json=body | {"ignore_eos": True})
            assert answer.status_code == 200
    logged = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(logged) == 1
    assert "no proposed token was accepted" in logged[0]
    assert CAUSES["dspark"].none in logged[0]
