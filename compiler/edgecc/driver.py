"""Compile = lift → passes → lower → bundle. The one module that sees every part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgecc.backends.bundle import Bundle
from edgecc.backends.bundle_writer import BundleWriter
from edgecc.backends.onnx import lower
from edgecc.devices import Device, get_device
from edgecc.errors import Diagnostic, InputError, Severity, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.lift import lift as lift_checkpoints
from edgecc.frontends.options import LiftOptions
from edgecc.frontends.quantization import EncodedWeight, check_scales
from edgecc.golden import GOLDEN_FILE, check_engine, make_golden
from edgecc.ir.core import Json, Module
from edgecc.ir.encodings import NVFP4
from edgecc.ir.weights import Stored, Unbound
from edgecc.manifest import describe
from edgecc.passes.base import PassContext, Remark
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager, PassTiming

Progress = Callable[[str, int, int], None]

LM_HEAD_CHOICES = ("auto", "share", "own", "copy")
VERIFY_CHOICES = ("none", "fast", "full")
ENGINE_CHECK_BYTES = 1 << 30
"""`verify="fast"` opens the engine only below this many packed bytes: opening takes the memory the
runtime needs, which may be far more than compiling does."""


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Everything that shapes a bundle besides the checkpoints.

    Attributes:
        device: Name of the compile target, see `edgecc.devices`.
        max_model_len: Most tokens of a sequence; None takes 8192 or the trained length, if less.
        max_input_len: Most tokens of a prompt; None takes 4096 or one less than `max_model_len`.
        num_speculative_tokens: Proposals per round; None takes the draft's block.
        prefill_chunk: Most rows per call of the target.
        lm_head: `auto` binds what the draft lacks; `share` requires that it borrows; `own` requires
            a head of its own; `copy` binds to a copy (to measure what sharing saves).
        linear_form: How quantized linear layers run, see `lower-encodings`.
        draft_outputs: Keep the draft's logits and confidences as outputs.
        verify: `none`; `fast` stores golden rows of the reference and checks the engine against
            them when the bundle is small; `full` checks always.
    """

    device: str = "cpu"
    max_model_len: int | None = None
    max_input_len: int | None = None
    num_speculative_tokens: int | None = None
    prefill_chunk: int = 128
    lm_head: str = "auto"
    linear_form: str = "auto"
    draft_outputs: bool = False
    verify: str = "fast"

    def __post_init__(self) -> None:
        _choice("lm_head", self.lm_head, LM_HEAD_CHOICES)
        _choice("verify", self.verify, VERIFY_CHOICES)
        for name in ("max_model_len", "max_input_len", "num_speculative_tokens", "prefill_chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError("usage/not-positive", f"{name} must be positive, got {value}")


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
        weight_bytes: Packed bytes the bundle's weights take.
    """

    bundle: Bundle | None
    decisions: tuple[str, ...]
    timings: tuple[PassTiming, ...]
    remarks: tuple[Remark, ...]
    findings: tuple[Diagnostic, ...]
    pipeline: str
    weight_bytes: int


@dataclass(slots=True)
class _Lowered:
    """A module after its passes, and what they reported."""

    module: Module
    device: Device
    manager: PassManager
    ctx: PassContext = field(default_factory=PassContext)


def lift(
    target: str | Path | None,
    draft: str | Path | None = None,
    *,
    max_model_len: int | None = None,
    num_speculative_tokens: int | None = None,
) -> Module:
    """Lift a target, a pair, or a draft alone into a module; see `edgecc.frontends.lift`."""
    options = LiftOptions(
        max_model_len=max_model_len, num_speculative_tokens=num_speculative_tokens
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
    **options: Any,
) -> CompileReport:
    """Compile a target, alone or with its draft, into a bundle directory.

    Args:
        target: Folder of the target checkpoint.
        draft: Folder of the draft checkpoint.
        out: Bundle directory; `./<target>-edgecc` when not given. Must be missing, empty or a
            bundle, which is replaced only when the new one is complete.
        force: Also replace a bundle that holds files of others.
        dry_run: Stop after the passes; write nothing.
        dump_ir: Folder for the IR after each pass.
        strict: Refuse checkpoints that give warnings.
        progress: `progress(stage, done, total)`.
        **options: Fields of `CompileOptions`.

    Returns:
        The report; its `bundle` is open.

    Raises:
        UsageError: Options contradict each other or the checkpoints; `out` is not ours.
        InputError: A checkpoint or the pair is bad.
        UnsupportedError: Something edgecc does not build.
        MismatchError: The engine's numbers differ from the reference; nothing is written.
        ResourceError: Disk or memory.
    """
    chosen = _options(options)
    report = progress or (lambda stage, done, total: None)
    target = Path(target)
    out = Path(out) if out is not None else Path(f"{target.resolve().name}-edgecc")
    with nullcontext() if dry_run else BundleWriter(out, force=force) as writer:
        lowered = _lower_ir(target, draft, chosen, dump_ir, report)
        if strict:
            _refuse_warnings(_findings(lowered.module))
        if writer is None:
            return _report(lowered, None, _stored_bytes(lowered.module))
        bundle, size = _write(writer, lowered, target, draft, chosen, report)
    return _report(lowered, bundle, size)


def _report(lowered: _Lowered, bundle: Bundle | None, weight_bytes: int) -> CompileReport:
    return CompileReport(
        bundle=bundle,
        decisions=tuple(lowered.module.decisions),
        timings=tuple(lowered.manager.timings),
        remarks=tuple(lowered.ctx.remarks),
        findings=tuple(_findings(lowered.module)),
        pipeline=str(lowered.manager),
        weight_bytes=weight_bytes,
    )


def _lower_ir(
    target: Path,
    draft: str | Path | None,
    options: CompileOptions,
    dump_ir: str | Path | None,
    report: Progress,
) -> _Lowered:
    device = get_device(options.device)
    report("lift", 0, 1)
    module = lift_checkpoints(target, draft, _lift_options(options))
    _check_input_len(module, options)
    _check_head_choice(module, options, draft)
    report("lift", 1, 1)
    _scan_scales(module, report)
    passes = default_pipeline(
        device,
        copy_head=options.lm_head == "copy",
        keep_draft_logits=options.draft_outputs,
        linear_form=options.linear_form,
    )
    manager = PassManager(
        passes,
        dump_dir=Path(dump_ir) if dump_ir is not None else None,
        observer=lambda name, i, n: report(f"pass {name}", i, n),
    )
    ctx = PassContext(device)
    manager.run(module, ctx)
    return _Lowered(module, device, manager, ctx)


def _write(
    writer: BundleWriter,
    lowered: _Lowered,
    target: Path,
    draft: str | Path | None,
    options: CompileOptions,
    report: Progress,
) -> tuple[Bundle, int]:
    module, device = lowered.module, lowered.device
    artifact, weights = lower(module, device, writer.directory, report)
    relative = str(artifact.manifest["weight_file"])
    writer.add_file(relative, sha256=weights.sha256, nbytes=weights.bytes)
    checkpoints = _checkpoints(module)
    _copy_tokenizer(writer, checkpoints["target"])
    if options.verify != "none":
        report("golden", 0, 1)
        golden = make_golden(_reference_module(target, draft, options))
        writer.write_file(GOLDEN_FILE, golden)
        report("golden", 1, 1)
        if options.verify == "full" or weights.bytes < ENGINE_CHECK_BYTES:
            check_engine(writer.directory, device, artifact.manifest, golden)
        else:
            module.decisions.append(
                "the engine was not opened for a check: run edgecc verify on the device"
            )
    manifest = describe(
        module,
        artifact,
        device,
        checkpoints,
        pipeline=str(lowered.manager),
        options=_recorded(options, module),
    )
    return writer.finish(manifest), weights.bytes


def _reference_module(target: Path, draft: str | Path | None, options: CompileOptions) -> Module:
    """The module as lifted, only bound: what the interpreter takes for the truth.

    Its caches are small: their capacity changes no value, and the interpreter copies them.
    """
    module = lift_checkpoints(target, draft, replace(_lift_options(options), max_model_len=16))
    BindSharedWeights().run(module, PassContext())
    return module


def _lift_options(options: CompileOptions) -> LiftOptions:
    return LiftOptions(
        max_model_len=options.max_model_len,
        prefill_chunk=options.prefill_chunk,
        num_speculative_tokens=options.num_speculative_tokens,
    )


def _options(values: Mapping[str, Any]) -> CompileOptions:
    try:
        return CompileOptions(**values)
    except TypeError as error:
        raise UsageError(
            "usage/unknown-option",
            str(error).replace("CompileOptions.__init__()", "compile()"),
            help=f"valid: {', '.join(CompileOptions.__dataclass_fields__)}",
        ) from None


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(
            "usage/bad-choice", f"{name} is {value!r}", help=f"choose one of {', '.join(choices)}"
        )


def _limits(module: Module) -> dict[str, Json]:
    limits = module.metadata["limits"]
    assert isinstance(limits, dict)
    return limits


def _check_input_len(module: Module, options: CompileOptions) -> None:
    limits = _limits(module)
    length = limits["max_model_len"]
    assert isinstance(length, int)
    wanted = options.max_input_len or min(4096, length - 1)
    if wanted >= length:
        raise UsageError(
            "usage/max-input-len",
            f"--max-input-len {wanted} leaves no room for an answer in --max-model-len {length}",
            help=f"choose at most {length - 1}",
        )
    limits["max_input_len"] = wanted


def _check_head_choice(module: Module, options: CompileOptions, draft: object) -> None:
    borrowed = [
        s
        for s, w in module.weights.items()
        if isinstance(w.source, Unbound) and w.source.role == "lm_head"
    ]
    if draft is None and options.lm_head != "auto":
        raise UsageError("usage/lm-head", f"--lm-head {options.lm_head} needs --draft")
    if options.lm_head == "own" and borrowed:
        raise InputError(
            "bind/no-own-head",
            "--lm-head own: the draft ships no lm_head",
            where=f"weight @{borrowed[0]}",
            help="use --lm-head auto, which binds the target's",
        )
    if options.lm_head in ("share", "copy") and draft is not None and not borrowed:
        raise InputError(
            "bind/has-own-head",
            f"--lm-head {options.lm_head}: the draft ships its own lm_head, which stays",
            where="draft: lm_head.weight",
            help="use --lm-head auto",
        )


def _scan_scales(module: Module, report: Progress) -> None:
    """Look at every block scale once: a NaN would become NaN logits."""
    packed = [(s, w) for s, w in module.weights.items() if isinstance(w.encoding, NVFP4)]
    for done, (_, weight) in enumerate(packed):
        report("check scales", done, len(packed))
        source = weight.source
        if isinstance(source, Stored):
            reader = module.weights.readers[source.checkpoint]
            assert isinstance(reader, Checkpoint)
            parts = {p.component: p.key for p in source.parts}
            name = parts["weight"].removesuffix(".weight")
            check_scales(reader, EncodedWeight(weight.encoding, parts, name, weight.shape))


def _checkpoints(module: Module) -> dict[str, Checkpoint]:
    return {
        role: reader
        for role, reader in module.weights.readers.items()
        if isinstance(reader, Checkpoint)
    }


def _findings(module: Module) -> list[Diagnostic]:
    return [
        finding for checkpoint in _checkpoints(module).values() for finding in checkpoint.findings
    ]


def _refuse_warnings(findings: list[Diagnostic]) -> None:
    warnings = [f for f in findings if f.severity is Severity.WARNING]
    if warnings:
        raise InputError(*[replace(w, severity=Severity.ERROR) for w in warnings])


def _copy_tokenizer(writer: BundleWriter, checkpoint: Checkpoint) -> None:
    files = {p.name: p for p in checkpoint.tokenizer_files()}
    generation = checkpoint.file("generation_config.json")
    if generation is not None:
        files[generation.name] = generation
    for name, path in sorted(files.items()):
        writer.copy_file(path, f"tokenizer/{name}")


def _stored_bytes(module: Module) -> int:
    stored = {
        base
        for symbol in module.weights
        for base in module.weights.dependencies(symbol)
        if isinstance(module.weights[base].source, Stored)
    }
    return sum(module.weights[s].nbytes for s in stored)


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
    "compile",
    "lift",
]
