"""`edgecc explain`."""

from __future__ import annotations

from pathlib import Path

import click

from edgecc.cli.options import Command, common
from edgecc.cli.output import Console, print_text, visible
from edgecc.errors import UsageError


@click.command(cls=Command, name="explain", short_help="Say where a tensor or node comes from.")
@click.argument("path")
@click.argument("name", required=False)
@common
def command(console: Console, path: str, name: str | None) -> int:
    """Say where NAME in PATH, a bundle or IR text, comes from, and what touched and uses it.

    NAME is a weight (@symbol) or, in IR text, a value (%x or @graph/%x); globs are allowed. With
    one argument, the id of a finding or the name of a rule: what it means and what to do.
    """
    if name is None:
        if Path(path).exists():
            raise UsageError(
                "usage/explain",
                f"{path} is there, but not what is to be explained",
                help=f"name a weight or a value: edgecc explain {path} '@*'",
            )
        from edgecc.contract.rule import find_manual
        from edgecc.contract.rules import RULES

        print_text(f"{find_manual(path, RULES)}\n")
        return console.ok(path)
    from edgecc.explanation import explain

    print_text(visible(explain(Path(path), name)) + "\n")
    return console.ok(name)
