"""`edgecc serve`: what is checked before the model is loaded, and a whole life of a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import edgecc
from edgecc.cli import main
from helpers.dflash import write_dflash_pair
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


def test_a_bundle_is_compiled_already(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["serve", str(tmp_path), "--port", "0", "--max-batch-size", "2"]

    assert main(arguments) == 2
    assert "usage/compiled" in capsys.readouterr().err


def test_a_threshold_needs_a_confidence_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told at the start: else each request would fail."""
    target, draft = write_dflash_pair(tmp_path, "random")
    edgecc.compile(target, draft, out=tmp_path / "b", max_model_len=64, verify="none")
    arguments = ["serve", str(tmp_path / "b"), "--port", "0", "--confidence-threshold", "0.5"]

    assert main(arguments) == 2
    assert "request/no-confidence" in capsys.readouterr().err


def test_a_damaged_bundle_of_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same size: that is seen when it is loaded, and nobody compiles it by hand."""
    arguments = ["serve", str(TARGET), "--cache-dir", str(tmp_path), "--max-model-len", "64"]
    assert main([*arguments, "--port", "0", "--confidence-threshold", "0.5"]) == 2  # compiled
    (bundle,) = (tmp_path / "bundles").glob(f"{TARGET.name}-*")
    tokenizer = bundle / "tokenizer" / "tokenizer.json"
    tokenizer.write_bytes(b"?" * tokenizer.stat().st_size)
    capsys.readouterr()

    assert main([*arguments, "--port", "0"]) == 3
    err = capsys.readouterr().err
    assert "tokenizer.json" in err
    assert f"remove {bundle}" in err


def test_the_life_of_a_server(tmp_path: Path) -> None:
    target, cache = tmp_path / "tiny", tmp_path / "cache"
    target.symlink_to(TARGET)
    config = json.dumps({"method": "dspark", "model": str(DRAFT), "num_speculative_tokens": 3})
    command = [sys.executable, "-m", "edgecc", "serve", str(target), "--port", "0"]
    command += ["--speculative-config", config, "--cache-dir", str(cache)]
    command += ["--max-model-len", "128", "--served-model-name", "tiny", "-v"]
    env = os.environ | {"PYTHONPATH": str(ROOT / "compiler"), "EDGECC_API_KEY": "secret"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        watchdog = threading.Timer(120, server.kill)
        watchdog.start()
        try:
            line = next(line for line in server.stderr if line.startswith("serving tiny at "))
            answer = httpx.post(
                f"{line.split()[-1]}/completions",
                json={"prompt": "a secret text", "max_tokens": 2, "ignore_eos": True},
                headers={"Authorization": "Bearer secret"},
                timeout=60,
            )
            server.send_signal(signal.SIGTERM)
            rest, out = server.stderr.read(), server.stdout.read()
            code = server.wait()
        finally:
            watchdog.cancel()
            server.kill()

    usage = answer.json()["usage"]
    assert usage["completion_tokens"] == 2
    assert usage["draft_tokens"] > 0
    (bundle,) = (cache / "bundles").glob(f"{TARGET.name}-*")
    with edgecc.load(bundle) as generator:
        assert generator.model.draft is not None
        assert generator.model.draft.num_speculative_tokens == 3
    assert code == 0
    assert rest.splitlines()[-1] == "edgecc: ok stopped"
    assert "secret text" not in rest
    assert '"POST /v1/completions HTTP/1.1" 200 OK' in rest
    assert out == ""
