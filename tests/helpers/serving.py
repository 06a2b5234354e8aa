"""Servers: in a thread of its own, and `edgecc serve` as a process of its own."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgecc.backends.runtime import Generator
from helpers.command_line import arguments_of, environment

if TYPE_CHECKING:
    from edgecc.backends.server import Server


@contextmanager
def serving(
    generator: Generator, *, shutdown_timeout_s: int = 10, **options: Any
) -> Iterator[Server]:
    """A server of the model `tiny` that listens at a free port."""
    from edgecc.backends.server import Server, ServerOptions, bind

    started = threading.Event()
    server = Server(
        generator,
        ServerOptions(model_name="tiny", **options),
        bind("127.0.0.1", 0),
        on_start=lambda url: started.set(),
        shutdown_timeout_s=shutdown_timeout_s,
    )
    thread = threading.Thread(target=server.serve_until_told, daemon=True)
    thread.start()
    try:
        assert started.wait(30)
        yield server
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@dataclass
class Served:
    """A server under way.

    Attributes:
        process: It.
        lines: What it has said on standard error, one line each.
    """

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    _said: threading.Condition = field(default_factory=threading.Condition)
    _ended: bool = False

    def wait_for(self, text: str, seconds: float = 120) -> str:
        """The first line with a text, once it is there."""
        with self._said:
            self._said.wait_for(lambda: self._find(text) or self._ended, seconds)
            found = self._find(text)
        assert found, self.lines
        return found

    @property
    def url(self) -> str:
        """Where it listens, once it does."""
        return self.wait_for("serving ").split()[-1].removesuffix("/v1")

    def _find(self, text: str) -> str:
        return next((line for line in self.lines if text in line), "")

    def read(self) -> None:
        """Take what it says, until it ends."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._said:
                self.lines.append(line.rstrip("\n"))
                self._said.notify_all()
        with self._said:
            self._ended = True
            self._said.notify_all()


@contextmanager
def served(*arguments: object, **variables: str) -> Iterator[Served]:
    """Serve at a free port until the end of the block; killed if it does not end by itself.

    Args:
        arguments: Of `edgecc serve`.
        variables: Of its environment.
    """
    command: Sequence[str] = arguments_of("serve", *arguments, "--port", 0)
    with subprocess.Popen(
        command, env=environment(**variables), stderr=subprocess.PIPE, text=True
    ) as process:
        server = Served(process)
        reader = threading.Thread(target=server.read, daemon=True)
        reader.start()
        try:
            yield server
            process.terminate()
            process.wait(60)
        finally:
            process.kill()
            reader.join(60)
