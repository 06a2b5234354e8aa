"""Signals that ask a program to end, as an exception, so that it cleans up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


@contextmanager
def termination_raises() -> Iterator[None]:
    """Let the signals that ask a program to end raise SystemExit, where nobody handles them."""
    taken = []
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _raise_exit)
                taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _raise_exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
