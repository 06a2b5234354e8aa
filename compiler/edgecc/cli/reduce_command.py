"""`edgecc reduce`."""

from __future__ import annotations

from typing import Any

import click

from edgecc.cli.ir_input import folders_of, read_with_checkpoints
from edgecc.cli.options import Command, common
from edgecc.cli.output import Console, counted
from edgecc.cli.pipeline_flags import pipeline, pipeline_options
from edgecc.cli.text_output import text_file, write_text
from edgecc.errors import UsageError


@click.command(cls=Command, name="reduce", short_help="Shrink IR text that makes passes fail.")
@click.argument("file", default="-")
@pipeline_options
@common
def command(console: Console, file: str, **flags: Any) -> int:
    """Shrink the IR text in FILE (default: standard input) and the pipeline while they still fail.

    The same failure is the same error id in the same pass: a crash, a finding of the verifier, a
    property that does not hold, or with --check a value that changes.
    """
    from edgecc.ir import print_module
    from edgecc.reduction import BUDGET
    from edgecc.reproduction import Runner, command_line, reproduce

    passes, device = pipeline(flags)
    if not passes:
        raise UsageError(
            "usage/pipeline", "say which passes fail", help="edgecc reduce FILE -p PIPELINE"
        )
    module = read_with_checkpoints(file, flags["checkpoints"])
    output = text_file(flags["output"], folders_of(module))
    runner = Runner(device, flags["check"])
    report = console.progress()

    def progress(nodes: int, weights: int, tried: int) -> None:
        report("reduce", tried, BUDGET)
        console.detail(f"{tried} tried: {nodes} nodes, {weights} weights")

    found = reproduce(module, passes, runner, progress=progress)
    if found is None:
        checked = "" if flags["check"] else ": wrong values only show with --check N"
        raise UsageError(
            "reduce/nothing",
            f"nothing to reduce: {counted(len(passes), 'pass')} ran without an error",
            where=file,
            help=f"give the pipeline that fails{checked}",
        )
    write_text(output, print_module(found.module))
    console.info(f"still fails: {found.failure}")
    console.info(f"reproduce: {command_line(flags['output'] or '-', found, runner)}")
    sizes = [sum(len(g.nodes) for g in m.graphs.values()) for m in (module, found.module)]
    left = f"{len(passes)} -> {counted(len(found.passes), 'pass')}"
    return console.ok(f"{sizes[0]} -> {counted(sizes[1], 'node')}, {left}")
