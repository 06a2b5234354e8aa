"""`edgecc passes`."""

from __future__ import annotations

from dataclasses import replace

import click

from edgecc.cli.options import Command, common
from edgecc.cli.output import Console, counted, print_text
from edgecc.errors import Severity, UsageError


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
    shown = 0
    for known in sorted(registered()):
        try:
            found = get_pass(known)
        except UsageError as error:  # of another package: those that work are listed all the same
            console.finding(replace(error.diagnostics[0], severity=Severity.WARNING))
            continue
        print_text(f"{known:<24}{manual_of(found).summary}\n")
        shown += 1
    return console.ok(counted(shown, "pass"))
