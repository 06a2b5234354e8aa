"""Work in a child process: results, errors, progress, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from edgecc.backends.tensorrt.child import can_fork, run_in_child
from edgecc.errors import (
    BackendError,
    Diagnostic,
    EdgeccError,
    InternalError,
    LegalizeError,
    ResourceError,
    UnsupportedError,
)

pytestmark = pytest.mark.skipif(not can_fork(), reason="no process can be copied here")


def run(work, progress=lambda *_: None, tick=lambda: None):
    return run_in_child(work, progress, tick, name="it")


def test_a_result_and_files_come_back_and_nothing_else(tmp_path):
    seen = []

    def work(report):
        seen.append(1)
        (tmp_path / "plan").write_bytes(b"abc")
        return {"pid": os.getpid()}

    assert run(work)["pid"] != os.getpid()
    assert (tmp_path / "plan").read_bytes() == b"abc"
    assert seen == []


def test_progress_in_order():
    def work(report):
        for step in range(100):
            report("phase", step, 100)

    seen = []
    run(work, lambda *step: seen.append(step))
    assert seen == [("phase", step, 100) for step in range(100)]


@pytest.mark.parametrize(
    "error",
    [
        UnsupportedError("tensorrt/build", "no", where="@g, linear", notes=["a", "b"], help="c"),
        LegalizeError(Diagnostic("a/b", "one"), Diagnostic("a/c", "two")),
        MemoryError("12 bytes"),
        OSError(28, "No space left on device", "/x"),
        KeyboardInterrupt(),
        ValueError("odd"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_errors_come_back_as_they_are(error):
    def work(report):
        raise error

    with pytest.raises(type(error)) as caught:
        run(work)
    assert type(caught.value) is type(error)
    assert str(caught.value) == str(error)
    if isinstance(error, EdgeccError):
        assert caught.value.diagnostics == error.diagnostics
    else:
        assert "in the process of the builder" in caught.value.__notes__[0]


def test_an_error_that_cannot_be_pickled():
    class Local(Exception):
        pass

    def work(report):
        raise Local("secret")

    with pytest.raises(InternalError, match="Local: secret"):
        run(work)


@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), ResourceError, "memory ran out"),
        (lambda: os.kill(os.getpid(), signal.SIGUSR2), BackendError, "signal SIGUSR2"),
        (lambda: os._exit(0), BackendError, "exit code 0"),
    ],
)
def test_an_end_without_a_result(end, error, message):
    with pytest.raises(error, match=message):
        run(lambda report: end())


@pytest.mark.parametrize("where", ["progress", "tick"])
def test_what_the_parent_raises_ends_the_child(tmp_path, where):
    pid = tmp_path / "pid"

    def work(report):
        pid.write_text(str(os.getpid()))
        report("begun", 0, 1)
        time.sleep(600)

    def stop(*_):
        if where == "progress" or pid.exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(work, **{where: stop})
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_where_no_process_can_be_copied(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert run(lambda report: os.getpid()) == os.getpid()
