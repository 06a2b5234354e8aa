"""Runs the builder: profiles, progress, interruption, and errors that name the IR node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgecc.backends.base import Progress
from edgecc.backends.tensorrt.child import LESS_MEMORY
from edgecc.backends.tensorrt.emitter import Emitter
from edgecc.backends.tensorrt.library import OUT_OF_MEMORY, error_log, uncollected
from edgecc.devices import Device
from edgecc.errors import ResourceError, UnsupportedError
from edgecc.ir.core import site

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Smallest, most likely and largest shape of each input whose sizes calls choose."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Shapes that an engine is optimized for.

    Attributes:
        name: `verify`, `prefill` or `image`.
        shapes: Of the inputs with sizes that calls choose.
    """

    name: str
    shapes: Shapes


class Session:
    """One builder with its log.

    Args:
        library: The module `tensorrt_rtx` or `tensorrt`.
        device: What is built for.
    """

    def __init__(self, library: Any, device: Device) -> None:
        self.trt = library
        self.device = device
        self.errors: list[str] = []
        with uncollected():
            self.builder = library.Builder(error_log(library, self.errors))

    def network(self, name: str) -> Any:
        """An empty strongly typed network. The plan holds its name: it must not be a counter."""
        flags = self.trt.NetworkDefinitionCreationFlag
        typed = 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0
        network = self.builder.create_network(typed)
        network.name = name
        return network

    def build(
        self, emitter: Emitter, profiles: Sequence[Profile], progress: Progress
    ) -> memoryview:
        """The serialized plan of a filled network, in the builder's memory.

        Args:
            emitter: What filled it.
            profiles: At least one if any input has sizes that calls choose.
            progress: Told about the builder's phases: name, steps done, steps.

        Raises:
            UnsupportedError: The builder refused; the IR node is named if its message tells one.
            ResourceError: It ran out of memory.
            KeyboardInterrupt: The user interrupted; the builder has stopped.
        """
        config = self.config(emitter, profiles)
        guard = _Guard(progress)
        monitor = _monitor(self.trt, guard)
        config.progress_monitor = monitor
        self.errors.clear()
        plan = self.builder.build_serialized_network(emitter.network, config)
        if guard.stopped:
            raise guard.stopped.pop()  # kept in the guard, it would be a cycle with this frame
        if plan is None:
            raise self.refusal(emitter)
        return memoryview(plan)

    def config(self, emitter: Emitter, profiles: Sequence[Profile]) -> Any:
        """How the builder is to build: for which GPUs and shapes, how exactly."""
        config = self.builder.create_builder_config()
        self._target(config)
        if emitter.exact_float32:
            config.clear_flag(self.trt.BuilderFlag.TF32)
        for profile in profiles:
            made = self.builder.create_optimization_profile()
            for name, shapes in profile.shapes.items():
                made.set_shape(name, *shapes)
            config.add_optimization_profile(made)
        return config

    def refusal(self, emitter: Emitter) -> UnsupportedError | ResourceError:
        """What the log says about a network that cannot be built, for the user."""
        text = "\n".join(self.errors) or "the builder gives no reason"
        if OUT_OF_MEMORY.search(text):
            return out_of_memory(emitter.graph.name, _lines(text)[0])
        named = sorted((n for n in emitter.nodes if n in text), key=len, reverse=True)
        notes = [f"the builder says: {line}" for line in _lines(text)[1:4]]
        where = f"@{emitter.graph.name}"
        if named:
            node = emitter.nodes[named[0]]
            where = site(emitter.graph, node)
            notes += [
                f"weight @{w}: {emitter.module.weights.origin(w)}"
                for w in node.weights
                if w in emitter.module.weights
            ]
        return UnsupportedError(
            "tensorrt/build",
            f"{self.device.library} {self.trt.__version__} cannot build for {self.device.name}: "
            f"{_lines(text)[0]}",
            where=where,
            notes=notes,
            help="compile for another device, or keep the named layer in another precision",
        )

    def _target(self, config: Any) -> None:
        """Say which GPUs to build for; the full library builds for the one that is there.

        Engines of TensorRT-RTX allocate nothing while they run, so that a CUDA graph can hold them.
        """
        flags = self.trt.BuilderFlag
        if hasattr(flags, "REQUIRE_USER_ALLOCATION"):
            config.set_flag(flags.REQUIRE_USER_ALLOCATION)
        if not hasattr(config, "num_compute_capabilities"):
            return
        capabilities = self.device.compute_capabilities
        config.num_compute_capabilities = len(capabilities)
        for index, number in enumerate(capabilities):
            config.set_compute_capability(getattr(self.trt.ComputeCapability, f"SM{number}"), index)


def _lines(text: str) -> list[str]:
    """The builder's messages without its noise, at most 300 characters each."""
    cleaned = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return [line[:300] for line in cleaned if line] or [text[:300]]


class _Guard:
    """Reports progress until that raises; then the builder is told to stop.

    An exception must not pass through the builder: it is kept, and raised when the builder is back.
    """

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.stopped: list[BaseException] = []

    def report(self, phase: str, done: int, total: int) -> None:
        """Pass on one step of a phase."""
        try:
            if not self.stopped:
                self.progress(phase, done, total)
        except BaseException as error:  # KeyboardInterrupt too
            self.stopped.append(error)


def _monitor(library: Any, guard: _Guard) -> Any:
    """A progress monitor of the library.

    It tells the two outer levels of phases: the others come by hundreds, and pass in no time.
    """

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)
            self._totals: dict[str, int] = {}
            self._top = ""

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._top = phase_name
            if parent_phase in (None, self._top):
                self._totals[phase_name] = num_steps
                guard.report(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self._totals:
                total = self._totals[phase_name]
                guard.report(phase_name, min(step + 1, total), total)
            return not guard.stopped

        def phase_finish(self, phase_name: str) -> None:
            if phase_name in self._totals:
                total = self._totals.pop(phase_name)
                guard.report(phase_name, total, total)

    return Monitor()


def out_of_memory(name: str, reason: str) -> ResourceError:
    """The error for a builder that did not get the memory it asked for."""
    return ResourceError(
        "resources/memory",
        f"the builder of {name} ran out of memory: {reason}",
        help=LESS_MEMORY,
    )
