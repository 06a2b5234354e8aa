"""`edgecc convert`."""

from __future__ import annotations

import click

from edgecc.cli.options import Command, common
from edgecc.cli.output import Console


@click.command(cls=Command, name="convert", short_help="Rewrite pickled weights as safetensors.")
@click.argument("folder")
@click.option(
    "-o", "--output", "out", required=True, metavar="DIR", help="Folder to make; must not exist."
)
@common
def command(console: Console, folder: str, out: str) -> int:
    """Rewrite the pytorch_model.bin in FOLDER as safetensors, without running what is in it."""
    from edgecc.conversion import convert

    count = convert(folder, out)
    return console.ok(f"{count} tensors written to {out}")
