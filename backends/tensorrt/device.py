"""What the engines of one bundle share on a GPU: a stream, scratch memory, and the plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from edgecc.backends.tensorrt.bound_weights import BoundWeights
from edgecc.backends.tensorrt.cuda import Cuda, HostBuffer
from edgecc.backends.tensorrt.plan import Context, Plan, Shape
from edgecc.errors import BackendError

ALIGNMENT = 256
"""Of what engines are bound to; `cudaMalloc` keeps it as well."""


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Device memory for a value, as large as the value ever gets.

    Attributes:
        address: Where it lies.
        dtype: Element type on the device.
        shape: Largest shape.
    """

    address: int
    dtype: np.dtype[Any]
    shape: Shape

    def slot(self, slot: int) -> int:
        """Where it lies for a slot, if there is one for each: they follow each other."""
        return self.address + slot * slot_bytes(self.shape, self.dtype)


def slot_bytes(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Bytes from one slot to the next: engines take addresses that are multiples of 256."""
    return -(-byte_count(shape, dtype) // ALIGNMENT) * ALIGNMENT


def byte_count(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Bytes of an array."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


class DeviceState:
    """Everything on the GPU that belongs to one bundle.

    Args:
        cuda: The GPU.
        plans: The engines by graph.
        keep: What has to live as long as the plans.
    """

    def __init__(
        self,
        cuda: Cuda,
        plans: Mapping[str, Plan],
        keep: tuple[object, ...] = (),
    ) -> None:
        self._keep = keep
        self.cuda = cuda
        self.plans = plans
        self.stream = cuda.stream()
        self._weights: dict[str, dict[str, int]] = {}
        self._owned: list[int] = []
        self._host: list[HostBuffer] = []
        self._caches: list[DeviceArray] = []
        self._closed = False
        self._contexts: dict[tuple[str, int], Context] = {}
        self._scratch_bytes = max((p.scratch_bytes for p in plans.values()), default=0)
        try:
            self._scratch = self.memory(self._scratch_bytes)
        except BaseException:
            self.close()
            raise

    def bind_weights(self, weights: BoundWeights) -> None:
        """Copy each array of weights to the GPU once, and bind it in all contexts made from now on.

        Raises:
            BundleError: The weight file is damaged.
            ResourceError: The GPU has too little memory.
        """
        addresses: dict[int, int] = {}
        for buffer in weights.buffers:
            addresses[buffer.id] = self.memory(buffer.nbytes)
            for offset, block in weights.blocks(buffer):
                self.stream.upload(addresses[buffer.id] + offset, block)
                self.stream.synchronize()  # blocks are made one at a time, and not kept
        for graph in self.plans:
            bound = weights.inputs(graph)
            self._weights[graph] = {name: addresses[id] for name, id in bound.items()}

    def memory(self, nbytes: int) -> int:
        """Address of new memory, zeroed, which is freed with this object."""
        address = self.cuda.allocate(nbytes)
        self._owned.append(address)
        if nbytes:
            self.stream.clear(address, nbytes)
        return address

    def array(self, shape: Shape, dtype: np.dtype[Any]) -> DeviceArray:
        """A new zeroed array. Zeros, because masked rows of caches are still multiplied: by 0."""
        return DeviceArray(self.memory(byte_count(shape, dtype)), dtype, shape)

    def cache(self, shape: Shape, dtype: np.dtype[Any], slots: int = 1) -> DeviceArray:
        """A new array that `clear_caches` clears: that of slot 0, those of the others follow."""
        address = self.memory(slots * slot_bytes(shape, dtype))
        made = DeviceArray(address, dtype, shape)
        self._caches.append(made)
        return made

    def clear_caches(self, slot: int = 0) -> None:
        """Forget a sequence, its numbers too: what is no number would outlive it."""
        for item in self._caches:
            self.stream.clear(item.slot(slot), byte_count(item.shape, item.dtype))

    def host(self, nbytes: int) -> HostBuffer:
        """New page-locked memory, which is freed with this object."""
        made = self.cuda.allocate_host(nbytes)
        self._host.append(made)
        return made

    def context(self, graph: str, profile: int) -> Context:
        """The context of an engine for a profile: the same one each time."""
        key = (graph, profile)
        if key not in self._contexts:
            self._contexts[key] = self.new_context(graph, profile)
        return self._contexts[key]

    def new_context(self, graph: str, profile: int) -> Context:
        """A context of its own, for what is captured: later calls must not change its shapes."""
        made = self.plans[graph].context(
            profile, self._scratch, self._scratch_bytes, self.stream.handle
        )
        made.bind(self._weights.get(graph, {}))
        return made

    def check_open(self) -> None:
        """Ask before touching memory: the host's would be gone as well.

        Raises:
            BackendError: It was freed.
        """
        if self._closed:
            raise BackendError("tensorrt/closed", "the engine is closed")

    def close(self) -> None:
        """Free everything, after what is running; the plans too, whoever still holds this object.

        A GPU that failed answers each call with that error, which its user has got already: every
        step is tried all the same.
        """
        if self._closed:
            return
        self._closed = True
        for step in self._steps_to_close():
            with suppress(BackendError):
                step()

    def _steps_to_close(self) -> Iterator[Callable[[], object]]:
        yield self.stream.synchronize
        yield self._drop_engines
        yield from (buffer.close for buffer in self._host)
        yield from (partial(self.cuda.free, address) for address in self._owned)
        yield self.stream.close

    def _drop_engines(self) -> None:
        """Contexts before plans, plans before the library's runtime."""
        self._contexts.clear()
        self.plans = {}
        self._keep = ()
