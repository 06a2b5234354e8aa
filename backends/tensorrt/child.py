"""Runs a builder in a child process: it can be stopped at any time, and its memory is its own.

A builder works for minutes in calls that look at no signal. As a child it is killed within a
moment when the user interrupts, and when it takes more memory than there is, it is the child that
the system ends, and the compile can say so. Each build also starts from the same state, whatever
was built before it.

Where a process cannot be copied (no `fork`, or a CUDA driver that is in use and does not survive
it), the work is done in the process itself.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from edgecc.backends.base import Progress
from edgecc.errors import BackendError, EdgeccError, InternalError, ResourceError

T = TypeVar("T")

TICK_S = 0.25
"""How often the bar moves while the builder says nothing."""

_PR_SET_PDEATHSIG = 1
_OOM_SCORE = "500"
"""The child holds the memory: the system shall end it, and not the process that can tell."""


def run_in_child(
    work: Callable[[Progress], T],
    progress: Progress,
    tick: Callable[[], None] = lambda: None,
    *,
    name: str,
) -> T:
    """The result of `work(progress)`, computed in a child process if that is possible.

    Args:
        work: Returns something that can be pickled; what it changes is lost, but for files.
        progress: Called in this process with what the work reports.
        tick: Called a few times a second while the work goes on.
        name: Of the work, for messages.

    Raises:
        ResourceError: The system ended the child, most likely for its memory.
        BackendError: The child crashed.
        BaseException: Whatever the work raised. What `progress` or `tick` raise, and
            interruptions, end the child.
    """
    if not can_fork():
        return work(progress)
    ours, theirs = Pipe(duplex=False)
    with ours, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads: the child needs none of them
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            _work(work, theirs, parent)
        theirs.close()
        try:
            found = _listen(ours, progress, tick)
        except BaseException:
            os.kill(child, signal.SIGKILL)
            raise
        finally:
            _, status = os.waitpid(child, 0)
    if not found:
        raise _ended(status, name)
    kind, value = found
    if kind == "error":
        raise value
    result: T = value
    return result


def can_fork() -> bool:
    """Whether a copy of this process can build."""
    if sys.platform != "linux":
        return False
    with suppress(OSError):
        return "/libcuda.so" not in Path("/proc/self/maps").read_text(errors="replace")
    return False


def _listen(pipe: Connection, progress: Progress, tick: Callable[[], None]) -> tuple[str, Any]:
    """Pass on what the child reports; its last message, or nothing if it ended without one."""
    while True:
        tick()
        if not pipe.poll(TICK_S):
            continue
        try:
            kind, value = pipe.recv()
        except (EOFError, OSError):
            return "", None
        if kind != "progress":
            return kind, value
        progress(*value)


def _work(work: Callable[[Progress], Any], pipe: Connection, parent: int) -> NoReturn:
    """All that the child does. It never returns to the code of its parent."""
    code = 1
    try:
        _obey(parent)
        pipe.send_bytes(_message(work, lambda *step: pipe.send(("progress", step))))
        code = 0
    except BaseException:  # the parent is gone, or has closed the pipe
        code = 1
    finally:
        os._exit(code)


def _obey(parent: int) -> None:
    """Leave signals to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


def _message(work: Callable[[Progress], Any], report: Progress) -> bytes:
    """What the work gives, or how it failed, pickled."""
    try:
        return pickle.dumps(("result", work(report)))
    except BaseException as error:
        if not isinstance(error, EdgeccError):
            error.add_note(f"in the process of the builder: {traceback.format_exc()}")
        with suppress(Exception):
            data = pickle.dumps(("error", error))
            pickle.loads(data)
            return data
        text = f"{type(error).__name__}: {error}"
        return pickle.dumps(("error", InternalError("tensorrt/builder", text)))


def _ended(status: int, name: str) -> EdgeccError:
    """The error for a child that ended without a result."""
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return ResourceError(
            "resources/memory",
            f"the system ended the builder of {name}: most likely memory ran out",
            help=LESS_MEMORY,
        )
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return BackendError(
        "tensorrt/crashed",
        f"the builder of {name} crashed: {how}",
        help="report it with the bundle's command line and the version of the builder",
    )


LESS_MEMORY = "leave weights out of the engines with --weights bind, or build on a larger machine"
"""What to do when a builder does not get the memory it needs."""
