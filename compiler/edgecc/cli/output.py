"""Where output goes: results to standard output, everything else to standard error."""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

import click

from edgecc.errors import Diagnostic, Severity

if TYPE_CHECKING:
    from rich.progress import Progress

_COLORS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


class Console:
    """Messages of one command.

    Args:
        verbosity: -1 quiet, 0 normal, 1 and 2 more detail.
        color: Whether standard error gets colours.
        debug: Show tracebacks of errors.
        progress: `auto`, `plain` or `none`.
    """

    def __init__(
        self,
        verbosity: int = 0,
        *,
        color: bool = False,
        debug: bool = False,
        progress: str = "auto",
    ) -> None:
        self.verbosity = verbosity
        self.color = color
        self.debug = debug
        self.progress_mode = progress

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Console:
        """For errors that come before arguments are parsed."""
        joined = " ".join(arguments).replace("--color=", "--color ")
        found = re.search(r"(?:^| )--color (always|never)(?: |$)", joined)
        color = found[1] if found else "auto"
        return cls(color=use_color(color), debug="--debug" in arguments)

    def info(self, text: str) -> None:
        """A line for people, unless quiet."""
        if self.verbosity >= 0:
            self.always(text)

    def always(self, text: str) -> None:
        """A line the user asked for by a flag: shown even when quiet."""
        _say(text)

    def detail(self, text: str) -> None:
        """A line shown with `-v`."""
        if self.verbosity >= 1:
            self.always(text)

    def diagnostic(self, diagnostic: Diagnostic) -> None:
        """A finding, with its severity coloured."""
        head, _, rest = diagnostic.render().partition(":")
        style = {"fg": _COLORS[diagnostic.severity], "bold": True} if self.color else {}
        _say(f":{rest}", head=head, **style)

    def finding(self, diagnostic: Diagnostic) -> None:
        """A finding that is told at once; a note is for people, and not shown when quiet."""
        if self.verbosity >= 0 or diagnostic.severity is not Severity.NOTE:
            self.diagnostic(diagnostic)

    def ok(self, text: str) -> int:
        """The last line of a command that worked; returns 0."""
        self.info(f"edgecc: ok {text}")
        return 0

    def failed(self, id: str, message: str, code: int) -> int:
        """The last line of a command that failed; returns the exit code."""
        first = next((line for line in message.splitlines() if line.strip()), "")
        self.always(f"edgecc: error[{id}]: {first}")
        return code

    def progress(self) -> Callable[[str, int, int], None]:
        """A progress callback: a bar on a terminal, one line per stage otherwise."""
        if self.progress_mode == "none" or self.verbosity < 0:
            return lambda stage, done, total: None
        return _bar() if self.progress_mode == "auto" and is_terminal() else _lines()


def _say(text: str, *, head: str = "", **style: Any) -> None:
    """A line on standard error, begun by a head that may be styled.

    The work goes on without messages where nobody reads them any more (`edgecc ... 2>&1 | head`),
    or where they cannot be written.
    """
    stop_bar()
    begin = click.style(visible(head), **style) if style else visible(head)
    with suppress(OSError):
        line = printable(f"{begin}{visible(text)}", sys.stderr)
        click.echo(line, err=True, color=True if style else None)


def is_terminal() -> bool:
    """Whether somebody reads standard error as it comes (it may even be closed)."""
    return sys.stderr is not None and sys.stderr.isatty()


def use_color(choice: str) -> bool:
    """Whether to colour standard error: `always`, `never`, or `auto` (NO_COLOR, terminal)."""
    if choice == "auto":
        return is_terminal() and not os.environ.get("NO_COLOR")
    return choice == "always"


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on standard output, with characters it cannot write as JSON's escapes."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if printable(text, sys.stdout) != text:
        text = json.dumps(value, ensure_ascii=True, sort_keys=True)
    print_text(text + "\n")


def print_text(text: str) -> None:
    """A piece of a result on standard output, at once."""
    stop_bar()
    click.echo(printable(text, sys.stdout), nl=False)


def counted(number: int, noun: str) -> str:
    """A number and its noun: `1 entry`, `2 entries`."""
    if number == 1:
        return f"1 {noun}"
    plural = {"entry": "entries", "pass": "passes"}.get(noun, f"{noun}s")
    return f"{number} {plural}"


def printable(text: str, stream: TextIO | None) -> str:
    """The text with what a stream cannot write as backslash escapes.

    Characters may be outside of a stream's encoding, and names of files may be no Unicode at all.
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if codecs.lookup(encoding).name == "ascii":
        encoding = "utf-8"  # where a locale is not set up, click writes UTF-8
    return text.encode(encoding, "backslashreplace").decode(encoding)


_CONTROLS = {c: f"\\x{c:02x}" for c in (*range(32), *range(127, 160)) if chr(c) not in "\n\t"}


def visible(text: str) -> str:
    """The text with control characters as escapes.

    Names of files and tensors come from others: on a terminal they must not move the cursor, nor
    hide what is said about them.
    """
    return text.translate(_CONTROLS)


def _named(stage: str) -> tuple[str, str]:
    """The name under which a stage is shown, and what it is doing now.

    Stages of one kind, such as all passes, are one; each build is one of its own.
    """
    name, _, phase = stage.partition(": ")
    return name if name.startswith("build ") else name.split(" ")[0], phase


def _lines() -> Callable[[str, int, int], None]:
    seen: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        name, _ = _named(stage)
        if name not in seen:
            seen.add(name)
            _say(f"edgecc: {name}")

    return report


_live: list[Progress] = []
"""The bar on the terminal, if one is drawn now: nothing else may be written meanwhile."""


def stop_bar() -> None:
    """Take the bar off the terminal, so that something else can be written there."""
    while _live:
        _live.pop().stop()


def _bar() -> Callable[[str, int, int], None]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[phase]}"),
        console=RichConsole(stderr=True),
        transient=True,
        redirect_stdout=False,  # results must not end up on standard error
        redirect_stderr=False,
    )
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        name, phase = _named(stage)
        if not _live:
            bar.start()
            _live.append(bar)
        if name not in tasks:
            tasks[name] = bar.add_task(name, total=total or None, phase="")
        bar.update(tasks[name], completed=done, total=total or None, phase=phase)

    return report
