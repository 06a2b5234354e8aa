"""`edgecc inspect`."""

from __future__ import annotations

from typing import Any

import click

from edgecc.cli.options import Command, common, offline_option
from edgecc.cli.output import Console, print_json, print_text, visible


@click.command(cls=Command, name="inspect", short_help="Show a checkpoint or a bundle.")
@click.argument("path")
@click.option("--weights", "show_weights", is_flag=True, help="List every weight.")
@offline_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@common
def command(console: Console, path: str, show_weights: bool, offline: bool, as_json: bool) -> int:
    """Show what PATH, a checkpoint or a bundle, holds. Reads metadata only.

    A checkpoint can also be given by its id on the model hub, org/name[@revision].
    """
    from edgecc.inspection import inspect_path

    facts = inspect_path(path, offline=offline)
    if as_json:
        print_json(facts)
    else:
        print_text(visible(_render(facts, show_weights)) + "\n")
    return console.ok(f"{facts['kind']} {path}")


def _render(facts: dict[str, Any], show_weights: bool) -> str:
    from edgecc.engine_facts import engine_lines

    lines: list[str] = []
    for key, value in facts.items():
        if key == "engines":
            lines += engine_lines(facts, weights=show_weights)
        elif key == "runs_on":
            continue
        elif key == "weights":
            if show_weights:
                lines.append("weights")
                lines += [_weight(name, w) for name, w in value.items()]
        elif isinstance(value, dict):
            lines.append(key)
            lines += [f"  {k:<30}  {_short(v)}" for k, v in value.items()]
        elif isinstance(value, list):
            lines.append(key)
            lines += [f"  {_short(item)}" for item in value]
        else:
            lines.append(f"{key:<26}{value}")
    return "\n".join(lines)


def _weight(name: str, weight: dict[str, Any]) -> str:
    shape = "x".join(map(str, weight["shape"]))
    return f"  {name}  {weight['encoding']} {shape}  {weight['bytes']:,} bytes"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_short(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
