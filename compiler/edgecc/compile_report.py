"""What a compile tells when it is done."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.backends.bundle import Bundle
from edgecc.checkpoints import findings_of
from edgecc.device_lowering import Lowered
from edgecc.errors import Diagnostic
from edgecc.passes.base import Remark
from edgecc.passes.manager import PassTiming


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


def compile_report(lowered: Lowered, bundle: Bundle | None, weight_bytes: int) -> CompileReport:
    """The report on a module that was lowered, and written if there is a bundle."""
    return CompileReport(
        bundle=bundle,
        decisions=tuple(lowered.module.decisions),
        timings=tuple(lowered.manager.timings),
        remarks=tuple(lowered.ctx.remarks),
        findings=tuple(findings_of(lowered.module)),
        pipeline=str(lowered.manager),
        weight_bytes=weight_bytes,
        checks=tuple(lowered.checks),
        unchecked=tuple(lowered.manager.unchecked()),
    )
