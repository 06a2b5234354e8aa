"""Compile = lift → passes → lower → bundle. The one module that sees every part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

from edgecc.backends.base import Progress
from edgecc.backends.bundle_writer import BundleWriter, check_destination
from edgecc.backends.cache import ArtifactCache
from edgecc.backends.tensorrt.library import load_library
from edgecc.checkpoints import checkpoints_of, close_checkpoints, findings_of
from edgecc.compile_checks import check_module, check_needs_draft, check_needs_proposals
from edgecc.compile_options import CompileOptions, compile_options
from edgecc.compile_report import CompileReport, compile_report
from edgecc.contract.examination import examine
from edgecc.device_artifact import Site, expect, shares, weight_bytes, write_artifacts
from edgecc.device_lowering import lower_for, pass_manager
from edgecc.errors import Diagnostic, EdgeccError, InputError, Severity
from edgecc.frontends.lift import lift as lift_checkpoints
from edgecc.frontends.options import LiftOptions
from edgecc.hub import checkpoint_folder
from edgecc.hub_layout import checkpoint_name
from edgecc.ir.core import Module
from edgecc.ir_source import (
    SUFFIX,
    attach_checkpoints,
    is_ir_text,
    lift_options_of,
    read_lifted,
)
from edgecc.passes.instruments import Instrument
from edgecc.paths import check_outputs, ir_folder, local_path, writable_path
from edgecc.prompt_lookup import NGRAM
from edgecc.publishing import publish


def lift(
    target: str | Path | None,
    draft: str | Path | None = None,
    *,
    max_model_len: int | None = None,
    spec_method: str = "auto",
    num_speculative_tokens: int | None = None,
    prompt_lookup_min: int | None = None,
    prompt_lookup_max: int | None = None,
    max_batch_size: int = 1,
    components: str = "text",
    offline: bool = False,
    tell: Callable[[Diagnostic], None] | None = None,
    progress: Progress | None = None,
) -> Module:
    """Lift a target, a pair, or a draft alone into a module; see `edgecc.frontends.lift`.

    Models of the hub are fetched into its cache, unless they are there; see `edgecc.hub`.
    """
    options = LiftOptions(
        max_model_len=max_model_len,
        spec_method=spec_method,
        num_speculative_tokens=num_speculative_tokens,
        prompt_lookup_min=prompt_lookup_min,
        prompt_lookup_max=prompt_lookup_max,
        max_batch_size=max_batch_size,
        components=components,
    )
    hub = _Hub(offline, tell or _ignore, progress)
    return lift_checkpoints(hub.folder(target, "target"), hub.folder(draft, "draft"), options)


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
    tell: Callable[[Diagnostic], None] | None = None,
    cache: ArtifactCache | None = None,
    instruments: Sequence[Instrument] = (),
    check: int = 0,
    offline: bool = False,
    **options: Any,
) -> CompileReport:
    """Compile a target, alone or with its draft, into a bundle directory.

    Args:
        target: Folder of the target checkpoint, or its id on the hub (`org/name[@revision]`); or a
            file of IR text (`.eir`), which names its own checkpoints and has its own sizes.
        draft: Folder of the draft checkpoint, or its id.
        out: Bundle directory; `./<target>-edgecc` when not given. Must be missing, empty or a
            bundle, which is replaced only when the new one is complete.
        force: Also replace a bundle that holds files of others.
        dry_run: Stop after the passes; write no bundle.
        dump_ir: Folder for the IR before the first pass and after each; with several devices, one
            folder in it for each.
        strict: Refuse checkpoints that give warnings.
        progress: `progress(stage, done, total)`.
        tell: Told at once what to expect of long builds.
        cache: Where engines that were built before are taken from, and new ones kept; None builds
            all, and keeps nothing.
        instruments: Told about every pass, see `edgecc.passes.instruments`.
        check: Compare values before and after each pass on so many sets of random inputs. What
            reproduces a mismatch is written to `dump_ir`, else to the working directory.
        offline: Do not ask the hub: take what its cache has.
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
        HubError: A model cannot be had from the hub.
    """
    chosen = compile_options(options)
    report = progress or (lambda stage, done, total: None)
    told = tell or _ignore
    source = local_path(target, "target")
    if out is not None:
        writable_path(out, "output")  # told now, and not after a download
    hub = _Hub(offline, told, progress)
    if not is_ir_text(source):
        source = hub.folder(target, "target")
    draft = hub.folder(draft, "draft")
    out = writable_path(out if out is not None else _default_output(source), "output")
    dump = ir_folder(dump_ir) if dump_ir is not None else None
    module = None
    if is_ir_text(source):
        module = read_lifted(source, draft, chosen)
        chosen = replace(chosen, prefill_chunk=lift_options_of(module).prefill_chunk)
    sources = [c.path for c in checkpoints_of(module).values()] if module else [source, draft]
    cache = cache or ArtifactCache(None)
    builds = not dry_run and any(d.library for d in chosen.devices)
    kept = cache.directory if builds else None
    check_outputs([p for p in sources if p is not None], out, dump, kept)
    if dry_run:
        check_destination(out, force=force)
    else:
        for device in chosen.devices:
            if device.library:
                load_library(device.library)  # told now, and not after minutes of work
    with nullcontext() if dry_run else BundleWriter(out, force=force) as writer:
        lifted = module or _lift(source, draft, chosen, report)
        try:
            managers = [
                pass_manager(
                    device,
                    chosen,
                    report=report,
                    dump=dump / device.name if dump and len(chosen.devices) > 1 else dump,
                    instruments=instruments,
                    check=check,
                )
                for device in chosen.devices
            ]
            check_module(lifted, chosen, report)
            lowered = [
                lower_for(lifted, device, chosen, manager)
                for device, manager in zip(chosen.devices, managers, strict=True)
            ]
            if strict:
                _refuse_warnings(findings_of(lifted))
            parts = shares(lowered, chosen)
            memory = [part.memory for part in parts]
            if writer is None:
                expect(parts, chosen, told)
                return compile_report(lowered, None, weight_bytes(parts), memory=memory)
            site = Site(writer, report, told, cache)
            written = write_artifacts(site, parts, chosen)
            bundle = publish(writer, lowered, written.artifacts, chosen)
            engines = [e for a in written.artifacts for e in a.engines]
            return compile_report(lowered, bundle, written.weight_bytes, engines, memory)
        finally:
            close_checkpoints(lifted)


@dataclass(frozen=True, slots=True)
class _Hub:
    """How checkpoints are found that may be models of the hub."""

    offline: bool
    tell: Callable[[Diagnostic], None]
    progress: Progress | None

    @overload
    def folder(self, value: str | Path, role: str) -> Path: ...
    @overload
    def folder(self, value: str | Path | None, role: str) -> Path | None: ...
    def folder(self, value: str | Path | None, role: str) -> Path | None:
        """The folder of a checkpoint, if there is one."""
        if value is None:
            return None
        return checkpoint_folder(
            value, role, offline=self.offline, tell=self.tell, progress=self.progress
        )


def _ignore(diagnostic: Diagnostic) -> None:
    """Tell nobody."""


def _default_output(target: Path) -> str:
    name = checkpoint_name(target)
    return f"{name.removesuffix(SUFFIX) if is_ir_text(target) else name}-edgecc"


def _lift(target: Path, draft: Path | None, options: CompileOptions, report: Progress) -> Module:
    # A method that was asked for says itself what it needs.
    method = options.spec_method
    check_needs_draft(options, draft is not None or method not in ("auto", NGRAM))
    check_needs_proposals(options, draft is not None or method != "auto")
    report("lift", 0, 1)
    sizes = LiftOptions(
        max_model_len=options.max_model_len,
        max_input_len=options.max_input_len,
        prefill_chunk=options.prefill_chunk,
        spec_method=options.spec_method,
        num_speculative_tokens=options.num_speculative_tokens,
        prompt_lookup_min=options.prompt_lookup_min,
        prompt_lookup_max=options.prompt_lookup_max,
        max_batch_size=options.max_batch_size,
        pads_rounds=any(d.pads_rounds for d in options.devices),
        components=options.components,
    )
    found = examine(target, draft, sizes)
    try:
        module = found.lifted()
    except EdgeccError:
        found.close()
        raise
    report("lift", 1, 1)
    return module


def _refuse_warnings(findings: list[Diagnostic]) -> None:
    warnings = [f for f in findings if f.severity is Severity.WARNING]
    if warnings:
        raise InputError(*[replace(w, severity=Severity.ERROR) for w in warnings])


__all__ = [
    "CompileOptions",
    "CompileReport",
    "attach_checkpoints",
    "compile",
    "lift",
]
