"""The CUDA calls edgecc makes: devices, memory, copies in a stream, captured graphs.

Thin over `cuda.bindings.runtime`, NVIDIA's own binding: every status is checked and becomes an
error that names the call. Nothing here knows TensorRT.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from edgecc.backends.base import Array
from edgecc.errors import BackendError, ResourceError, UnsupportedError

ALIGNMENT = 256
"""Bytes that addresses given to TensorRT are a multiple of; `cudaMalloc` keeps to it."""


def load_runtime() -> Any:
    """The module `cuda.bindings.runtime`.

    Raises:
        UnsupportedError: It is not installed or cannot be loaded.
    """
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except (ImportError, OSError) as error:
        raise UnsupportedError(
            "cuda/not-installed",
            f"engines run through cuda-bindings, which cannot be loaded: {error}",
            help="pip install 'cuda-bindings>=12.8,<14'",
        ) from error


class Cuda:
    """The first visible GPU.

    Args:
        runtime: The module `cuda.bindings.runtime`.

    Raises:
        UnsupportedError: There is no driver or no GPU.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._check()
        self.call("cudaSetDevice", 0)

    def _check(self) -> None:
        """Raise for what is missing of a driver and a GPU."""
        driver = int(self.call("cudaDriverGetVersion"))
        if not driver:
            raise _no_gpu("there is no NVIDIA driver")
        status, count = self._runtime.cudaGetDeviceCount()
        if int(status):
            name, text = self._describe(status)
            if name == "cudaErrorInsufficientDriver":
                raise _old_driver(driver, int(self.call("cudaRuntimeGetVersion")))
            raise _no_gpu(f"{text} ({name})")
        if not count:
            raise _no_gpu("there is no GPU")

    @property
    def capability(self) -> int:
        """Compute capability as 10 * major + minor."""
        kinds = self._runtime.cudaDeviceAttr
        major = self.call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMajor, 0)
        minor = self.call("cudaDeviceGetAttribute", kinds.cudaDevAttrComputeCapabilityMinor, 0)
        return 10 * int(major) + int(minor)

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the runtime.

        Returns:
            Its result; None if it has none but the status.

        Raises:
            ResourceError: The GPU's memory does not suffice.
            BackendError: It failed otherwise, perhaps because of something started before.
        """
        status, *results = getattr(self._runtime, name)(*args)
        if int(status):
            known, text = self._describe(status)
            if known == "cudaErrorMemoryAllocation":
                raise ResourceError(
                    "cuda/out-of-memory",
                    f"the GPU has no memory left: {name}({', '.join(map(str, args))})",
                    help="compile with a smaller --max-model-len, or free memory of the GPU",
                )
            raise BackendError("cuda/call", f"{name} failed: {text} ({known})")
        return results[0] if results else None

    def _describe(self, status: Any) -> tuple[str, str]:
        """Name and text of a status."""
        functions = (self._runtime.cudaGetErrorName, self._runtime.cudaGetErrorString)
        name, text = (bytes(f(status)[1]).decode() for f in functions)
        return name, text

    def allocate(self, nbytes: int) -> int:
        """Address of new device memory, not cleared.

        Raises:
            ResourceError: There is not enough.
        """
        return int(self.call("cudaMalloc", max(nbytes, 1)))

    def free(self, address: int) -> None:
        """Give device memory back; waits for work that uses it."""
        self.call("cudaFree", address)

    def allocate_host(self, nbytes: int) -> HostBuffer:
        """Page-locked memory: what graphs copy from and to."""
        return HostBuffer(self, int(self.call("cudaHostAlloc", nbytes, 0)), nbytes)

    def stream(self) -> Stream:
        """A stream that does not wait for the default stream."""
        return Stream(self, self._runtime)


def _no_gpu(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "cuda/no-gpu",
        f"no GPU can be used here: {reason}",
        help="run it on a machine with an NVIDIA driver and a GPU that "
        "CUDA_VISIBLE_DEVICES does not hide",
    )


def _old_driver(driver: int, runtime: int) -> UnsupportedError:
    """A driver older than the runtime that cuda-bindings brings; versions as CUDA counts them."""
    have, want = (f"{v // 1000}.{v % 1000 // 10}" for v in (driver, runtime))
    return UnsupportedError(
        "cuda/old-driver",
        f"the NVIDIA driver is for CUDA {have}, and cuda-bindings for CUDA {want}",
        help="update the driver; where the engines' library is for the older CUDA as well: "
        f"pip install 'cuda-bindings=={driver // 1000}.*'",
    )


class HostBuffer:
    """Page-locked memory seen as NumPy arrays.

    Attributes:
        address: Where it lies.
        bytes: u8 `[nbytes]`.
    """

    def __init__(self, cuda: Cuda, address: int, nbytes: int) -> None:
        self._cuda = cuda
        self.address = address
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        self.bytes: Array = np.ctypeslib.as_array(memory)

    def close(self) -> None:
        """Give it back; arrays over it must not be used any more."""
        self._cuda.call("cudaFreeHost", self.address)


class Stream:
    """Work in order; the host goes on at once. Device memory is given by address."""

    def __init__(self, cuda: Cuda, runtime: Any) -> None:
        self._cuda = cuda
        self._runtime = runtime
        self._stream = cuda.call("cudaStreamCreateWithFlags", runtime.cudaStreamNonBlocking)
        self._copied: list[Array] = []

    @property
    def handle(self) -> int:
        """The stream as other libraries take it."""
        return int(self._stream)

    def upload(self, address: int, source: Array) -> None:
        """Copy an array to the device.

        Args:
            address: Device memory for all of it.
            source: C-contiguous; page-locked while a graph is captured. It is kept alive and must
                not change until `synchronize`: the copy may be late where memory is shared.
        """
        self._copied.append(source)
        self._copy(address, source.ctypes.data, source.nbytes, "HostToDevice")

    def download(self, target: Array, address: int) -> None:
        """Copy from the device into an array, which is filled after `synchronize`.

        It is kept alive until then: whoever asked may be gone, interrupted in between.
        """
        self._copied.append(target)
        self._copy(target.ctypes.data, address, target.nbytes, "DeviceToHost")

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy within the device; the ranges do not overlap."""
        self._copy(target, source, nbytes, "DeviceToDevice")

    def _copy(self, target: int, source: int, nbytes: int, direction: str) -> None:
        kind = getattr(self._runtime.cudaMemcpyKind, f"cudaMemcpy{direction}")
        self._cuda.call("cudaMemcpyAsync", target, source, nbytes, kind, self._stream)

    def clear(self, address: int, nbytes: int) -> None:
        """Set device memory to zero."""
        self._cuda.call("cudaMemsetAsync", address, 0, nbytes, self._stream)

    def synchronize(self) -> None:
        """Wait until everything before is done.

        Raises:
            BackendError: Something that was started before failed.
        """
        self._cuda.call("cudaStreamSynchronize", self._stream)
        self._copied.clear()

    @contextmanager
    def capture(self) -> Iterator[CapturedGraph]:
        """Record what is put into the stream, without running it.

        Yields:
            The graph, which can be launched after the block.

        Raises:
            BackendError: Something in the block cannot be captured.
            ResourceError: The graph does not fit into the GPU's memory.
        """
        graph = CapturedGraph(self._cuda)
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._cuda.call("cudaStreamBeginCapture", self._stream, mode)
        try:
            yield graph
        except BaseException:
            status, recorded = self._runtime.cudaStreamEndCapture(self._stream)
            if not int(status):  # else its status says what is known, and there is no graph
                self._cuda.call("cudaGraphDestroy", recorded)
            raise
        recorded = self._cuda.call("cudaStreamEndCapture", self._stream)
        try:
            graph.executable = self._cuda.call("cudaGraphInstantiate", recorded, 0)
        finally:
            self._cuda.call("cudaGraphDestroy", recorded)

    def launch(self, graph: CapturedGraph) -> None:
        """Run a captured graph."""
        self._cuda.call("cudaGraphLaunch", graph.executable, self._stream)

    def close(self) -> None:
        """Destroy the stream, after what is in it."""
        self._cuda.call("cudaStreamDestroy", self._stream)


class CapturedGraph:
    """Recorded work of a stream."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.executable: Any = None

    def close(self) -> None:
        """Destroy it."""
        self._cuda.call("cudaGraphExecDestroy", self.executable)
