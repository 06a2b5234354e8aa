"""What completes a bundle whatever its device: tokenizer, IR texts and manifest."""

from __future__ import annotations

import os
from pathlib import Path

from edgecc.backends.base import Artifact
from edgecc.backends.bundle import Bundle
from edgecc.backends.bundle_writer import BundleWriter
from edgecc.checkpoints import checkpoints_of
from edgecc.compile_options import CompileOptions
from edgecc.device_lowering import Lowered
from edgecc.ir.core import Json, Module
from edgecc.ir.printer import print_module
from edgecc.manifest import describe
from edgecc.text_side import copy_tokenizer


def publish(
    writer: BundleWriter, lowered: Lowered, artifact: Artifact, options: CompileOptions
) -> Bundle:
    """Add what does not depend on the backend, and move the bundle to its place.

    Raises:
        ResourceError: The disk refuses.
    """
    module = lowered.module
    checkpoints = checkpoints_of(module)
    copy_tokenizer(writer, checkpoints["target"])
    writer.write_file("ir/lifted.eir", _text(lowered.lifted).encode())
    writer.write_file("ir/lowered.eir", _text(module).encode())
    manifest = describe(
        module,
        artifact,
        lowered.device,
        checkpoints,
        pipeline=str(lowered.manager),
        options=_recorded(options, module),
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
    recorded["max_model_len"] = limits["max_model_len"]
    recorded["max_input_len"] = limits["max_input_len"]
    if isinstance(draft, dict):
        recorded["num_speculative_tokens"] = draft["num_speculative_tokens"]
    return recorded
