"""One device's share of a compile: its passes over a copy of the lifted module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgecc.backends.base import Progress
from edgecc.compile_checks import check_quantized
from edgecc.compile_options import CompileOptions
from edgecc.devices import Device
from edgecc.ir.clone import clone_module
from edgecc.ir.core import Module
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.instruments import Instrument
from edgecc.passes.legalize import Legalize, LegalizeOptions
from edgecc.passes.manager import PassManager
from edgecc.passes.pipeline import parse_pipeline
from edgecc.reproduction import KeepReproducer, Runner


@dataclass(slots=True)
class Lowered:
    """A module after a device's passes, what they reported, and what it was before them.

    Attributes:
        lifted: As lifted; all devices of a compile have the same one, and leave it as it is.
        module: Its copy after the passes.
        device: What it was lowered for.
        manager: Ran the passes.
        ctx: Their remarks.
        checks: How it compared with the reference, one line each.
    """

    lifted: Module
    module: Module
    device: Device
    manager: PassManager
    ctx: PassContext
    checks: list[str] = field(default_factory=list)


def pass_manager(
    device: Device,
    options: CompileOptions,
    *,
    report: Progress,
    dump: Path | None = None,
    instruments: Sequence[Instrument] = (),
    check: int = 0,
) -> PassManager:
    """The passes for a device, ready to run.

    Args:
        device: What is lowered for.
        options: May replace the default passes.
        report: Told about each pass.
        dump: Folder for the IR before the first pass and after each.
        instruments: Told about every pass.
        check: Compare values before and after each pass on so many sets of random inputs.

    Raises:
        UsageError: The pipeline that was asked for cannot be used.
    """
    return PassManager(
        _passes(device, options),
        dump_dir=dump,
        instruments=instruments,
        observer=lambda name, i, n: report(f"pass {name}", i, n),
        check=check,
        on_mismatch=KeepReproducer(Runner(device, check), dump or Path()),
    )


def lower_for(
    lifted: Module, device: Device, options: CompileOptions, manager: PassManager
) -> Lowered:
    """Run a device's passes over a copy of the lifted module.

    Args:
        lifted: As lifted and checked; it stays as it is.
        device: What is lowered for.
        options: What was asked for.
        manager: Of this device, see `pass_manager`.

    Raises:
        UsageError: A quantization that was asked for found nothing to round.
        InputError: The pair does not fit together.
        UnsupportedError: The device cannot run it.
        MismatchError: A pass changed what is computed.
    """
    lowered = Lowered(lifted, clone_module(lifted), device, manager, PassContext(device))
    manager.run(lowered.module, lowered.ctx)
    check_quantized(lowered.module, options, lowered.ctx)
    return lowered


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
