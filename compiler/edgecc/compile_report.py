"""What a compile tells when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from edgecc.backends.base import BuiltEngine
from edgecc.backends.bundle import Bundle
from edgecc.checkpoints import findings_of
from edgecc.device_lowering import Lowered
from edgecc.errors import Diagnostic
from edgecc.memory_plan import MemoryPlan
from edgecc.passes.base import Remark
from edgecc.passes.manager import PassTiming

DeviceLines: TypeAlias = Sequence[tuple[str, Sequence[str]]]
"""Lines by device."""


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What a compile did.

    Attributes:
        bundle: The finished bundle; None after a dry run.
        decisions: What was chosen and why, one line each.
        timings: Seconds and sizes per pass.
        remarks: Where each pass applied, or why not.
        findings: Warnings and notes about the checkpoints.
        pipeline: The passes, as text; with several devices, `device: passes` of each.
        weight_bytes: Bytes of the bundle's weights, packed.
        checks: How the engine compared with the reference, one line each; empty if it was not.
        unchecked: Outputs that `check` could not compare, and why, one line each.
        engines: How engines were made; empty where none are built.
        memory: What running takes, by device.
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
    engines: tuple[BuiltEngine, ...] = ()
    memory: tuple[MemoryPlan, ...] = ()


def compile_report(
    lowered: Sequence[Lowered],
    bundle: Bundle | None,
    weight_bytes: int,
    engines: Sequence[BuiltEngine] = (),
    memory: Sequence[MemoryPlan] = (),
) -> CompileReport:
    """The report on modules that were lowered, and written if there is a bundle.

    Args:
        lowered: For each device.
        bundle: What was written.
        weight_bytes: Bytes of its weights.
        engines: How its engines were made.
        memory: What running takes, by device.
    """
    return CompileReport(
        bundle=bundle,
        decisions=tuple(by_device([(x.device.name, x.module.decisions) for x in lowered])),
        timings=tuple(t for x in lowered for t in x.manager.timings),
        remarks=tuple(r for x in lowered for r in x.ctx.remarks),
        findings=tuple(findings_of(lowered[0].lifted)),
        pipeline="; ".join(_named([(x.device.name, [str(x.manager)]) for x in lowered])),
        weight_bytes=weight_bytes,
        checks=tuple(_named([(x.device.name, x.checks) for x in lowered])),
        unchecked=tuple(_named([(x.device.name, x.manager.unchecked()) for x in lowered])),
        engines=tuple(engines),
        memory=tuple(memory),
    )


def by_device(lines: DeviceLines) -> list[str]:
    """Lines about several devices: those that all have once, then the others with the device."""
    if len(lines) == 1:
        return list(lines[0][1])
    common = set.intersection(*(set(found) for _, found in lines))
    own = [(device, [x for x in found if x not in common]) for device, found in lines]
    return [*(x for x in lines[0][1] if x in common), *_named(own)]


def _named(lines: DeviceLines) -> list[str]:
    """Lines with the device, if there are several."""
    several = len(lines) > 1
    return [f"{device}: {x}" if several else x for device, found in lines for x in found]
