"""Compile = lift → passes → lower → bundle. The one module that sees every part."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgecc.backends.base import Artifact
from edgecc.backends.bundle import Bundle
from edgecc.backends.bundle_writer import BundleWriter, check_destination
from edgecc.backends.onnx import lower
from edgecc.backends.onnx.lower import WEIGHT_FILE
from edgecc.backends.onnx.storage import Storage
from edgecc.backends.tensorrt.library import load_library
from edgecc.backends.weight_file import file_size
from edgecc.compile_options import CompileOptions, compile_options
from edgecc.devices import Device, get_device
from edgecc.errors import Diagnostic, InputError, Severity, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.finite import check_finite
from edgecc.frontends.lift import lift as lift_checkpoints
from edgecc.frontends.options import LiftOptions
from edgecc.frontends.quantization import EncodedWeight, check_scales
from edgecc.golden import GOLDEN_FILE, check_engine, check_lowered, golden_rows
from edgecc.ir.clone import clone_module
from edgecc.ir.core import Json, Module
from edgecc.ir.encodings import FP8, NVFP4
from edgecc.ir.printer import print_module
from edgecc.ir.weights import Derived, Stored, Unbound
from edgecc.ir_source import (
    SUFFIX,
    attach_checkpoints,
    is_ir_text,
    lift_options_of,
    read_lifted,
)
from edgecc.manifest import describe
from edgecc.passes.base import Pass, PassContext, Remark
from edgecc.passes.default import default_pipeline
from edgecc.passes.instruments import Instrument
from edgecc.passes.legalize import Legalize, LegalizeOptions
from edgecc.passes.manager import PassManager, PassTiming
from edgecc.passes.pipeline import parse_pipeline
from edgecc.passes.quantize import Quantize, is_head
from edgecc.paths import check_outputs, ir_folder, local_path, writable_path
from edgecc.reproduction import KeepReproducer, Runner
from edgecc.text_side import check_tokenizer, copy_tokenizer

Progress = Callable[[str, int, int], None]

RUNTIME_METHODS = ("dspark",)
"""Speculation methods `edgecc.backends.runtime` can drive."""

ENGINE_CHECK_BYTES = 64 << 20
"""`verify="fast"` opens the engine only if it computes with fewer bytes of weights than this.
Opening takes up to twice that (expanded and packed for kernels), and it is the only part of a
compile whose memory would grow with the checkpoint."""


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What a compile did.

    Attributes:
        bundle: The finished bundle; None after a dry run.
        decisions: What was chosen and why, one line each.
        timings: Seconds and sizes per pass.
        remarks: Where each pass applied, or why not.
        findings: Warnings and notes about the checkpoints.
        pipeline: The passes, as text.
        weight_bytes: Bytes of the bundle's weights, packed.
        checks: How the engine compared with the reference, one line each; empty if it was not.
        unchecked: Outputs that `check` could not compare, and why, one line each.
    """

    bundle: Bundle | None
    decisions: tuple[str, ...]
    timings: tuple[PassTiming, ...]
    remarks: tuple[Remark, ...]
    findings: tuple[Diagnostic, ...]
    pipeline: str
    weight_bytes: int
    checks: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()


@dataclass(slots=True)
class _Lowered:
    """A module after its passes, what they reported, and what it was before them."""

    module: Module
    device: Device
    manager: PassManager
    lifted: Module
    lifted_text: str
    ctx: PassContext
    checks: list[str] = field(default_factory=list)


def lift(
    target: str | Path | None,
    draft: str | Path | None = None,
    *,
    max_model_len: int | None = None,
    num_speculative_tokens: int | None = None,
    components: str = "text",
) -> Module:
    """Lift a target, a pair, or a draft alone into a module; see `edgecc.frontends.lift`."""
    options = LiftOptions(
        max_model_len=max_model_len,
        num_speculative_tokens=num_speculative_tokens,
        components=components,
    )
    return lift_checkpoints(target, draft, options)


def compile(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    out: str | Path | None = None,
    force: bool = False,
    dry_run: bool = False,
    dump_ir: str | Path | None = None,
    strict: bool = False,
    progress: Progress | None = None,
    instruments: Sequence[Instrument] = (),
    check: int = 0,
    **options: Any,
) -> CompileReport:
    """Compile a target, alone or with its draft, into a bundle directory.

    Args:
        target: Folder of the target checkpoint, or a file of IR text (`.eir`), which names its own
            checkpoints and has its own sizes.
        draft: Folder of the draft checkpoint.
        out: Bundle directory; `./<target>-edgecc` when not given. Must be missing, empty or a
            bundle, which is replaced only when the new one is complete.
        force: Also replace a bundle that holds files of others.
        dry_run: Stop after the passes; write no bundle.
        dump_ir: Folder for the IR before the first pass and after each.
        strict: Refuse checkpoints that give warnings.
        progress: `progress(stage, done, total)`.
        instruments: Told about every pass, see `edgecc.passes.instruments`.
        check: Compare values before and after each pass on so many sets of random inputs. What
            reproduces a mismatch is written to `dump_ir`, else to the working directory.
        **options: Fields of `CompileOptions`.

    Returns:
        The report; its `bundle` is open.

    Raises:
        UsageError: Options contradict each other or the checkpoints; `out` is not ours.
        InputError: A checkpoint or the pair is bad.
        UnsupportedError: Something edgecc does not build.
        MismatchError: The engine's numbers differ from the reference, or a pass changed what is
            computed; nothing is written.
        ResourceError: Disk or memory.
    """
    chosen = compile_options(options)
    report = progress or (lambda stage, done, total: None)
    source = local_path(target, "target")
    draft = local_path(draft, "draft") if draft is not None else None
    out = writable_path(out if out is not None else _default_output(source), "output")
    dump = ir_folder(dump_ir) if dump_ir is not None else None
    module = None
    if is_ir_text(source):
        module = read_lifted(source, draft, chosen)
        chosen = replace(chosen, prefill_chunk=lift_options_of(module).prefill_chunk)
    sources = [c.path for c in _checkpoints(module).values()] if module else [source, draft]
    check_outputs([p for p in sources if p is not None], out, dump)
    if dry_run:
        check_destination(out, force=force)
    elif library := get_device(chosen.device).library:
        load_library(library)  # told now, and not after minutes of work
    with nullcontext() if dry_run else BundleWriter(out, force=force) as writer:
        if module is None:
            module = _lift(source, draft, chosen, report)
        manager = PassManager(
            _passes(get_device(chosen.device), chosen),
            dump_dir=dump,
            instruments=instruments,
            observer=lambda name, i, n: report(f"pass {name}", i, n),
            check=check,
            on_mismatch=KeepReproducer(Runner(get_device(chosen.device), check), dump or Path()),
        )
        lowered = _lower_ir(module, manager, chosen, report)
        try:
            if strict:
                _refuse_warnings(_findings(lowered.module))
            if writer is None:
                return _report(lowered, None, _stored_bytes(lowered))
            write = _write_engines if lowered.device.library else _write
            bundle, size = write(writer, lowered, chosen, report)
            return _report(lowered, bundle, size)
        finally:
            _close(lowered.module)


def _passes(device: Device, options: CompileOptions) -> list[Pass[Any]]:
    if options.pass_pipeline is not None:
        return [*parse_pipeline(options.pass_pipeline), Legalize(LegalizeOptions(device.name))]
    return default_pipeline(
        device,
        copy_head=options.lm_head == "copy",
        keep_draft_logits=options.draft_outputs,
        linear_form=options.linear_form,
        quantization=options.quantization,
        draft_quantization=options.draft_quantization,
        quantize_head=options.quantize_head,
    )


def _default_output(target: Path) -> str:
    name = Path(os.path.realpath(target)).name
    return f"{name.removesuffix(SUFFIX) if is_ir_text(target) else name}-edgecc"


def _report(lowered: _Lowered, bundle: Bundle | None, weight_bytes: int) -> CompileReport:
    return CompileReport(
        bundle=bundle,
        decisions=tuple(lowered.module.decisions),
        timings=tuple(lowered.manager.timings),
        remarks=tuple(lowered.ctx.remarks),
        findings=tuple(_findings(lowered.module)),
        pipeline=str(lowered.manager),
        weight_bytes=weight_bytes,
        checks=tuple(lowered.checks),
        unchecked=tuple(lowered.manager.unchecked()),
    )


def _lift(target: Path, draft: Path | None, options: CompileOptions, report: Progress) -> Module:
    get_device(options.device)
    _check_needs_draft(options, draft is not None)
    report("lift", 0, 1)
    module = lift_checkpoints(
        target,
        draft,
        LiftOptions(
            max_model_len=options.max_model_len,
            max_input_len=options.max_input_len,
            prefill_chunk=options.prefill_chunk,
            num_speculative_tokens=options.num_speculative_tokens,
        ),
    )
    report("lift", 1, 1)
    return module


def _lower_ir(
    module: Module, manager: PassManager, options: CompileOptions, report: Progress
) -> _Lowered:
    device = get_device(options.device)
    _check_needs_draft(options, "draft" in module.graphs)
    _check_method(module)
    _check_head_choice(module, options)
    check_tokenizer(_checkpoints(module)["target"])
    _scan_values(module, report)
    lowered = _Lowered(
        module, device, manager, clone_module(module), _bundle_text(module), PassContext(device)
    )
    manager.run(module, lowered.ctx)
    _check_quantized(module, options, lowered.ctx)
    return lowered


def _write(
    writer: BundleWriter,
    lowered: _Lowered,
    options: CompileOptions,
    report: Progress,
) -> tuple[Bundle, int]:
    module, device = lowered.module, lowered.device
    artifact, weights = lower(module, device, writer.directory, report)
    relative = str(artifact.manifest["weight_file"])
    writer.add_file(relative, sha256=weights.sha256, nbytes=weights.bytes)
    if options.verify != "none":
        golden = _golden(writer, lowered, report)
        if options.verify == "full" or _engine_bytes(module) < ENGINE_CHECK_BYTES:
            checks = check_engine(writer.directory, artifact.manifest, golden)
            lowered.checks.extend(map(str, checks))
        else:
            module.decisions.append(
                "the engine was not opened for a check: run edgecc verify on the device"
            )
    return _finish(writer, lowered, artifact, options), weights.bytes


def _write_engines(
    writer: BundleWriter,
    lowered: _Lowered,
    options: CompileOptions,
    report: Progress,
) -> tuple[Bundle, int]:
    """Like `_write`, for devices whose engines are built: nothing unevaluated is handed over."""
    from edgecc.backends.tensorrt.lower import lower as build_engines

    module = lowered.module
    size = _engine_bytes(module)
    module.decisions.append(
        f"engines hold {size / 1e6:.1f} MB of weights; building takes up to four times that"
    )
    if options.verify != "none":
        golden = _golden(writer, lowered, report)
        report("evaluate", 0, 1)
        lowered.checks.extend(map(str, check_lowered(module, golden)))
        report("evaluate", 1, 1)
        module.decisions.append(
            "the lowered graphs were evaluated in their own precision, the engines were not run"
        )
    artifact = build_engines(module, lowered.device, writer.directory, report)
    sizes = [int(e["weight_bytes"]) for e in artifact.manifest["engines"].values()]
    return _finish(writer, lowered, artifact, options), sum(sizes)


def _golden(writer: BundleWriter, lowered: _Lowered, report: Progress) -> bytes:
    """Write the golden rows into the bundle."""
    report("golden", 0, 1)
    golden = golden_rows(lowered.lifted, lowered.manager.passes)
    writer.write_file(GOLDEN_FILE, golden)
    report("golden", 1, 1)
    return golden


def _finish(
    writer: BundleWriter, lowered: _Lowered, artifact: Artifact, options: CompileOptions
) -> Bundle:
    """Add what does not depend on the backend, and publish."""
    module = lowered.module
    checkpoints = _checkpoints(module)
    copy_tokenizer(writer, checkpoints["target"])
    writer.write_file("ir/lifted.eir", lowered.lifted_text.encode())
    writer.write_file("ir/lowered.eir", _bundle_text(module).encode())
    manifest = describe(
        module,
        artifact,
        lowered.device,
        checkpoints,
        pipeline=str(lowered.manager),
        options=_recorded(options, module),
    )
    return writer.finish(manifest)


def _bundle_text(module: Module) -> str:
    """The module as text for the bundle: checkpoints by name, because paths are of this machine."""
    folders = dict(module.checkpoints)
    names = {role: Path(os.path.realpath(path)).name for role, path in folders.items()}
    module.checkpoints.update(names)
    text = print_module(module, locations=True)
    module.checkpoints.update(folders)
    return text


def _engine_bytes(module: Module) -> int:
    """Bytes of all weights in the encodings the engine computes with."""
    table = module.weights
    used = {table.resolve(s) for g in module.graphs.values() for s in g.used_weights()}
    return sum(table[s].nbytes for s in used)


def _check_quantized(module: Module, options: CompileOptions, ctx: PassContext) -> None:
    """Refuse a quantization that found nothing to round.

    Raises:
        UsageError: The flag and the role are named, and why weights were left alone.
    """
    sources = [
        module.weights.resolve(weight.source.inputs[0])
        for weight in module.weights.values()
        if isinstance(weight.source, Derived) and weight.source.recipe == "quantize"
    ]
    rounded = {symbol.partition(".")[0] for symbol in sources}
    for role, flag, format in (
        ("target", "--quantization", options.quantization),
        ("draft", "--draft-quantization", options.draft_quantization),
    ):
        if format != "auto" and role not in rounded:
            reasons = [
                f"{r.where}: {r.message}"
                for r in ctx.remarks
                if r.pass_name == Quantize.name and r.where.startswith(f"@{role}.")
            ]
            raise UsageError(
                "usage/nothing-to-quantize",
                f"{flag} {format} fits none of the {role}'s linear weights",
                notes=reasons[:3],
                help=f"leave out {flag}: weights keep the precision of the files",
            )
    if options.quantize_head and not any(is_head(symbol) for symbol in sources):
        raise UsageError(
            "usage/no-head-to-quantize",
            "--quantize-head rounds no head",
            notes=_why_no_head(module, options, ctx),
            help="leave out --quantize-head: the head keeps the precision of the file",
        )


def _why_no_head(module: Module, options: CompileOptions, ctx: PassContext) -> list[str]:
    """What is known about heads that were not rounded."""
    found = {
        f"{r.where}: {r.message}"
        for r in ctx.remarks
        if r.pass_name == Quantize.name and not r.applied and is_head(r.where.removeprefix("@"))
    }
    if options.quantization == "auto" and "draft" in module.graphs:
        return ["the draft reads the target's head: --quantization says how to round that"]
    return sorted(found) or ["the head is the embedding table"]


def _limits(module: Module) -> dict[str, Json]:
    limits = module.metadata["limits"]
    assert isinstance(limits, dict)
    return limits


def _check_needs_draft(options: CompileOptions, draft: bool) -> None:
    if draft:
        return
    if options.lm_head != "auto":
        raise UsageError("usage/lm-head", f"--lm-head {options.lm_head} needs --draft")
    if options.draft_quantization != "auto":
        raise UsageError(
            "usage/draft-quantization",
            f"--draft-quantization {options.draft_quantization} needs --draft",
        )
    if options.num_speculative_tokens is not None:
        raise UsageError(
            "usage/speculative-tokens",
            f"{options.num_speculative_tokens} speculative tokens need a draft",
            help="give its folder: --draft DIR",
        )


def _check_method(module: Module) -> None:
    """The runtime drives the draft's method, and what the target reads.

    Raises:
        UnsupportedError: It does not, yet.
    """
    if "vision" in module.graphs:
        raise UnsupportedError(
            "vision/no-runtime",
            "a target that reads images: lifting and evaluating work, the runtime does not drive "
            "it yet",
            where="graph @vision",
            help="lift with --components text to compile the language model",
        )
    draft = module.metadata.get("draft")
    method = draft["method"] if isinstance(draft, dict) else None
    if method not in (None, *RUNTIME_METHODS):
        raise UnsupportedError(
            "draft/no-runtime",
            f"method {method}: lifting and evaluating work, the runtime does not drive it yet",
            where="draft/config.json: architectures",
            help=f"edgecc lift and edgecc opt take this pair; compile takes drafts of method "
            f"{', '.join(RUNTIME_METHODS)}",
        )


def _check_head_choice(module: Module, options: CompileOptions) -> None:
    borrowed = [
        s
        for s, w in module.weights.items()
        if isinstance(w.source, Unbound) and w.source.role == "lm_head"
    ]
    if options.lm_head == "own" and borrowed:
        raise InputError(
            "bind/no-own-head",
            "--lm-head own: the draft ships no lm_head",
            where=f"weight @{borrowed[0]}",
            help="use --lm-head auto, which binds the target's",
        )
    if options.lm_head in ("share", "copy") and not borrowed:
        raise InputError(
            "bind/has-own-head",
            f"--lm-head {options.lm_head}: the draft ships its own lm_head, which stays",
            where="draft: lm_head.weight",
            help="use --lm-head auto",
        )


def _scan_values(module: Module, report: Progress) -> None:
    """Look at every block scale and every unquantized value once: a NaN would become NaN logits."""
    stored = [(w, w.source) for w in module.weights.values() if isinstance(w.source, Stored)]
    for done, (weight, source) in enumerate(stored):
        report("check values", done, len(stored))
        reader = module.weights.readers[source.checkpoint]
        assert isinstance(reader, Checkpoint)
        parts = {p.component: p.key for p in source.parts}
        if isinstance(weight.encoding, NVFP4 | FP8):
            name = parts["weight"].removesuffix(".weight")
            check_scales(reader, EncodedWeight(weight.encoding, parts, name, weight.shape))
        else:
            for key in parts.values():
                check_finite(reader, key)
    report("check values", len(stored), len(stored))


def _checkpoints(module: Module) -> dict[str, Checkpoint]:
    return {
        role: reader
        for role, reader in module.weights.readers.items()
        if isinstance(reader, Checkpoint)
    }


def _close(module: Module) -> None:
    for checkpoint in _checkpoints(module).values():
        checkpoint.close()


def _findings(module: Module) -> list[Diagnostic]:
    return [
        finding for checkpoint in _checkpoints(module).values() for finding in checkpoint.findings
    ]


def _refuse_warnings(findings: list[Diagnostic]) -> None:
    warnings = [f for f in findings if f.severity is Severity.WARNING]
    if warnings:
        raise InputError(*[replace(w, severity=Severity.ERROR) for w in warnings])


def _stored_bytes(lowered: _Lowered) -> int:
    """Bytes the weight file, or the weights in the engines, would take."""
    module = lowered.module
    if lowered.device.library:
        return _engine_bytes(module)
    leaves = [g for g in module.graphs.values() if not list(g.callees())]
    return file_size(Storage(module, WEIGHT_FILE).collect(leaves))


def _recorded(options: CompileOptions, module: Module) -> dict[str, Json]:
    """Options for the manifest, with defaults resolved."""
    limits = _limits(module)
    draft = module.metadata.get("draft")
    recorded: dict[str, Json] = {
        name: getattr(options, name) for name in CompileOptions.__dataclass_fields__
    }
    recorded["max_model_len"] = limits["max_model_len"]
    recorded["max_input_len"] = limits["max_input_len"]
    if isinstance(draft, dict):
        recorded["num_speculative_tokens"] = draft["num_speculative_tokens"]
    return recorded


__all__ = [
    "CompileOptions",
    "CompileReport",
    "attach_checkpoints",
    "compile",
    "lift",
]
