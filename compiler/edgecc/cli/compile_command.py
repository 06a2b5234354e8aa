"""`edgecc compile`."""

from __future__ import annotations

import json
import os
from pathlib import Path
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
from edgecc.cli.pipeline_flags import check_option
from edgecc.cli.print_ir import print_ir, print_ir_options
from edgecc.compile_options import (
    ACTIVATION_CHOICES,
    LINEAR_FORM_CHOICES,
    QUANTIZATION_CHOICES,
    WEIGHTS_CHOICES,
)
from edgecc.errors import ResourceError, UnsupportedError, UsageError, did_you_mean
from edgecc.frontends.spec_methods import method_named

if TYPE_CHECKING:
    from edgecc.backends.base import BuiltEngine
    from edgecc.compile_report import CompileReport

SPECULATIVE_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "draft_quantization",
)
REVISION = "revision"
"""Of the draft on the hub: the same as `model@revision`."""
VLLM_KEYS = (
    "draft_tensor_parallel_size",
    "disable_by_batch_size",
    "quantization",
    "max_model_len",
    "draft_sample_method",
)


@click.command(cls=Command, name="compile", short_help="Compile a target and its draft.")
@click.argument("target", required=False)
@click.option("--model-dir", "--model", "--model-path", "model", hidden=True)
@click.option(
    "--draft",
    "--draft-model-dir",
    "--draft-model",
    "draft",
    metavar="DIR|ID",
    help="Draft checkpoint; its missing head and embedding are bound to the target's.",
)
@click.option("--speculative-config", metavar="JSON|@FILE", help="The same as JSON, as for vLLM.")
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
    default="auto",
    show_default=True,
    help="Precision of activations; auto keeps the files'.",
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
@click.option("--max-input-len", type=click.IntRange(min=1), metavar="N", help="Longest prompt.")
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=1),
    default=128,
    show_default=True,
    metavar="N",
    help="Most tokens of a prompt in one call of the target.",
)
@click.option(
    "--max-model-len",
    "--max-seq-len",
    "--max-kv-cache-capacity",
    "max_model_len",
    type=click.IntRange(min=1),
    metavar="N",
    help="Prompt and answer together; default: 8192 or what the model was trained for.",
)
@click.option(
    "--max-batch-size",
    "--max-num-seqs",
    "max_batch_size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Most sequences at a time; each has caches of its own.",
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
    timing_json = _timing_file(flags["timing_json"], [target, draft])
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
        max_batch_size=flags["max_batch_size"],
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
        timing_json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
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


def models_of(flags: dict[str, Any]) -> tuple[str, str | None, dict[str, Any]]:
    """Target, draft and the options about speculation, from flags and the JSON config.

    Raises:
        UsageError: Missing, or given twice with different values.
    """
    targets = {t for t in (flags["target"], flags["model"]) if t}
    if len(targets) != 1:
        raise UsageError(
            "usage/target", "give one TARGET", help="edgecc compile TARGET --draft DRAFT -o DIR"
        )
    config = _speculative_config(flags["speculative_config"])
    found = {}
    for key in SPECULATIVE_KEYS:
        name = {"method": "spec_method", "model": "draft"}.get(key, key)
        flag, value = flags[name], config.get(key)
        if flag == "auto":
            flag = None
        if name == "spec_method":
            flag, value = (given and method_named(given) for given in (flag, value))
        if flag is not None and value is not None and flag != value:
            raise UsageError(
                "usage/contradiction",
                f"--{name.replace('_', '-')} is {flag}, --speculative-config says {value}",
            )
        found[name] = flag if flag is not None else value
    draft = found.pop("draft")
    for name in ("spec_method", "draft_quantization"):
        found[name] = found[name] or "auto"
    return targets.pop(), draft, found


def _speculative_config(text: str | None) -> dict[str, Any]:
    """The settings of `--speculative-config`; nulls count as absent.

    Raises:
        UsageError: No JSON object, or a key or value that edgecc does not know.
    """
    if text is None:
        return {}
    where = text[1:] if text.startswith("@") else "--speculative-config"
    found = {key: value for key, value in _json(text, where).items() if value is not None}
    for key in found:
        if key in VLLM_KEYS:
            raise UsageError(
                "usage/speculative-config",
                f"{key!r} is known from vLLM, edgecc has no such setting",
                where=where,
            )
        if key not in (*SPECULATIVE_KEYS, REVISION):
            raise UsageError(
                "usage/speculative-config",
                f"unknown key {key!r}",
                where=where,
                help=did_you_mean(key, (*SPECULATIVE_KEYS, REVISION)),
            )
    for key in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max"):
        number = found.get(key, 1)
        if type(number) is not int or number < 1:
            raise UsageError(
                "usage/speculative-config",
                f"{key} is {number!r}, expected a whole number of at least 1",
                where=where,
            )
    for key in ("model", "method", "draft_quantization", REVISION):
        if not isinstance(found.get(key, ""), str):
            raise UsageError("usage/speculative-config", f"{key} must be a string", where=where)
    return _pinned(found, where)


def _pinned(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings with the draft's revision in its id."""
    revision, model = config.pop(REVISION, None), config.get("model")
    if revision is not None:
        if model is None or "@" in model:
            raise UsageError(
                "usage/speculative-config",
                f"{REVISION} {revision!r} goes with a model of the hub that has none yet",
                where=where,
                help='"model": "org/name"',
            )
        config["model"] = f"{model}@{revision}"
    return config


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        if text.startswith("@"):
            text = Path(where).read_text(encoding="utf-8")
        config = json.loads(text, object_pairs_hook=_unique)
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise UsageError("usage/speculative-config", reason, where=where) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("usage/json", f"not usable as JSON: {error}", where=where) from error
    if not isinstance(config, dict):
        raise UsageError("usage/json", "expected a JSON object", where=where)
    return config


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _timing_file(name: str | None, checkpoints: list[str | None]) -> Path | None:
    """Where timings go, checked before the work: it must not fail when all else is done.

    Raises:
        UsageError: It is a folder, in no folder, or in a checkpoint.
        ResourceError: It may not be written.
    """
    if name is None:
        return None
    from edgecc.paths import local_path, refuse_inside

    path = local_path(name, "timing")
    for checkpoint in filter(None, checkpoints):
        refuse_inside(path, Path(checkpoint), "--timing-json")
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        reason = (
            "is a folder" if os.path.isdir(path) else f"cannot be made: no folder {path.parent}"
        )
        raise UsageError("usage/timing-json", f"--timing-json {name} {reason}")
    place = path if os.path.lexists(path) else path.parent
    if not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise ResourceError(
            "usage/timing-json", f"--timing-json {name}: {place} is write-protected"
        )
    return path


def _refuse_unsupported(flags: dict[str, Any]) -> None:
    """Values that are understood, but that edgecc cannot compile.

    Raises:
        UnsupportedError: Naming the flag and what is possible.
    """
    if flags["dtype"] != "auto":
        raise UnsupportedError(
            "usage/dtype",
            f"--dtype {flags['dtype']} is not supported: the engine computes in float32",
            help="leave out --dtype",
        )
