"""Opens the models of a bundle with ONNX Runtime."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from edgecc.backends.artifact import check_artifact
from edgecc.backends.base import Progress
from edgecc.backends.interface import Interface
from edgecc.backends.mapped_weights import WeightFile
from edgecc.backends.memory import available_bytes
from edgecc.backends.onnxruntime.executable import OrtExecutable
from edgecc.backends.onnxruntime.expand import expand, expanded_bytes
from edgecc.errors import BackendError, BundleError, ResourceError, UnsupportedError

if TYPE_CHECKING:
    import onnxruntime


class BundleFiles(Protocol):
    """What the engine needs of a bundle: its files. A bundle being written has them too."""

    def file(self, relative: str) -> Path:
        """Path of a file of the bundle."""
        ...


SINGLE_THREAD_BYTES = 64 << 20
"""Below this many packed bytes a second thread costs more than it brings (measured)."""


class OrtEngine:
    """The sessions of one bundle. Entries are made on first use and own their caches."""

    def __init__(
        self,
        bundle: BundleFiles,
        artifact: Mapping[str, Any],
        *,
        num_threads: int | None,
        progress: Progress | None,
    ) -> None:
        check_artifact(artifact, __package__, "models")
        self._artifact = artifact
        self._entries: dict[str, OrtExecutable] = {}
        weights = WeightFile(bundle.file(artifact["weight_file"]), artifact["tensors"])
        _check_memory(artifact["models"].values(), weights)
        threads = num_threads or _default_threads(weights)
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        for done, (name, model) in enumerate(artifact["models"].items()):
            if progress:
                progress("load", done, len(artifact["models"]))
            self._sessions[name] = _open(bundle, model, weights, threads)
        if progress:
            progress("load", len(self._sessions), len(self._sessions))
        self._check_models()
        _give_back_memory()

    def entry(self, name: str) -> OrtExecutable:
        """The executable of an entry.

        Raises:
            BundleError: The bundle has no such entry.
            BackendError: The engine is closed.
        """
        if not self._sessions:
            raise BackendError("onnxruntime/closed", "the engine is closed")
        if name not in self._entries:
            entry = self._artifact["entries"].get(name)
            if entry is None:
                raise BundleError("bundle/no-entry", f"the bundle has no entry {name!r}")
            self._entries[name] = OrtExecutable(
                self._sessions,
                self._artifact["programs"][name],
                Interface(entry),
                min_rows=int(self._artifact["min_rows"]),
                slots=int(self._artifact.get("max_batch_size", 1)),
            )
        return self._entries[name]

    def _check_models(self) -> None:
        """Compare what the programs bind with what the models have."""
        for program in self._artifact["programs"].values():
            for step in program:
                session = self._sessions[step["graph"]]
                found = (
                    {i.name for i in session.get_inputs()},
                    {o.name for o in session.get_outputs()},
                )
                if found != (set(step["inputs"]), set(step["outputs"])):
                    raise BundleError(
                        "bundle/model",
                        f"model {step['graph']!r} has other inputs or outputs than its program",
                        where="bundle.json",
                        help="compile the bundle again",
                    )

    def close(self) -> None:
        """Drop sessions and caches."""
        self._entries.clear()
        self._sessions.clear()
        _give_back_memory()


def open_engine(
    bundle: BundleFiles,
    artifact: Mapping[str, Any],
    *,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> OrtEngine:
    """Open an artifact of a bundle.

    Args:
        bundle: Where the files are.
        artifact: Its part of the manifest.
        num_threads: Threads per operator; None takes one for small models and all cores else.
        progress: Called after each model.

    Raises:
        UnsupportedError: onnxruntime is not installed.
        BundleError: A model or tensor is missing or not what the manifest says.
    """
    return OrtEngine(bundle, artifact, num_threads=num_threads, progress=progress)


def _open(
    bundle: BundleFiles, model: Mapping[str, Any], weights: WeightFile, threads: int
) -> onnxruntime.InferenceSession:
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise UnsupportedError(
            "onnxruntime/missing",
            "this bundle runs on ONNX Runtime, which is not installed",
            help="pip install onnxruntime",
        ) from error
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # its errors arrive as exceptions
    # A pool that spins after its work would keep the cores from the next session of the program.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    values = []
    for item in model["expand"]:
        for name, array in expand(item, weights).items():
            # Through DLPack the session itself keeps the array: until a kernel has packed it, or
            # for good where none does. A plain OrtValue would leave it with a dangling pointer.
            value = ort.OrtValue.from_dlpack(array)
            options.add_initializer(name, value)
            values.append(value)  # the options only point at it
    path = bundle.file(model["file"])
    try:
        return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises its own classes, all derived from Exception
        raise BundleError(
            "bundle/model",
            f"ONNX Runtime cannot open the model: {error}",
            where=str(path),
            help="compile the bundle again",
        ) from error


def _check_memory(models: Iterable[Mapping[str, Any]], weights: WeightFile) -> None:
    """Say what expanding takes before it takes it: afterwards the system would end the process.

    Raises:
        ResourceError: There is too little memory.
    """
    needed = sum(expanded_bytes(item, weights) for model in models for item in model["expand"])
    free = available_bytes()
    if free is not None and needed > free:
        raise ResourceError(
            "resources/memory",
            f"loading expands weights to {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB "
            "are free",
            where=str(weights.path),
            help="compile with --linear-form int8-split, where NVFP4 weights stay in 8 bits, or "
            "for a GPU; or load the bundle on a larger machine",
        )


def _default_threads(weights: WeightFile) -> int:
    if weights.path.stat().st_size < SINGLE_THREAD_BYTES:
        return 1
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _give_back_memory() -> None:
    """Return freed heap to the system: expansion leaves it behind on glibc."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        except (OSError, AttributeError):
            return
