"""The `--print-ir-*` flags of commands that run passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgecc.cli.output import Console

if TYPE_CHECKING:
    from edgecc.passes.instruments import Instrument

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS = (
    click.option("--print-ir-before", multiple=True, metavar="PASS", help="Show the IR before it."),
    click.option("--print-ir-after", multiple=True, metavar="PASS", help="Show the IR after it."),
    click.option("--print-ir-after-all", is_flag=True, help="Show the IR after each pass."),
    click.option("--print-ir-after-change", is_flag=True, help="Only where something changed."),
)


def print_ir_options(function: F) -> F:
    """Add the four flags."""
    for option in reversed(_FLAGS):
        function = option(function)
    return function


def print_ir(console: Console, flags: Mapping[str, Any]) -> list[Instrument]:
    """The instrument the flags ask for; IR goes to standard error."""
    from edgecc.passes import get_pass
    from edgecc.passes.instruments import PrintIr

    for name in (*flags["print_ir_before"], *flags["print_ir_after"]):
        get_pass(name)  # an unknown name would print nothing, silently
    everything = flags["print_ir_after_all"] or flags["print_ir_after_change"]
    if not (everything or flags["print_ir_before"] or flags["print_ir_after"]):
        return []
    return [
        PrintIr(
            console.always,
            before=flags["print_ir_before"],
            after=None if everything else flags["print_ir_after"],
            on_change=flags["print_ir_after_change"] and not flags["print_ir_after_all"],
        )
    ]
