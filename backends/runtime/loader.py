"""From a bundle directory to a generator."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, Protocol, cast

from edgecc.backends.base import Engine, Progress
from edgecc.backends.bundle import Bundle
from edgecc.backends.runtime.chat import ChatTemplates
from edgecc.backends.runtime.generator import Generator
from edgecc.backends.runtime.model_info import DraftInfo, ModelInfo
from edgecc.backends.runtime.proposer import PROPOSERS
from edgecc.backends.runtime.tokenizer import Tokenizer, read_config
from edgecc.errors import BundleError, UnsupportedError, UsageError, did_you_mean

ENGINES: Mapping[str, str] = {
    "onnxruntime": "edgecc.backends.onnxruntime",
    "tensorrt": "edgecc.backends.tensorrt",
}
"""The module of each engine, by the name that a bundle's artifact has for its backend.

A bundle may come from anywhere, so it can choose among these and import nothing else.
"""

MAX_THREADS = 1024
"""More threads than any machine has cores for: asking for more is a slip, and may hang."""


class _EngineModule(Protocol):
    """What the module of an engine offers."""

    def open_engine(
        self,
        bundle: Bundle,
        artifact: Mapping[str, Any],
        *,
        num_threads: int | None,
        progress: Progress | None,
    ) -> Engine: ...


def load(
    bundle_path: str | os.PathLike[str],
    *,
    device: str | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> Generator:
    """Open a bundle for generation.

    Args:
        bundle_path: The bundle's directory.
        device: One of the devices the bundle was compiled for; may be left out if there is only
            one, or if the CPU is among them.
        num_threads: Threads of the engine; None leaves it to the engine.
        progress: Called as files are opened and prepared.

    Raises:
        BundleError: The directory is no bundle, is damaged, or has no artifact for the device.
        UnsupportedError: The engine, or a package it needs, is not installed, or the draft is not
            of a kind the runtime drives.
        ResourceError: A file cannot be read.
        UsageError: The number of threads is out of range.
    """
    bundle = Bundle.open(bundle_path)
    return load_bundle(bundle, device=device, num_threads=num_threads, progress=progress)


def load_bundle(
    bundle: Bundle,
    *,
    device: str | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> Generator:
    """Like `load`, for a bundle that is open already."""
    if num_threads is not None and (
        type(num_threads) is not int or not 1 <= num_threads <= MAX_THREADS
    ):
        raise UsageError(
            "usage/num-threads", f"num_threads is {num_threads!r}, expected 1 to {MAX_THREADS}"
        )
    model = ModelInfo.from_manifest(bundle.manifest)
    if model.draft is not None:
        _check_draft(bundle, model.draft)
    artifact = bundle.artifact(choose_device(bundle, device))
    engine = _engine_module(str(artifact["backend"]), bundle).open_engine(
        bundle, artifact, num_threads=num_threads, progress=progress
    )
    try:  # the text side last: what an engine lacks on this machine is known at once
        return Generator(engine, model, *_text_side(bundle), _generation_config(bundle))
    except BaseException:
        engine.close()
        raise


def _text_side(bundle: Bundle) -> tuple[Tokenizer | None, ChatTemplates | None]:
    if "tokenizer/tokenizer.json" not in bundle.manifest["files"]:
        return None, None
    directory = bundle.tokenizer_dir
    return Tokenizer.from_directory(directory), ChatTemplates.from_directory(directory)


def _generation_config(bundle: Bundle) -> dict[str, Any]:
    if "tokenizer/generation_config.json" not in bundle.manifest["files"]:
        return {}
    return read_config(bundle.tokenizer_dir, "generation_config.json")


def choose_device(bundle: Bundle, device: str | None) -> str:
    """The device to use: the one asked for, the only one, or the CPU.

    Raises:
        BundleError: None was asked for, and there are several others.
    """
    if device is not None:
        return device
    devices: list[str] = sorted(bundle.manifest["artifacts"])
    if len(devices) == 1:
        return devices[0]
    if "cpu" in devices:
        return "cpu"
    raise BundleError(
        "bundle/device-not-chosen",
        "the bundle is compiled for " + (", ".join(devices) or "no device"),
        where=str(bundle.path),
        help="name one: --device " + "|".join(devices) if devices else "compile it again",
    )


def _engine_module(backend: str, bundle: Bundle) -> _EngineModule:
    """Import an engine by name: only the one that is used needs its packages installed."""
    module = ENGINES.get(backend)
    if module is None:
        raise UnsupportedError(
            "runtime/unknown-engine",
            f"this edgecc has no engine '{backend}'",
            where=str(bundle.path),
            help=did_you_mean(backend, ENGINES),
        )
    try:
        return cast(_EngineModule, importlib.import_module(module))
    except ModuleNotFoundError as error:
        package = (error.name or module).partition(".")[0]
        raise UnsupportedError(
            "runtime/engine-not-installed",
            f"the engine '{backend}' needs {error.name}, which is not installed",
            where=str(bundle.path),
            help=f"pip install --upgrade {package}",
        ) from error


def _check_draft(bundle: Bundle, draft: DraftInfo) -> None:
    """A draft is one that the runtime can call.

    Raises:
        UnsupportedError: It is of an unknown method, or lacks an input or output of its method.
    """
    proposer = PROPOSERS.get(draft.method)
    if proposer is None:
        raise UnsupportedError(
            "runtime/unsupported-draft",
            f"the runtime does not drive drafts of method {draft.method}",
            where=str(bundle.path),
            help=did_you_mean(draft.method, PROPOSERS),
        )
    entry = bundle.entry("draft")
    roles = {port["role"] for port in (*entry["inputs"], *entry["outputs"])}
    missing = sorted(proposer.roles - roles)
    if missing:
        raise UnsupportedError(
            "runtime/unsupported-draft",
            f"this draft is no {draft.method} draft as the runtime calls them: it lacks "
            + ", ".join(missing),
            where=str(bundle.path),
            help="compile the bundle again, with this draft or the target alone",
        )
