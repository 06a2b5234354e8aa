"""`edgecc opt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgecc.cli.ir_input import STDIN, read_ir
from edgecc.cli.lift_command import write_text
from edgecc.cli.options import Command, common
from edgecc.cli.output import Console
from edgecc.cli.print_ir import print_ir, print_ir_options
from edgecc.errors import UsageError
from edgecc.paths import ir_folder

if TYPE_CHECKING:
    from edgecc.ir import Module
    from edgecc.passes.manager import PassTiming


@click.command(cls=Command, name="opt", short_help="Run passes on IR text.")
@click.argument("file", default="-")
@click.option(
    "-p",
    "--pass-pipeline",
    default="",
    metavar="PIPELINE",
    help="For example bind-shared-weights,fuse-qkv,lower-encodings{device=cpu}.",
)
@click.option("-o", "--output", metavar="FILE", help="Default: standard output.")
@click.option("--device", metavar="NAME", help="Device for passes that ask for one.")
@click.option("--default-pipeline", is_flag=True, help="Run what compile runs for --device.")
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="ROLE=DIR",
    help="Where a checkpoint lies now, instead of the folder the text names.",
)
@print_ir_options
@click.option(
    "--dump-ir", metavar="DIR", help="Numbered files before the first and after each pass."
)
@click.option(
    "--verify-each/--no-verify-each",
    default=True,
    show_default=True,
    help="Check the rules of the IR after each pass.",
)
@click.option("--timing", is_flag=True, help="A table of seconds and sizes per pass.")
@click.option("--timing-json", metavar="FILE", help="Write the same as JSON.")
@click.option("--explain", is_flag=True, help="Where each pass applied, and why not elsewhere.")
@click.option("--locations", is_flag=True, help="Also print where each node comes from.")
@common
def command(console: Console, file: str, **flags: Any) -> int:
    """Run passes on the IR text in FILE (default: standard input); write IR text."""
    from edgecc.devices import get_device
    from edgecc.ir import print_module, verify_or_raise
    from edgecc.passes import PassContext
    from edgecc.passes.default import default_pipeline
    from edgecc.passes.manager import PassManager
    from edgecc.passes.pipeline import parse_pipeline

    device = get_device(flags["device"]) if flags["device"] else None
    passes = parse_pipeline(flags["pass_pipeline"]) if flags["pass_pipeline"] else []
    if flags["default_pipeline"]:
        if device is None or passes:
            raise UsageError(
                "usage/pipeline", "--default-pipeline goes with --device, without --pass-pipeline"
            )
        passes = default_pipeline(device)
    module = _read(file, flags["checkpoints"])
    verify_or_raise(module, f"in {file}")
    ctx = PassContext(device)
    manager = PassManager(
        passes,
        verify_each=flags["verify_each"],
        dump_dir=None if flags["dump_ir"] is None else ir_folder(flags["dump_ir"]),
        measure_memory=bool(flags["timing"] or flags["timing_json"]),
        instruments=print_ir(console, flags),
    )
    manager.run(module, ctx)
    for remark in ctx.remarks:
        (console.always if flags["explain"] else console.detail)(str(remark))
    if flags["timing"]:
        console.info(_table(manager.timings))
    if flags["timing_json"]:
        rows = [{f: getattr(t, f) for f in t.__dataclass_fields__} for t in manager.timings]
        Path(flags["timing_json"]).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    write_text(flags["output"], print_module(module, locations=flags["locations"]))
    changed = sum(t.changed for t in manager.timings)
    return console.ok(f"{len(passes)} passes, {changed} changed something")


def _read(file: str, checkpoints: tuple[str, ...]) -> Module:
    from edgecc.driver import attach_checkpoints

    folders = {}
    for text in checkpoints:
        role, equals, folder = text.partition("=")
        if not equals or not folder:
            raise UsageError("usage/checkpoint", f"--checkpoint {text!r}: expected ROLE=DIR")
        folders[role] = folder
    module = read_ir(file)
    near = None if file == STDIN else Path(file).parent
    attach_checkpoints(module, near=near, folders=folders)
    return module


def _table(timings: list[PassTiming]) -> str:
    head = f"{'pass':<24}{'ms':>9}{'peak KiB':>10}{'nodes':>8}{'weights':>9}  changed"
    rows = [
        f"{t.name:<24}{t.seconds * 1e3:>9.2f}{t.peak_bytes / 1024:>10.0f}"
        f"{t.nodes:>8}{t.weights:>9}  {'yes' if t.changed else 'no'}"
        for t in timings
    ]
    return "\n".join([head, *rows])
