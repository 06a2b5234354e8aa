"""`edgecc diff`."""

from __future__ import annotations

import click

from edgecc.cli.ir_input import STDIN, read_ir
from edgecc.cli.options import Command, common
from edgecc.cli.output import Console, print_text
from edgecc.errors import UsageError


@click.command(cls=Command, name="diff", short_help="Compare two IR texts.")
@click.argument("first")
@click.argument("second")
@click.option(
    "-U",
    "--context",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help="Equal lines to show around a difference.",
)
@common
def command(console: Console, first: str, second: str, context: int) -> int:
    """Compare the IR texts FIRST and SECOND by structure; exit 5 if they differ.

    Comments, spacing and locations do not count.
    """
    from edgecc.ir.compare import diff

    if first == second == STDIN:
        raise UsageError("usage/diff", "only one of the two texts can be standard input")
    a, b = read_ir(first), read_ir(second)
    text = diff(a, b, names=(first, second), context=context)
    if not text:
        return console.ok("equal")
    print_text(text + "\n")
    changed = sum(
        1 for line in text.splitlines() if line[:1] in "+-" and not line.startswith(("+++", "---"))
    )
    return console.failed("ir/differ", f"{changed} lines differ", 5)
