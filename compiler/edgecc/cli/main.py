"""Entry point: runs a command, turns errors into diagnostics and exit codes.

Exit codes: 0 done, 1 internal error (ours), 2 usage, 3 bad checkpoint, pair or bundle,
4 unsupported, 5 verification mismatch, 6 resources, 7 network or hub, 130 interrupted,
143 terminated.

The last line on standard error is always `edgecc: ok ...` or `edgecc: error[id]: ...`.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress

import click

import edgecc
from edgecc.cli.output import Console, stop_bar
from edgecc.errors import EdgeccError
from edgecc.signals import termination_raises

COMMANDS = {
    "compile": "edgecc.cli.compile_command",
    "check": "edgecc.cli.check_command",
    "run": "edgecc.cli.run_command",
    "serve": "edgecc.cli.serve_command",
    "inspect": "edgecc.cli.inspect_command",
    "verify": "edgecc.cli.verify_command",
    "convert": "edgecc.cli.convert_command",
    "lift": "edgecc.cli.lift_command",
    "opt": "edgecc.cli.opt_command",
    "reduce": "edgecc.cli.reduce_command",
    "diff": "edgecc.cli.diff_command",
    "passes": "edgecc.cli.passes_command",
    "explain": "edgecc.cli.explain_command",
    "cache": "edgecc.cli.cache_command",
}
"""Command name to the module that holds it as `command`."""


class LazyGroup(click.Group):
    """Imports a command when it is used, so that `--help` stays fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order users meet them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command, imported now."""
        if name not in COMMANDS:
            return None
        found: click.Command = importlib.import_module(COMMANDS[name]).command
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is asked for; of one that is misspelled, near ones are told."""
        try:
            return super().resolve_command(ctx, args)
        except click.NoSuchCommand:
            raise click.NoSuchCommand(args[0], possibilities=list(COMMANDS), ctx=ctx) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Summaries without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [
                    ("compile", "Compile a target, alone or with its draft, to a bundle."),
                    ("check", "Check a target and its draft by their metadata."),
                    ("run", "Generate text with a bundle."),
                    ("serve", "Serve a bundle with OpenAI's API."),
                    ("inspect", "Show what a checkpoint or a bundle holds."),
                    ("verify", "Prove a bundle on this machine."),
                    ("convert", "Rewrite pickled weights as safetensors."),
                    ("lift", "Write checkpoints as IR text."),
                    ("opt", "Run passes on IR text."),
                    ("reduce", "Shrink IR text that makes passes fail."),
                    ("diff", "Compare two IR texts."),
                    ("passes", "List the passes, or show the manual of one."),
                    ("explain", "Say where a tensor or node comes from, or what a finding means."),
                    ("cache", "Show or prune the cache of built artifacts."),
                ]
            )


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(edgecc.__version__, message="edgecc %(version)s")
def cli() -> None:
    """Compile speculative-decoding pairs for edge devices, and run them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the program name; `sys.argv[1:]` when not given.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    console = Console.from_arguments(arguments)
    streams = sys.stdout, sys.stderr
    with warnings.catch_warnings(), termination_raises() as received:
        warnings.simplefilter("ignore")  # findings are shown as diagnostics
        try:
            result = cli.main(args=arguments, prog_name="edgecc", standalone_mode=False)
            return int(result) if isinstance(result, int) else 0
        except SystemExit as error:
            if sys.stdout is not streams[0]:  # click's way to say that it met a broken pipe
                sys.stdout, sys.stderr = streams
                return _unread()
            return _exited(console, error)
        except (Exception, KeyboardInterrupt) as error:
            # What a signal raised may arrive as an error of a library.
            return _stopped(console, received.number) or _failed(console, error)
        finally:
            stop_bar()


def _stopped(console: Console, number: int) -> int:
    """The exit code after a signal, 0 if there was none."""
    if number == signal.SIGINT:
        return console.failed("interrupted", "stopped by the user", 130)
    return console.failed("terminated", "stopped by a signal", 128 + number) if number else 0


def _failed(console: Console, error: BaseException) -> int:
    if isinstance(error, EdgeccError):
        return _reported(console, error)
    if isinstance(error, click.ClickException):
        return _usage(console, error)
    if isinstance(error, click.exceptions.Abort | KeyboardInterrupt):
        return _stopped(console, signal.SIGINT)
    return _unforeseen(console, error)


def _reported(console: Console, error: EdgeccError) -> int:
    if console.debug:
        traceback.print_exc()
    for diagnostic in error.diagnostics:
        console.diagnostic(diagnostic)
    for note in getattr(error, "__notes__", ()):
        console.info(f"  {note}")
    return console.failed(error.id, error.diagnostics[0].message, error.exit_code)


def _exited(console: Console, error: SystemExit) -> int:
    """A signal raised it: see `termination_raises`."""
    code = error.code if isinstance(error.code, int) else 143
    return console.failed("terminated", "stopped by a signal", code) if code else 0


def _unread() -> int:
    """The reader of standard output has what it wanted (`edgecc ... | head`): that is no error."""
    with suppress(OSError, ValueError, AttributeError):  # standard output may be anything in tests
        # Python writes what is left at exit: to nowhere, instead of complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _unforeseen(console: Console, error: BaseException) -> int:
    if isinstance(error, MemoryError):
        return console.failed("resources/memory", "not enough memory", 6)
    if isinstance(error, BrokenPipeError):
        return _unread()
    if isinstance(error, OSError):
        return _os_error(console, error)
    return _internal(console)


def _usage(console: Console, error: click.ClickException) -> int:
    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        console.info(error.format_message())
        return console.failed("usage", "no command given", 2)
    if isinstance(error, click.UsageError) and context is not None:
        console.info(context.get_usage())
        console.info(f"Try '{context.command_path} --help' for help.")
    return console.failed("usage", error.format_message(), 2)


def _os_error(console: Console, error: OSError) -> int:
    if console.debug:
        traceback.print_exc()
    name = errno.errorcode.get(error.errno or 0, "")
    where = f" ({error.filename})" if error.filename else ""
    return console.failed("resources/io", f"{error.strerror or error} {name}{where}".strip(), 6)


def _internal(console: Console) -> int:
    """An unforeseen exception: a bug of ours, told without a traceback but with a report."""
    if console.debug:
        traceback.print_exc()
    with tempfile.NamedTemporaryFile(
        "w", prefix="edgecc-report-", suffix=".txt", delete=False, encoding="utf-8"
    ) as report:
        report.write(f"edgecc {edgecc.__version__}, Python {sys.version}\n\n")
        report.write(traceback.format_exc())
    reason = repr(sys.exc_info()[1])
    console.info(f"this is a bug in edgecc; please report it with {report.name}")
    return console.failed("internal", reason, 1)
