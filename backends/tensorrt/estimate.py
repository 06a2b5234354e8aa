"""What building engines is going to take, told before it is begun.

The figures are fits to builds with TensorRT-RTX 1.7.1 on one core of a server CPU. Kernels take
most of the time, weights most of the memory. `python -m benchmarks engines` prints estimates beside
what was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgecc.backends.cache import format_size
from edgecc.backends.tensorrt.child import LESS_MEMORY
from edgecc.backends.tensorrt.operands import Operand
from edgecc.errors import Diagnostic, ResourceError, Severity
from edgecc.ir.core import Graph


@dataclass(frozen=True, slots=True)
class Estimate:
    """What building one engine takes.

    Attributes:
        name: Of its graph.
        device: What it is for.
        seconds: Of one core.
        bytes: Memory at the peak.
        least_bytes: Memory without which it cannot be built: weights, plan and builder.
    """

    name: str
    device: str
    seconds: float
    bytes: int
    least_bytes: int

    def __str__(self) -> str:
        return f"{self.name}: about {self.seconds:.0f} s, {format_size(self.bytes)} of memory"


_LAYERS = (("attention",), ("gated_delta_net", "logged_delta_net"))
"""Ops that a layer has one of: attention layers, recurrent layers."""

START_S = 0.25
LAYER_S = 0.42
LAYER_SQUARED_S = 0.014
"""For each attention layer and profile: kernels are compiled, and the more there are in one network
the longer each takes. 2, 5, 8 and 28 layers with two profiles took 1.8, 5, 12 and 66 s."""
RECURRENT_S = 2.8
"""For each recurrent layer and profile: three of them and an attention layer took 23 s."""
PACKED_S = 15e-9
DENSE_S = 3.5e-9
"""For each byte of packed and of dense weights: an NVFP4 head of 88 MB took 2.3 s, dense tables of
156 MB 0.8 s."""

START_BYTES = 200 << 20
"""The process with the builder's library, before it has a network."""
LAYER_BYTES = 12 << 20
"""For each layer and profile: 8 attention layers took 200 MB, 28 took 520 MB, and three recurrent
layers with one of attention 100 MB."""
PACKED_FACTOR = 3.0
DENSE_FACTOR = 1.2
"""Of the bytes of packed and of dense weights: the plan holds them, and the builder widens some. An
NVFP4 head of 88 MB took 315 MB, dense tables of 156 MB 149 MB. Mapped files are not counted."""


def estimate(graph: Graph, device: str, profiles: int, constants: Iterable[Operand]) -> Estimate:
    """What building the engine of a graph takes.

    Args:
        graph: Lowered for the device, without calls.
        device: Its name.
        profiles: How many it is built for.
        constants: Arrays of weights that go into the engine.
    """
    ops = Counter(n.op.name for n in graph.nodes)
    attention, recurrent = (max(1, profiles) * sum(ops[o] for o in kind) for kind in _LAYERS)
    layers = attention + recurrent
    kernels = LAYER_S * attention + RECURRENT_S * recurrent + LAYER_SQUARED_S * layers**2
    dense = packed = 0
    for operand in constants:
        if operand.dtype.bits < 16:
            packed += operand.nbytes
        else:
            dense += operand.nbytes
    return Estimate(
        graph.name,
        device,
        START_S + kernels + PACKED_S * packed + DENSE_S * dense,
        int(START_BYTES + LAYER_BYTES * layers + PACKED_FACTOR * packed + DENSE_FACTOR * dense),
        START_BYTES // 2 + packed + dense,
    )


def expectation(estimates: Sequence[Estimate], available: int | None) -> Diagnostic:
    """What is told before building starts: a warning if the memory may not do.

    Args:
        estimates: Of a device's engines that are going to be built, one after the other.
        available: Bytes of memory that can be taken; None if unknown.

    Raises:
        ResourceError: There is not enough memory for one of them, whatever the builder does.
    """
    largest = max(estimates, key=lambda e: e.bytes)
    device = largest.device
    free = "" if available is None else f", {format_size(available)} are free"
    total = sum(e.seconds for e in estimates)
    message = (
        f"building {_engines(len(estimates))} for {device} takes about {total:.0f} s of one core "
        f"and {format_size(largest.bytes)} of memory{free}"
    )
    if available is not None:
        for item in estimates:
            if item.least_bytes > available:
                raise ResourceError(
                    "resources/memory",
                    f"building {item.name} for {device} takes at least "
                    f"{format_size(item.least_bytes)} of memory{free}",
                    notes=[str(e) for e in estimates],
                    help=LESS_MEMORY,
                )
    tight = available is not None and largest.bytes > available
    return Diagnostic(
        "build/memory" if tight else "build/estimate",
        message,
        notes=tuple(map(str, estimates)),
        help=LESS_MEMORY if tight else "",
        severity=Severity.WARNING if tight else Severity.NOTE,
    )


def _engines(count: int) -> str:
    return f"{count} engines" if count > 1 else "1 engine"
