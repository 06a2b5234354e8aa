"""`edgecc serve`: what is checked before the model is loaded, and a whole life of a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import edgecc
from edgecc.cli import main
from helpers.goldens import DRAFT, TARGET

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--api-key", "x"], "EDGECC_API_KEY"),
        (["--port", "70000"], "65535"),
        (["--queue-timeout", "0"], "queue-timeout"),
        (["--host", "no such host"], "cannot listen"),
        (["--chat-template", "missing.jinja"], "chat-template"),
    ],
)
def test_flags_that_cannot_be_used(
    arguments: list[str], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["serve", str(tmp_path), *arguments])

    assert code == (6 if "--host" in arguments else 2)
    assert found in capsys.readouterr().err


def test_a_key_variable_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGECC_API_KEY", " , ")

    assert main(["serve", str(tmp_path)]) == 2
    assert "usage/api-key" in capsys.readouterr().err


def test_what_is_no_bundle(tmp_path: Path) -> None:
    assert main(["serve", str(tmp_path), "--port", "0"]) == 3


def test_the_life_of_a_server(tmp_path: Path) -> None:
    out = tmp_path / "tiny"
    edgecc.compile(TARGET, DRAFT, out=out, max_model_len=128, prefill_chunk=64)
    command = [sys.executable, "-m", "edgecc", "serve", str(out), "--port", "0"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "compiler"), "EDGECC_API_KEY": "secret"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        watchdog = threading.Timer(120, server.kill)
        watchdog.start()
        try:
            line = next(line for line in server.stderr if line.startswith("serving tiny at "))
            answer = httpx.post(
                f"{line.split()[-1]}/completions",
                json={"prompt": "a secret text", "max_tokens": 2},
                headers={"Authorization": "Bearer secret"},
                timeout=60,
            )
            server.send_signal(signal.SIGTERM)
            rest = server.stderr.read()
            code = server.wait()
        finally:
            watchdog.cancel()
            server.kill()

    assert answer.json()["usage"]["completion_tokens"] <= 2
    assert code == 143
    assert rest.splitlines()[-1].startswith("edgecc: error[terminated]")
    assert "secret text" not in rest
