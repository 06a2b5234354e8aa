"""Opens the engines of a bundle on the GPU of this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from edgecc.backends.base import Progress, Role
from edgecc.backends.interface import Interface
from edgecc.backends.mapped_weights import WeightFile
from edgecc.backends.tensorrt.artifact import check_engines
from edgecc.backends.tensorrt.bound_weights import BoundWeights
from edgecc.backends.tensorrt.cuda import Cuda, load_runtime
from edgecc.backends.tensorrt.device import DeviceArray, DeviceState
from edgecc.backends.tensorrt.executable import TrtExecutable
from edgecc.backends.tensorrt.library import NAMES, error_log, load_library, uncollected
from edgecc.backends.tensorrt.plan import Plan, deserialize
from edgecc.backends.tensorrt.rounds import TrtRounds
from edgecc.errors import BackendError, BundleError, UnsupportedError


class BundleFiles(Protocol):
    """What the engine needs of a bundle: its files."""

    def file(self, relative: str) -> Path:
        """Path of a file of the bundle."""
        ...


class TrtEngine:
    """The engines of one bundle on a GPU.

    Args:
        state: Plans and memory.
        artifact: The bundle's part of the manifest, checked.

    Attributes:
        rounds: Greedy rounds on the device; None for a target that does not choose tokens, or that
            reads images.
    """

    def __init__(self, state: DeviceState, artifact: Mapping[str, Any]) -> None:
        self._state = state
        self._artifact = artifact
        self._entries = {"target": self._executable("target", {})}
        if "draft" in artifact["entries"]:
            self._entries["draft"] = self._executable("draft", self._taps(), min_rows=1)
        if "vision" in artifact["entries"]:
            self._entries["vision"] = self._executable("vision", {})
        self.rounds: TrtRounds | None = self._rounds()

    def entry(self, name: str) -> TrtExecutable:
        """The executable of an entry.

        Raises:
            BundleError: The bundle has no such entry.
            BackendError: The engine is closed.
        """
        if not self._entries:
            raise BackendError("tensorrt/closed", "the engine is closed")
        if name not in self._entries:
            raise BundleError("bundle/no-entry", f"the bundle has no entry {name!r}")
        return self._entries[name]

    def close(self) -> None:
        """Free the memory of the GPU."""
        if not self._entries:
            return
        self._entries.clear()
        with suppress(BackendError):  # of a GPU that failed: its user has got it already
            self._state.stream.synchronize()
        if self.rounds is not None:
            self.rounds.close()
            self.rounds = None
        self._state.close()

    def _executable(
        self, name: str, given: Mapping[str, DeviceArray], *, min_rows: int | None = None
    ) -> TrtExecutable:
        return TrtExecutable(
            self._state,
            self._artifact["programs"][name],
            self._artifact["engines"],
            Interface(self._artifact["entries"][name]),
            min_rows=int(self._artifact["min_rows"]) if min_rows is None else min_rows,
            slots=int(self._artifact.get("max_batch_size", 1)),
            given=given,
        )

    def _taps(self) -> dict[str, DeviceArray]:
        """The draft's features lie where the target's taps do, so that nothing copies them."""
        target = self._entries["target"]
        port = target.interface.outputs.get(Role.HIDDEN_TAP)
        ports = self._artifact["entries"]["draft"]["inputs"]
        names = [p["name"] for p in ports if p["role"] == Role.FEATURES]
        return {} if port is None else dict.fromkeys(names, target.values[port.value])

    def _rounds(self) -> TrtRounds | None:
        target = self._entries["target"]
        if Role.CHOSEN_TOKENS not in target.interface.outputs:
            return None
        if Role.POSITIONS in target.interface.inputs:
            return None  # positions are the prompt's: the host passes them, and so makes the calls
        return TrtRounds(self._state, target, self._entries.get("draft"))


def open_engine(
    bundle: BundleFiles,
    artifact: Mapping[str, Any],
    *,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> TrtEngine:
    """Open an artifact of a bundle. What this machine lacks is said before a plan is read.

    Args:
        bundle: Where the files are.
        artifact: Its part of the manifest.
        num_threads: Not used: the GPU computes.
        progress: Called after each engine.

    Raises:
        UnsupportedError: A package, the driver or a GPU is missing, or they are not those that the
            engines were built for.
        BundleError: The manifest or an engine is damaged.
        ResourceError: The GPU has too little memory.
    """
    check_engines(artifact)
    weights = _weights(bundle, artifact)
    library = load_library(artifact["library"])
    _check_version(library, artifact)
    cuda = Cuda(load_runtime())
    _check_gpu(cuda, artifact)
    errors: list[str] = []
    log = error_log(library, errors)
    with uncollected():
        runtime = library.Runtime(log)
    plans: dict[str, Plan] = {}
    kernels: list[Any] = []
    opened: dict[str, Any] = {}  # graphs of equal layers have one plan
    for done, (name, described) in enumerate(artifact["engines"].items()):
        _report(progress, done, artifact["engines"])
        file = described["file"]
        if file not in opened:
            with uncollected():
                opened[file] = deserialize(library, runtime, bundle.file(file), errors)
        plans[name] = Plan(library, opened[file], name, described, errors, kernels)
    _report(progress, len(plans), artifact["engines"])
    state = DeviceState(cuda, plans, keep=(runtime, log, kernels))
    try:
        state.bind_weights(weights)
        return TrtEngine(state, artifact)
    except BaseException:
        state.close()
        raise


def _weights(bundle: BundleFiles, artifact: Mapping[str, Any]) -> BoundWeights:
    """The weights that are inputs of engines, not read yet."""
    relative = artifact.get("weight_file")
    file = WeightFile(bundle.file(relative), artifact["tensors"]) if relative else None
    return BoundWeights(artifact, file)


def _report(progress: Progress | None, done: int, engines: Iterable[object]) -> None:
    if progress is not None:
        progress("load", done, len(list(engines)))


def _check_version(library: Any, artifact: Mapping[str, Any]) -> None:
    """Plans are for one version of the library.

    Raises:
        UnsupportedError: Another one is installed.
    """
    built, found = artifact["library_version"], str(library.__version__)
    if built != found:
        product, install = NAMES[artifact["library"]]
        raise UnsupportedError(
            "tensorrt/version",
            f"the engines were built with {product} {built}, and {found} is installed",
            help=f"compile the bundle again here, or install that version: {install}",
        )


def _check_gpu(cuda: Cuda, artifact: Mapping[str, Any]) -> None:
    """Plans are for some GPUs.

    Raises:
        UnsupportedError: The GPU of this machine is another one.
    """
    found, built = cuda.capability, artifact["compute_capabilities"]
    if found not in built:
        wanted = ", ".join(map(_dotted, built))
        raise UnsupportedError(
            "tensorrt/wrong-gpu",
            f"the engines are for GPUs of compute capability {wanted}, and this one has "
            f"{_dotted(found)}",
            help=f"compile for this GPU (--device sm{found}, if edgecc has that device), or choose "
            "another one with CUDA_VISIBLE_DEVICES",
        )


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
