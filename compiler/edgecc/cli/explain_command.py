"""`edgecc explain`."""

from __future__ import annotations

from pathlib import Path

import click

from edgecc.cli.options import Command, common
from edgecc.cli.output import Console, print_text


@click.command(cls=Command, name="explain", short_help="Say where a tensor or node comes from.")
@click.argument("path")
@click.argument("name")
@common
def command(console: Console, path: str, name: str) -> int:
    """Say where NAME in PATH, a bundle or IR text, comes from, and what touched and uses it.

    NAME is a weight (@symbol) or, in IR text, a value (%x or @graph/%x); globs are allowed.
    """
    from edgecc.explanation import explain

    print_text(explain(Path(path), name) + "\n")
    return console.ok(name)
