"""`edgecc compile`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from edgecc.cli.cache_options import cache_options, open_cache
from edgecc.cli.options import (
    Command,
    common,
    components_option,
    offline_option,
    prompt_lookup_options,
    spec_method_option,
)
from edgecc.cli.output import Console, print_json
from edgecc.cli.pair_options import draft_options, models_of, size_options
from edgecc.cli.pipeline_flags import check_option
from edgecc.cli.print_ir import print_ir, print_ir_options
from edgecc.cli.text_output import text_file, write_text
from edgecc.compile_options import (
    ACTIVATION_CHOICES,
    LINEAR_FORM_CHOICES,
    QUANTIZATION_CHOICES,
    WEIGHTS_CHOICES,
)
from edgecc.errors import UnsupportedError

if TYPE_CHECKING:
    from edgecc.backends.base import BuiltEngine
    from edgecc.compile_report import CompileReport


@click.command(cls=Command, name="compile", short_help="Compile a target and its draft.")
@click.argument("target", required=False)
@click.option("--model-dir", "--model", "--model-path", "model", hidden=True)
@draft_options("Draft checkpoint; its missing head and embedding are bound to the target's.")
@spec_method_option
@click.option(
    "-k",
    "--num-speculative-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Most proposals per round; default: the draft's block.",
)
@prompt_lookup_options
@click.option(
    "-o",
    "--output-dir",
    "--output",
    "--engine-dir",
    "output_dir",
    metavar="DIR",
    help="Bundle directory; must be missing, empty or a bundle. Default: ./<target>-edgecc",
)
@click.option("--force", is_flag=True, help="Also replace a bundle that holds foreign files.")
@components_option
@offline_option
@click.option(
    "--device",
    metavar="NAME",
    multiple=True,
    help="Device to compile for: cpu, onnx, rtx, sm86, sm89, sm120, sm121 ... May be given several "
    "times.  [default: cpu]",
)
@click.option(
    "--weights",
    type=click.Choice(WEIGHTS_CHOICES),
    default="auto",
    show_default=True,
    help="Weights of engines: constants inside of them, or inputs bound at load; auto by size.",
)
@click.option(
    "--dtype",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="Precision of activations; only auto, which is the device's.",
)
@click.option(
    "--quantization",
    "--quantize",
    type=click.Choice(QUANTIZATION_CHOICES),
    default="auto",
    show_default=True,
    help="Round the target's weights to this format; auto keeps the files'.",
)
@click.option(
    "--draft-quantization",
    type=click.Choice(QUANTIZATION_CHOICES),
    default="auto",
    show_default=True,
    help="The same for the draft; never inherited.",
)
@click.option("--quantize-head", is_flag=True, help="Round the output head as well.")
@click.option(
    "--activations",
    type=click.Choice(ACTIVATION_CHOICES),
    default="auto",
    show_default=True,
    help="What linear layers read; auto quantizes it as the checkpoint was calibrated (W4A4, FP8), "
    "where the device can.",
)
@click.option(
    "--linear-form",
    type=click.Choice(LINEAR_FORM_CHOICES),
    default="auto",
    show_default=True,
    help="How a CPU computes with NVFP4 linear layers: dense float32, or exact 8-bit codes, which "
    "take a third of the memory and are slower for many rows.",
)
@click.option(
    "--lm-head",
    type=click.Choice(["auto", "share", "own", "copy"]),
    default="auto",
    show_default=True,
    help="Where the draft's head comes from.",
)
@size_options()
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    metavar="N",
    help="Most tokens of a prompt in one call of the target.",
)
@click.option("--dry-run", is_flag=True, help="Check everything, write nothing.")
@click.option("--dump-ir", metavar="DIR", help="Write the IR before the first and after each pass.")
@click.option(
    "--verify",
    type=click.Choice(["none", "fast", "full"]),
    default="fast",
    show_default=True,
    help="Compare the engine with reference rows before the bundle is published.",
)
@click.option("--pass-pipeline", metavar="PIPELINE", help="Passes instead of the default ones.")
@click.option("--dump-pass-pipeline", is_flag=True, help="Show the passes that ran, as text.")
@print_ir_options
@check_option
@click.option("--timing-json", metavar="FILE", help="Write seconds and sizes per pass.")
@cache_options
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
@common
def command(console: Console, **flags: Any) -> int:
    """Compile TARGET, alone or with --draft, to a bundle directory.

    TARGET is the folder of a checkpoint, its id on the model hub (org/name[@revision]), or a file
    of IR text (.eir) that names its checkpoints.
    """
    import edgecc

    target, draft, speculative = models_of(flags)
    _refuse_unsupported(flags)
    timing_json = text_file(flags["timing_json"], [target, draft], flag="--timing-json")
    report = edgecc.compile(
        target,
        draft,
        out=flags["output_dir"],
        force=flags["force"],
        dry_run=flags["dry_run"],
        dump_ir=flags["dump_ir"],
        strict=flags["strict"],
        progress=console.progress(),
        tell=console.finding,
        cache=open_cache(flags, console.finding),
        instruments=print_ir(console, flags),
        check=flags["check"],
        offline=flags["offline"],
        device=flags["device"] or ("cpu",),
        components=flags["components"],
        weights=flags["weights"],
        max_model_len=flags["max_model_len"],
        max_input_len=flags["max_input_len"],
        prefill_chunk=flags["prefill_chunk"],
        max_batch_size=flags["max_batch_size"] or 1,
        **speculative,
        lm_head=flags["lm_head"],
        quantization=flags["quantization"],
        quantize_head=flags["quantize_head"],
        activations=flags["activations"],
        linear_form=flags["linear_form"],
        pass_pipeline=flags["pass_pipeline"],
        verify=flags["verify"],
    )
    _tell(console, report, pipeline=flags["dump_pass_pipeline"])
    if timing_json is not None:
        rows = [{f: getattr(t, f) for f in t.__dataclass_fields__} for t in report.timings]
        write_text(timing_json, json.dumps(rows, indent=1) + "\n")
    path = None if report.bundle is None else str(report.bundle.path)
    if flags["as_json"]:
        print_json(
            {
                "bundle": path,
                "weight_bytes": report.weight_bytes,
                "pipeline": report.pipeline,
                "decisions": list(report.decisions),
                "findings": [f.id for f in report.findings],
                "engines": [_engine(e) for e in report.engines],
                "memory": [plan.as_json() for plan in report.memory],
            }
        )
    size = f"{report.weight_bytes / 1e6:.1f} MB of weights"
    return console.ok(f"{path}: {size}" if path else f"dry run: {size}, nothing written")


def _tell(console: Console, report: CompileReport, *, pipeline: bool) -> None:
    """Print what a compile found out and did."""
    for finding in report.findings:
        console.diagnostic(finding)
    for decision in report.decisions:
        console.info(f"  {decision}")
    if pipeline:
        console.always(f"pipeline: {report.pipeline}")
    for engine in report.engines:
        console.info(f"  {engine}")
    if report.bundle is None:
        for line in (line for plan in report.memory for line in plan.lines()):
            console.info(f"  {line}")
    for check in report.checks:
        console.info(f"  checked {check}")
    for remark in report.remarks:
        console.detail(f"  {remark}")
    for line in report.unchecked:
        console.detail(f"  {line}")


def _engine(engine: BuiltEngine) -> dict[str, Any]:
    return {
        "name": engine.name,
        "reason": engine.reason,
        "cached": engine.cached,
        "seconds": round(engine.seconds, 3),
        "estimated_seconds": round(engine.estimated_seconds, 1),
        "estimated_bytes": engine.estimated_bytes,
    }


def _refuse_unsupported(flags: dict[str, Any]) -> None:
    """Values that are understood, but that edgecc cannot compile.

    Raises:
        UnsupportedError: Naming the flag and what is possible.
    """
    if flags["dtype"] != "auto":
        raise UnsupportedError(
            "usage/dtype",
            f"--dtype {flags['dtype']} is not supported: a CPU computes in float32, a GPU in bf16",
            help="leave out --dtype",
        )
