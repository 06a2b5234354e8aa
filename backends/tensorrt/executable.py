"""One entry of a bundle as a program of engines in one stream.

Every value of the program has device memory of its own, as large as it ever gets, so addresses
never change: an engine reads where the one before wrote, an updated cache lies where the cache was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from edgecc.backends.base import Array, Role
from edgecc.backends.interface import DTYPES, Interface, Port, buffers, needed_steps
from edgecc.backends.tensorrt.device import DeviceArray, DeviceState, byte_count
from edgecc.backends.tensorrt.plan import Context, Shape
from edgecc.errors import RequestError

MakeContext: TypeAlias = Callable[[str, int], Context]
"""The context of a graph for a profile."""


class TrtExecutable:
    """Runs one entry; owns its caches and intermediate values.

    Args:
        state: What the engines share.
        program: Steps of the entry, from the manifest.
        engines: What the manifest says about each engine.
        interface: Inputs and outputs of the entry.
        min_rows: Calls with fewer token rows are padded to this many, so that one row computes with
            the kernels of a round; what padding writes into the caches lies behind the valid rows.
        given: Memory of values that others made: what another entry has written.
    """

    def __init__(
        self,
        state: DeviceState,
        program: Sequence[Mapping[str, Any]],
        engines: Mapping[str, Mapping[str, Any]],
        interface: Interface,
        *,
        min_rows: int,
        given: Mapping[str, DeviceArray] | None = None,
    ) -> None:
        self.interface = interface
        self.min_rows = min_rows if Role.TOKEN_IDS in interface.inputs else 1
        self._state = state
        self._program = program
        self._capacity = max(0, interface.rows - (self.min_rows - 1))
        self.values = self._allocate(engines, given or {})

    @property
    def capacity(self) -> int:
        """Rows a cache holds for the runtime."""
        return self._capacity

    @property
    def log_rows(self) -> int:
        """Rows of logs of states: there are no states."""
        return 0

    def _allocate(
        self, engines: Mapping[str, Mapping[str, Any]], given: Mapping[str, DeviceArray]
    ) -> dict[str, DeviceArray]:
        """Memory of every value: inputs as large as profiles allow, the others as they follow."""
        values = dict(given)
        held = buffers(self._program, self.interface.updates)
        ports = {p.name: p for p in (*self.interface.inputs.values(), *self.interface.caches)}
        shapes: dict[str, Shape] = {}
        for step in self._program:
            plan = self._state.plans[step["graph"]]
            for name, value in step["inputs"].items():
                if value not in shapes:
                    shapes[value] = plan.largest(name)
                    if value not in values:
                        port = ports[value]
                        is_cache = port.role is Role.KV_CACHE
                        make = self._state.cache if is_cache else self._state.array
                        values[value] = make(shapes[value], port.dtype)
            context = self._state.context(step["graph"], plan.last_profile)
            dtypes = {o["name"]: DTYPES[o["dtype"]] for o in engines[step["graph"]]["outputs"]}
            made = context.set_shapes({n: shapes[v] for n, v in step["inputs"].items()})
            for name, value in step["outputs"].items():
                shapes[value] = made[name]
                cache = held.get(value)
                if cache is not None:
                    values[value] = values[cache]
                elif value not in values:
                    values[value] = self._state.array(made[name], dtypes[name])
        return values

    def run(self, inputs: Mapping[Role, Array], outputs: Sequence[Role]) -> dict[Role, Array]:
        """See `Executable.run`.

        Raises:
            RequestError: An input or output is missing, unknown, of the wrong dtype or shape, or
                larger than the engines take, or the new rows do not fit into the caches.
            BackendError: TensorRT or CUDA failed, or the engine is closed.
        """
        self._state.check_open()
        self.interface.check(inputs, outputs, self._capacity)
        shapes = {}
        for role, array in inputs.items():
            port = self.interface.inputs[role]
            shapes[port.name] = self._upload(port, array)
        stream = self._state.stream
        for context in self.calls(shapes, outputs, self._state.context):
            context.enqueue(stream.handle)
        results = {role: self._download(role, shapes) for role in outputs}
        stream.synchronize()
        tokens = inputs.get(Role.TOKEN_IDS)
        if tokens is not None and Role.HIDDEN_TAP in results:
            results[Role.HIDDEN_TAP] = results[Role.HIDDEN_TAP][:, : tokens.shape[1]]
        if Role.LOGITS in results and np.isnan(results[Role.LOGITS]).any():
            # The caches may hold NaN as well, and masked rows are multiplied by 0: the next
            # sequence would be lost too.
            self._state.clear_caches()
        return results

    def calls(
        self, shapes: dict[str, Shape], outputs: Sequence[Role], make: MakeContext
    ) -> Iterator[Context]:
        """The engines that a call runs, in order, each with its shapes and addresses set.

        Enqueue each before taking the next, unless `make` makes new contexts: an engine may come
        again with other shapes.

        Args:
            shapes: Of the inputs that are no caches, by name; the shapes of other values are added.
            outputs: Roles wanted; caches are always updated.
            make: Where contexts come from.
        """
        ports = self.interface
        shapes.update({c.name: self.values[c.name].shape for c in ports.caches})
        wanted = {*ports.updates, *(ports.outputs[role].value for role in outputs)}
        for step in needed_steps(self._program, wanted):
            given = {n: shapes[v] for n, v in step["inputs"].items()}
            context = make(step["graph"], self._state.plans[step["graph"]].profile(given))
            made = context.set_shapes(given)
            shapes.update({v: made[n] for n, v in step["outputs"].items()})
            bound = {**step["inputs"], **step["outputs"]}
            context.bind({name: self.values[value].address for name, value in bound.items()})
            yield context

    def _upload(self, port: Port, array: Array) -> Shape:
        """Copy an input to the device, padded; the shape it has there.

        Raises:
            RequestError: It is larger than its memory.
        """
        value = self.values[port.name]
        shape = array.shape
        if any(size > most for size, most in zip(shape, value.shape, strict=True)):
            raise RequestError(
                "run/shape",
                f"{port.role} has shape {list(shape)}, the engines take at most "
                f"{list(value.shape)}",
            )
        if port.role is Role.TOKEN_IDS and shape[1] < self.min_rows:
            shape = (shape[0], self.min_rows)
            self._state.stream.clear(value.address, byte_count(shape, value.dtype))
        self._state.stream.upload(value.address, np.ascontiguousarray(array, dtype=value.dtype))
        return shape

    def _download(self, role: Role, shapes: Mapping[str, Shape]) -> Array:
        """An output on the host, filled when the stream is done; 16-bit floats as they are."""
        value = self.interface.outputs[role].value
        result: Array = np.empty(shapes[value], dtype=self.values[value].dtype)
        self._state.stream.download(result, self.values[value].address)
        return result

    def address(self, role: Role) -> int:
        """Where an input or output lies."""
        ports = self.interface
        port = ports.inputs.get(role)
        return self.values[port.name if port else ports.outputs[role].value].address
