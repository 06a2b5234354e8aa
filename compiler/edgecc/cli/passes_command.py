"""`edgecc passes`."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import click

from edgecc.cli.options import Command, common
from edgecc.cli.output import Console, print_text


@click.command(cls=Command, name="passes", short_help="List the passes, or show one's manual.")
@click.argument("name", required=False)
@common
def command(console: Console, name: str | None) -> int:
    """List all passes, or print the manual of pass NAME."""
    from edgecc.passes import get_pass, registered

    if name is not None:
        print_text(manual(get_pass(name)) + "\n")
        return console.ok(name)
    for known in sorted(registered()):
        summary = inspect.cleandoc(get_pass(known).__doc__ or "").splitlines()
        print_text(f"{known:<24}{summary[0] if summary else ''}\n")
    return console.ok(f"{len(registered())} passes")


def manual(cls: type[Any]) -> str:
    """The manual of a pass: its docstring, and its options with types and defaults."""
    lines = [cls.name, "", inspect.cleandoc(cls.__doc__ or "no manual"), ""]
    lines += [
        f"option {f.name.replace('_', '-')}: {f.type}, default {f.default!r}"
        for f in dataclasses.fields(cls.options_type)
    ]
    lines.append(f"requires: {', '.join(cls.requires) or 'nothing'}")
    lines.append(f"ensures: {', '.join(cls.ensures) or 'nothing'}")
    exact = "exact" if cls.tolerance == 0 else f"relative error up to {cls.tolerance:g}"
    lines.append(f"values: {exact}")
    return "\n".join(lines)
