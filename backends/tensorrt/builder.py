"""Runs the builder: profiles, progress, interruption, and errors that name the IR node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgecc.backends.base import Progress
from edgecc.backends.tensorrt.emitter import Emitter
from edgecc.devices import Device
from edgecc.errors import UnsupportedError
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
        self.builder = library.Builder(_logger(library, self.errors))

    def network(self, name: str) -> Any:
        """An empty strongly typed network. The plan holds its name: it must not be a counter."""
        flags = self.trt.NetworkDefinitionCreationFlag
        typed = 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0
        network = self.builder.create_network(typed)
        network.name = name
        return network

    def build(self, emitter: Emitter, profiles: Sequence[Profile], progress: Progress) -> bytes:
        """The serialized plan of a filled network.

        Args:
            emitter: What filled it.
            profiles: At least one if any input has sizes that calls choose.
            progress: Told about the builder's steps.

        Raises:
            UnsupportedError: The builder refused; the IR node is named if its message tells one.
            KeyboardInterrupt: The user interrupted; the builder has stopped.
        """
        config = self.builder.create_builder_config()
        self._target(config)
        for profile in profiles:
            made = self.builder.create_optimization_profile()
            for name, shapes in profile.shapes.items():
                made.set_shape(name, *shapes)
            config.add_optimization_profile(made)
        guard = _Guard(f"build {emitter.graph.name}", progress)
        monitor = _monitor(self.trt, guard)
        config.progress_monitor = monitor
        self.errors.clear()
        plan = self.builder.build_serialized_network(emitter.network, config)
        if guard.stopped:
            raise guard.stopped[0]
        if plan is None:
            raise self.refusal(emitter)
        return bytes(plan)

    def refusal(self, emitter: Emitter) -> UnsupportedError:
        """What the log says about a network that cannot be built, for the user."""
        text = "\n".join(self.errors) or "the builder gives no reason"
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
        """Say which GPUs to build for; the full library builds for the one that is there."""
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


def _logger(library: Any, errors: list[str]) -> Any:
    """A logger that keeps errors and says nothing."""
    severities = (library.ILogger.Severity.INTERNAL_ERROR, library.ILogger.Severity.ERROR)

    class Log(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in severities:
                errors.append(message)

    return Log()


class _Guard:
    """Reports progress until that raises; then the builder is told to stop.

    An exception must not pass through the builder: it is kept, and raised when the builder is back.
    """

    def __init__(self, stage: str, progress: Progress) -> None:
        self.stage = stage
        self.progress = progress
        self.stopped: list[BaseException] = []

    def report(self, done: int, total: int) -> None:
        """Pass on one step of the outermost phase."""
        try:
            if not self.stopped:
                self.progress(self.stage, done, total)
        except BaseException as error:  # KeyboardInterrupt too
            self.stopped.append(error)


def _monitor(library: Any, guard: _Guard) -> Any:
    """A progress monitor of the library."""

    class Monitor(library.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            library.IProgressMonitor.__init__(self)
            self._top, self._total = "", 0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self._top, self._total = phase_name, num_steps
                guard.report(0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name == self._top:
                guard.report(min(step + 1, self._total), self._total)
            return not guard.stopped

        def phase_finish(self, phase_name: str) -> None:
            if phase_name == self._top:
                guard.report(self._total, self._total)

    return Monitor()
