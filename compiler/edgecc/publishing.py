"""What completes a bundle whatever its device: tokenizer, IR texts and manifest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edgecc.backends.base import Artifact
from edgecc.backends.bundle import Bundle
from edgecc.backends.bundle_writer import BundleWriter
from edgecc.checkpoints import checkpoints_of
from edgecc.compile_options import CompileOptions
from edgecc.compile_report import by_device
from edgecc.device_lowering import Lowered
from edgecc.ir.core import Json, Module
from edgecc.ir.printer import print_module
from edgecc.manifest import DeviceBundle, describe
from edgecc.text_side import copy_tokenizer


def publish(
    writer: BundleWriter,
    lowered: Sequence[Lowered],
    artifacts: Sequence[Artifact],
    options: CompileOptions,
) -> Bundle:
    """Add what does not depend on the backend, and move the bundle to its place.

    Args:
        writer: Of the unfinished bundle.
        lowered: For each device.
        artifacts: Of each device.
        options: What was asked for.

    Raises:
        ResourceError: The disk refuses.
    """
    first = lowered[0]
    checkpoints = checkpoints_of(first.module)
    copy_tokenizer(writer, checkpoints["target"])
    writer.write_file("ir/lifted.eir", _text(first.lifted).encode())
    for item in lowered:
        name = "lowered" if len(lowered) == 1 else f"lowered-{item.device.name}"
        writer.write_file(f"ir/{name}.eir", _text(item.module).encode())
    pipelines = {item.device.name: str(item.manager) for item in lowered}
    manifest = describe(
        [
            DeviceBundle(item.device.name, item.module, artifact)
            for item, artifact in zip(lowered, artifacts, strict=True)
        ],
        checkpoints,
        pipeline=pipelines[first.device.name] if len(lowered) == 1 else pipelines,
        decisions=by_device([(item.device.name, item.module.decisions) for item in lowered]),
        options=_recorded(options, first.module),
    )
    return writer.finish(manifest)


def _text(module: Module) -> str:
    """The module as text for the bundle: checkpoints by name, because paths are of this machine."""
    folders = dict(module.checkpoints)
    names = {role: Path(os.path.realpath(path)).name for role, path in folders.items()}
    module.checkpoints.update(names)
    text = print_module(module, locations=True)
    module.checkpoints.update(folders)
    return text


def _recorded(options: CompileOptions, module: Module) -> dict[str, Json]:
    """Options for the manifest, with defaults resolved."""
    limits = module.metadata["limits"]
    assert isinstance(limits, dict)
    draft = module.metadata.get("draft")
    recorded: dict[str, Json] = {
        name: getattr(options, name) for name in CompileOptions.__dataclass_fields__
    }
    if isinstance(options.device, tuple):
        recorded["device"] = list(options.device)
    if not any(device.library for device in options.devices):
        del recorded["weights"]
    recorded["max_model_len"] = limits["max_model_len"]
    recorded["max_input_len"] = limits["max_input_len"]
    if isinstance(draft, dict):
        names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        recorded |= {name: draft[name] for name in names if name in draft}
    return recorded
