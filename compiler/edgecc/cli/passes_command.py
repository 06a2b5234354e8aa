"""`edgecc passes`."""

from __future__ import annotations

import click

from edgecc.cli.options import Command, common
from edgecc.cli.output import Console, print_text


@click.command(cls=Command, name="passes", short_help="List the passes, or show one's manual.")
@click.argument("name", required=False)
@common
def command(console: Console, name: str | None) -> int:
    """List all passes, or print the manual of pass NAME."""
    from edgecc.passes import get_pass, registered
    from edgecc.passes.manual import manual_of

    if name is not None:
        print_text(f"{manual_of(get_pass(name))}\n")
        return console.ok(name)
    for known in sorted(registered()):
        print_text(f"{known:<24}{manual_of(get_pass(known)).summary}\n")
    return console.ok(f"{len(registered())} passes")
