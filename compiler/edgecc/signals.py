"""Signals that ask a program to end, as an exception, so that it cleans up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


class Received:
    """What has arrived so far.

    Attributes:
        number: The signal that came last, 0 if none did. Libraries that are not written in Python
            may turn the exception of a signal into one of their own.
    """

    def __init__(self) -> None:
        self.number = 0

    def interrupt(self, number: int, frame: FrameType | None) -> NoReturn:
        """Handler of SIGINT."""
        self.number = number
        raise KeyboardInterrupt

    def terminate(self, number: int, frame: FrameType | None) -> NoReturn:
        """Handler of the others."""
        self.number = number
        raise SystemExit(128 + number)


@contextmanager
def termination_raises() -> Iterator[Received]:
    """Let the signals that ask a program to end raise SystemExit, where nobody handles them.

    SIGINT raises KeyboardInterrupt, as ever, and is noted too.
    """
    received = Received()
    taken = []
    if threading.current_thread() is threading.main_thread():
        for name, default, handler in (
            ("SIGINT", signal.default_int_handler, received.interrupt),
            ("SIGTERM", signal.SIG_DFL, received.terminate),
            ("SIGHUP", signal.SIG_DFL, received.terminate),
        ):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is default:
                signal.signal(number, handler)
                taken.append((number, default))
    try:
        yield received
    finally:
        for number, default in taken:
            signal.signal(number, default)
