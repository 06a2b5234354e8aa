"""MkDocs hook: a page for each command, made of its own help.

Nothing that is made here is committed.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from edgecc.cli.main import cli

INDEX = "cli.md"
WIDTH = 100
"""Columns of the help, as code blocks show them."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages below the index page in the navigation."""
    for entry in config.nav or ():
        if isinstance(entry, dict) and entry.get("Command line") == INDEX:
            entry["Command line"] = [INDEX, *({name: path(name)} for name in names())]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name in names():
        files.append(File.generated(config, path(name), content=command_page(name)))
    return files


def path(name: str) -> str:
    """The page of a command, relative to the folder of the documentation."""
    return f"commands/{name}.md"


def names() -> list[str]:
    """All commands."""
    return cli.list_commands(_context(cli, "edgecc"))


def command_page(name: str) -> str:
    """The page of one command: what it does, its help, and that of its subcommands."""
    command = cli.get_command(_context(cli, "edgecc"), name)
    assert command is not None
    summary = command.get_short_help_str(limit=200)
    blocks = [f"```text\n{text}\n```" for text in _helps(command, f"edgecc {name}")]
    more = "[The reference](../cli.md) has tables of flags, exit codes and variables."
    return "\n\n".join([f"# edgecc {name}", summary, *blocks, more]) + "\n"


def _helps(command: click.Command, called: str) -> Iterator[str]:
    context = _context(command, called)
    yield command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _helps(inner, f"{called} {name}")


def _context(command: click.Command, called: str) -> click.Context:
    return click.Context(command, info_name=called, terminal_width=WIDTH, max_content_width=WIDTH)
