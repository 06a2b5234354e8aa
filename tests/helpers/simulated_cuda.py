"""A GPU's memory, streams and captured graphs in NumPy, in place of `cuda.bindings.runtime`.

Work put into a stream waits until the stream is synchronized, as late as CUDA allows, and memory of
the host is read then. Every access has to lie in one live allocation. Calls are checked against the
signatures of the real module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from helpers.signatures import check_call

Bytes: TypeAlias = NDArray[np.uint8]
Work: TypeAlias = Callable[[], None]

FIRST_ADDRESS = 1 << 44
UNWRITTEN = 0xFF
"""Byte of new memory. Floats are NaN, so that a missing clear shows."""

GAP = 4096
"""Bytes between allocations that belong to nobody."""


class SimulatedCuda:
    """The functions that edgecc calls; constants and enumerations are those of the real module.

    Args:
        real: The module `cuda.bindings.runtime`.
        capability: Of the GPU; None for a machine without one.

    Attributes:
        called: Names of the functions called.
        synchronized: How often the host waited.
        launched: How often a captured graph was started.
        streams: How many there are.
        driver: CUDA version of the driver, as CUDA counts versions.
        broken: After an illegal access every call answers with that.
        refuses_graphs: There is no memory for graphs.
        copied: Bytes that passed between host and device, by direction.
    """

    def __init__(self, real: Any, capability: int | None = 120) -> None:
        self.real = real
        self.capability = capability
        self.memory: dict[int, Bytes] = {}
        self.pinned: dict[int, Bytes] = {}
        self.queue: list[Work] = []
        self.recording: list[Work] | None = None
        self.graphs: dict[int, list[Work]] = {}
        self.called: set[str] = set()
        self.synchronized = 0
        self.launched = 0
        self.copied = {"HostToDevice": 0, "DeviceToHost": 0, "DeviceToDevice": 0}
        self.limit = 1 << 34
        self.streams = 0
        self.driver = 13000
        self.broken = False
        self.refuses_graphs = False
        self._next = FIRST_ADDRESS

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)  # AttributeError for a name that does not exist
        function = getattr(type(self), f"do_{name}", None)
        if function is None:
            assert not name.startswith("cuda") or not callable(real) or isinstance(real, type), (
                f"{name} is not simulated"
            )
            return real

        def call(*args: Any) -> tuple[Any, ...]:
            self.called.add(name)
            check_call(real, args, {}, self._fits)
            status = self.real.cudaError_t
            broken = self.broken and not name.startswith("cudaGetError")
            result = status.cudaErrorIllegalAddress if broken else function(self, *args)
            if isinstance(result, status):
                return (result, None) if name in _WITH_RESULT else (result,)
            return (status.cudaSuccess, *([] if result is None else [result]))

        return call

    def _fits(self, kind: str, value: Any) -> bool:
        if kind in ("size_t", "int", "unsigned int", "unsigned long long"):
            return isinstance(value, int) and (value >= 0 or kind == "int")
        if kind:
            return isinstance(value, getattr(self.real, kind))
        return isinstance(value, int | self.real.cudaStream_t | object)

    # --- device ---

    def do_cudaDriverGetVersion(self) -> int:
        return 0 if self.capability is None else self.driver

    def do_cudaRuntimeGetVersion(self) -> int:
        return 13000

    def do_cudaGetDeviceCount(self) -> Any:
        if self.capability is None or self.driver < self.do_cudaRuntimeGetVersion():
            return self.real.cudaError_t.cudaErrorInsufficientDriver
        return 1 if self.capability else 0

    def do_cudaSetDevice(self, device: int) -> None:
        assert device == 0

    def do_cudaDeviceGetAttribute(self, attribute: Any, device: int) -> int:
        assert self.capability is not None
        kinds = self.real.cudaDeviceAttr
        parts = {
            kinds.cudaDevAttrComputeCapabilityMajor: self.capability // 10,
            kinds.cudaDevAttrComputeCapabilityMinor: self.capability % 10,
        }
        return parts[attribute]

    def do_cudaGetErrorName(self, error: Any) -> Any:
        return self.real.cudaGetErrorName(error)[1]

    def do_cudaGetErrorString(self, error: Any) -> Any:
        return self.real.cudaGetErrorString(error)[1]

    # --- memory ---

    def do_cudaMalloc(self, size: int) -> Any:
        assert size > 0
        if size + sum(map(len, self.memory.values())) > self.limit:
            return self.real.cudaError_t.cudaErrorMemoryAllocation
        address = self._next
        self.memory[address] = np.full(size, UNWRITTEN, np.uint8)
        self._next += -(-(size + GAP) // 256) * 256
        return address

    def do_cudaFree(self, address: int) -> Any:
        self.run()  # a free waits
        if address not in self.memory:
            return self.real.cudaError_t.cudaErrorInvalidValue
        del self.memory[address]
        return None

    def do_cudaHostAlloc(self, size: int, flags: int) -> int:
        buffer = np.full(size, UNWRITTEN, np.uint8)
        self.pinned[buffer.ctypes.data] = buffer
        return int(buffer.ctypes.data)

    def do_cudaFreeHost(self, address: int) -> Any:
        assert not self.queue, "page-locked memory is freed while work may use it"
        if address not in self.pinned:
            return self.real.cudaError_t.cudaErrorInvalidValue
        del self.pinned[address]
        return None

    def device(self, address: int, nbytes: int) -> Bytes:
        """Bytes of device memory, all in one allocation."""
        for base, data in self.memory.items():
            if base <= address < base + len(data):
                assert address + nbytes <= base + len(data), "past the end of an allocation"
                return data[address - base : address - base + nbytes]
        raise AssertionError(f"{address:#x} is no device memory")

    def _host(self, address: int, nbytes: int) -> Bytes:
        assert address < FIRST_ADDRESS or address not in self.memory, "device memory as host memory"
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def _is_pinned(self, address: int) -> bool:
        return any(a <= address < a + len(data) for a, data in self.pinned.items())

    # --- streams ---

    def do_cudaStreamCreateWithFlags(self, flags: int) -> Any:
        assert flags == self.real.cudaStreamNonBlocking
        self.streams += 1
        return self.real.cudaStream_t(4711)

    def do_cudaStreamDestroy(self, stream: Any) -> None:
        self.streams -= 1
        self.run()

    def put(self, work: Work) -> None:
        """Add work to the stream, or to the graph that is being captured."""
        (self.queue if self.recording is None else self.recording).append(work)

    def run(self) -> None:
        """Do what waits."""
        while self.queue:
            self.queue.pop(0)()

    def do_cudaStreamSynchronize(self, stream: Any) -> Any:
        if self.recording is not None:
            return self.real.cudaError_t.cudaErrorStreamCaptureUnsupported
        self.synchronized += 1
        self.run()
        return None

    def do_cudaMemsetAsync(self, address: int, value: int, count: int, stream: Any) -> None:
        def work() -> None:
            self.device(address, count)[...] = value

        self.put(work)

    def do_cudaMemcpyAsync(
        self, target: int, source: int, count: int, kind: Any, stream: Any
    ) -> None:
        direction = kind.name.removeprefix("cudaMemcpy")
        if self.recording is not None and direction != "DeviceToDevice":
            host = source if direction == "HostToDevice" else target
            assert self._is_pinned(host), "a graph copies memory that is not page-locked"

        def work() -> None:
            self.copied[direction] += count
            if direction == "HostToDevice":
                self.device(target, count)[...] = self._host(source, count)
            elif direction == "DeviceToHost":
                self._host(target, count)[...] = self.device(source, count)
            else:
                self.device(target, count)[...] = self.device(source, count).copy()

        self.put(work)

    # --- graphs ---

    def do_cudaStreamBeginCapture(self, stream: Any, mode: Any) -> None:
        assert self.recording is None
        self.recording = []

    def do_cudaStreamEndCapture(self, stream: Any) -> Any:
        if self.recording is None:
            return self.real.cudaError_t.cudaErrorIllegalState
        number = len(self.graphs) + 1
        self.graphs[number], self.recording = self.recording, None
        return self.real.cudaGraph_t(number)

    def do_cudaGraphInstantiate(self, graph: Any, flags: int) -> Any:
        if self.refuses_graphs:
            return self.real.cudaError_t.cudaErrorMemoryAllocation
        number = len(self.graphs) + 1
        self.graphs[number] = self.graphs[int(graph)]
        return self.real.cudaGraphExec_t(number)

    def do_cudaGraphDestroy(self, graph: Any) -> None:
        self.graphs[int(graph)] = []

    def do_cudaGraphExecDestroy(self, graph: Any) -> None:
        self.graphs[int(graph)] = []

    def do_cudaGraphLaunch(self, graph: Any, stream: Any) -> None:
        assert self.recording is None
        assert self.graphs[int(graph)], "a graph that was destroyed"
        self.launched += 1
        self.queue.extend(self.graphs[int(graph)])


_WITH_RESULT = {
    "cudaGetDeviceCount",
    "cudaMalloc",
    "cudaHostAlloc",
    "cudaStreamEndCapture",
    "cudaGraphInstantiate",
    "cudaStreamCreateWithFlags",
}
