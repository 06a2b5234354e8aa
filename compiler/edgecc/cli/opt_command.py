"""`edgecc opt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgecc.cli.ir_input import folders_of, read_with_checkpoints
from edgecc.cli.options import Command, common
from edgecc.cli.output import Console, counted
from edgecc.cli.pipeline_flags import pipeline, pipeline_options
from edgecc.cli.print_ir import print_ir, print_ir_options
from edgecc.cli.text_output import text_file, write_text
from edgecc.paths import ir_folder, refuse_inside

if TYPE_CHECKING:
    from edgecc.passes.manager import PassTiming


@click.command(cls=Command, name="opt", short_help="Run passes on IR text.")
@click.argument("file", default="-")
@pipeline_options
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
    from edgecc.ir import print_module
    from edgecc.passes import PassContext
    from edgecc.passes.manager import PassManager
    from edgecc.reproduction import KeepReproducer, Runner

    passes, device = pipeline(flags)
    dump = None if flags["dump_ir"] is None else ir_folder(flags["dump_ir"])
    module = read_with_checkpoints(file, flags["checkpoints"])
    folders = folders_of(module)
    output = text_file(flags["output"], folders)
    timing = text_file(flags["timing_json"], folders, flag="--timing-json")
    if dump is not None:
        for folder in folders:
            refuse_inside(dump, folder, "--dump-ir")
    ctx = PassContext(device)
    manager = PassManager(
        passes,
        verify_each=flags["verify_each"],
        dump_dir=dump,
        measure_memory=bool(flags["timing"] or timing),
        instruments=print_ir(console, flags),
        check=flags["check"],
        on_mismatch=KeepReproducer(Runner(device, flags["check"]), dump or Path()),
    )
    manager.run(module, ctx)
    say = console.always if flags["explain"] else console.detail
    for line in (*map(str, ctx.remarks), *manager.unchecked()):
        say(line)
    if flags["timing"]:
        console.info(_table(manager.timings, checked=bool(flags["check"])))
    if timing is not None:
        rows = [{f: getattr(t, f) for f in t.__dataclass_fields__} for t in manager.timings]
        write_text(timing, json.dumps(rows, indent=1) + "\n")
    write_text(output, print_module(module, locations=flags["locations"]))
    changed = sum(t.changed for t in manager.timings)
    return console.ok(f"{counted(len(passes), 'pass')}, {changed} changed something")


def _table(timings: list[PassTiming], *, checked: bool) -> str:
    head = f"{'pass':<24}{'ms':>9}{'peak KiB':>10}{'nodes':>8}{'weights':>9}  changed"
    rows = [
        f"{t.name:<24}{t.seconds * 1e3:>9.2f}{t.peak_bytes / 1024:>10.0f}"
        f"{t.nodes:>8}{t.weights:>9}  {'yes' if t.changed else 'no':<7}"
        for t in timings
    ]
    if checked:
        head += f"{'check ms':>10}"
        rows = [f"{r}{t.check_seconds * 1e3:>10.0f}" for r, t in zip(rows, timings, strict=True)]
    return "\n".join(line.rstrip() for line in (head, *rows))
