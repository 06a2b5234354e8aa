"""Where output goes: results to standard output, everything else to standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import click

from edgecc.errors import Diagnostic, Severity

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
        color = "always" if "--color=always" in arguments else "auto"
        return cls(color=use_color(color), debug="--debug" in arguments)

    def info(self, text: str) -> None:
        """A line for people, unless quiet."""
        if self.verbosity >= 0:
            click.echo(text, err=True)

    def always(self, text: str) -> None:
        """A line the user asked for by a flag: shown even when quiet."""
        click.echo(text, err=True)

    def detail(self, text: str) -> None:
        """A line shown with `-v`."""
        if self.verbosity >= 1:
            click.echo(text, err=True)

    def diagnostic(self, diagnostic: Diagnostic) -> None:
        """A finding, with its severity coloured."""
        head, _, rest = diagnostic.render().partition(":")
        if self.color:
            head = click.style(head, fg=_COLORS[diagnostic.severity], bold=True)
        click.echo(f"{head}:{rest}", err=True, color=self.color)

    def ok(self, text: str) -> int:
        """The last line of a command that worked; returns 0."""
        if self.verbosity >= 0:
            click.echo(f"edgecc: ok {text}", err=True)
        return 0

    def failed(self, id: str, message: str, code: int) -> int:
        """The last line of a command that failed; returns the exit code."""
        first = message.splitlines()[0] if message else ""
        click.echo(f"edgecc: error[{id}]: {first}", err=True)
        return code

    def progress(self) -> Callable[[str, int, int], None]:
        """A progress callback: a bar on a terminal, one line per stage otherwise."""
        if self.progress_mode == "none" or self.verbosity < 0:
            return lambda stage, done, total: None
        if self.progress_mode == "auto" and sys.stderr.isatty():
            return _bar()
        return _lines()


def use_color(choice: str) -> bool:
    """Whether to colour standard error: `always`, `never`, or `auto` (NO_COLOR, terminal)."""
    if choice == "auto":
        return sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return choice == "always"


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(value, ensure_ascii=False, sort_keys=True))


def _lines() -> Callable[[str, int, int], None]:
    seen: dict[str, float] = {}

    def report(stage: str, done: int, total: int) -> None:
        name = stage.split(" ")[0]
        if name not in seen:
            seen[name] = time.perf_counter()
            click.echo(f"edgecc: {name}", err=True)

    return report


def _bar() -> Callable[[str, int, int], None]:
    from rich.console import Console as RichConsole
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        console=RichConsole(stderr=True),
        transient=True,
    )
    tasks: dict[str, TaskID] = {}

    def report(stage: str, done: int, total: int) -> None:
        name = stage.split(" ")[0]
        if not tasks:
            bar.start()
        if name not in tasks:
            tasks[name] = bar.add_task(name, total=total or None)
        bar.update(tasks[name], completed=done, total=total or None)
        if all(t.finished for t in bar.tasks):
            bar.stop()
            bar.refresh()

    return report
