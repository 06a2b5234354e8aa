"""One entry of a bundle as a program of engines in one stream.

Every value of the program has device memory of its own, as large as it ever gets, so addresses
never change: an engine reads where the one before wrote, an updated cache lies where the cache was.
States and their logs have two places each, and calls go from one to the other and back: an engine
may still read the old state while it writes the new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from edgecc.backends.base import Array, Role
from edgecc.backends.interface import CARRIED, DTYPES, Interface, Port, buffers, needed_steps
from edgecc.backends.tensorrt.device import DeviceArray, DeviceState, byte_count
from edgecc.backends.tensorrt.plan import Context, Shape
from edgecc.errors import BundleError, RequestError

MakeContext: TypeAlias = Callable[[str, int], Context]
"""The context of a graph for a profile."""


class TrtExecutable:
    """Runs one entry; owns its caches, states, logs and intermediate values.

    Args:
        state: What the engines share.
        program: Steps of the entry, from the manifest.
        engines: What the manifest says about each engine.
        interface: Inputs and outputs of the entry.
        min_rows: Calls with fewer token rows are padded to this many, so that one row computes with
            the kernels of a round; what padding writes into the caches lies behind the valid rows.
        slots: Sequences whose caches it holds. A call runs one of them.
        given: Memory of values that others made: what another entry has written.

    Attributes:
        values: Memory of every value; of a state or log, the first of its two places.
    """

    def __init__(
        self,
        state: DeviceState,
        program: Sequence[Mapping[str, Any]],
        engines: Mapping[str, Mapping[str, Any]],
        interface: Interface,
        *,
        min_rows: int,
        slots: int = 1,
        given: Mapping[str, DeviceArray] | None = None,
    ) -> None:
        self.interface = interface
        self.min_rows = min_rows if Role.TOKEN_IDS in interface.inputs else 1
        self.slots = slots
        self._state = state
        self._program = program
        self._capacity = max(0, interface.rows - (self.min_rows - 1))
        self._carried = (*interface.caches, *interface.states, *interface.logs)
        self._kept = frozenset(p.name for p in self._carried)
        self._buffers = buffers(program, interface.updates)
        self._states = dict.fromkeys(p.name for p in (*interface.states, *interface.logs))
        self._updated: dict[str, DeviceArray] = {}
        self._turns = [0] * slots
        self.values = self._allocate(engines, given or {})

    @property
    def batch_size(self) -> int:
        """Sequences of one call: engines are made for one."""
        return 1

    @property
    def capacity(self) -> int:
        """Rows a cache holds for the runtime."""
        return self._capacity

    @property
    def log_rows(self) -> int:
        """Rows the logs of the states hold."""
        return self.interface.log_rows

    def _allocate(
        self, engines: Mapping[str, Mapping[str, Any]], given: Mapping[str, DeviceArray]
    ) -> dict[str, DeviceArray]:
        """Memory of every value: inputs as large as profiles allow, the others as they follow.

        Raises:
            BundleError: An update has not the size of what it updates.
        """
        values = dict(given)
        ports = {p.name: p for p in (*self.interface.inputs.values(), *self._carried)}
        shapes: dict[str, Shape] = {}
        for step in self._program:
            plan = self._state.plans[step["graph"]]
            for name, value in step["inputs"].items():
                if value not in shapes:
                    shapes[value] = plan.largest(name)
                    if value not in values:
                        values[value] = self._input(ports[value], shapes[value])
            context = self._state.context(step["graph"], plan.last_profile)
            dtypes = {o["name"]: DTYPES[o["dtype"]] for o in engines[step["graph"]]["outputs"]}
            made = context.set_shapes({n: shapes[v] for n, v in step["inputs"].items()})
            for name, value in step["outputs"].items():
                shapes[value] = made[name]
                cache = self._buffers.get(value)
                if cache is not None:
                    if (made[name], dtypes[name]) != (shapes[cache], values[cache].dtype):
                        raise _no_update(step["graph"], name, cache)
                    values[value] = self._updated.get(cache, values[cache])
                elif value not in values:
                    values[value] = self._state.array(made[name], dtypes[name])
        return values

    def _input(self, port: Port, shape: Shape) -> DeviceArray:
        """Memory of an input; a state or log has a second place for its update."""
        if port.role not in CARRIED:
            return self._state.array(shape, port.dtype)
        if port.name in self._states:
            self._updated[port.name] = self._state.cache(shape, port.dtype, self.slots)
        return self._state.cache(shape, port.dtype, self.slots)

    @property
    def turn(self) -> int:
        """Which place of the states and logs of slot 0 the next call reads: 0 or 1."""
        return self._turns[0]

    def run(
        self, inputs: Mapping[Role, Array], outputs: Sequence[Role], *, slot: int = 0
    ) -> dict[Role, Array]:
        """See `Executable.run`.

        Raises:
            RequestError: An input or output is missing, unknown, of the wrong dtype or shape, or
                larger than the engines take, or the new rows do not fit into the caches.
            BackendError: TensorRT or CUDA failed, or the engine is closed.
        """
        self._state.check_open()
        self.interface.check(inputs, outputs, self._capacity, most=min(1, self.slots - slot))
        shapes = {}
        for role, array in inputs.items():
            port = self.interface.inputs[role]
            shapes[port.name] = self._upload(port, array)
        if self._states and not inputs[Role.CACHE_LENGTH][0]:
            self.clear_states(slot)
        stream = self._state.stream
        for context in self.calls(shapes, outputs, self._state.context, slot):
            context.enqueue(stream.handle)
        self.take_turn(slot)
        results = {role: self._download(role, shapes) for role in outputs}
        stream.synchronize()
        tokens = inputs.get(Role.TOKEN_IDS)
        if tokens is not None and Role.HIDDEN_TAP in results:
            results[Role.HIDDEN_TAP] = results[Role.HIDDEN_TAP][:, : tokens.shape[1]]
        if Role.LOGITS in results and np.isnan(results[Role.LOGITS]).any():
            # The caches may hold NaN as well, and masked rows are multiplied by 0: the next
            # sequence would be lost too.
            self._state.clear_caches(slot)
        return results

    def calls(
        self, shapes: dict[str, Shape], outputs: Sequence[Role], make: MakeContext, slot: int = 0
    ) -> Iterator[Context]:
        """The engines that a call runs, in order, each with its shapes and addresses set.

        They read states and logs at the place of this turn and write them at the other one:
        `take_turn` when all are enqueued.

        Enqueue each before taking the next, unless `make` makes new contexts: an engine may come
        again with other shapes.

        Args:
            shapes: Of the inputs that are no caches, by name; the shapes of other values are added.
            outputs: Roles wanted; caches, states and logs are always updated.
            make: Where contexts come from.
            slot: Whose caches.
        """
        ports = self.interface
        shapes.update({c.name: self.values[c.name].shape for c in self._carried})
        wanted = {*ports.updates, *(ports.outputs[role].value for role in outputs)}
        for step in needed_steps(self._program, wanted):
            given = {n: shapes[v] for n, v in step["inputs"].items()}
            context = make(step["graph"], self._state.plans[step["graph"]].profile(given))
            made = context.set_shapes(given)
            shapes.update({v: made[n] for n, v in step["outputs"].items()})
            bound = {**step["inputs"], **step["outputs"]}
            context.bind({name: self._place(value, slot) for name, value in bound.items()})
            yield context

    def _place(self, value: str, slot: int) -> int:
        """Where a value lies: what lives between calls in its slot, all others are there once.

        In every second turn of a slot, a state and its update swap.
        """
        carried = self._buffers.get(value, value)
        if carried in self._states and self._turns[slot]:
            array = self._updated[carried] if value == carried else self.values[carried]
        else:
            array = self.values[value]
        return array.slot(slot if carried in self._kept else 0)

    def take_turn(self, slot: int = 0) -> None:
        """The next call of a slot reads the states that the last one has written."""
        if self._states:
            self._turns[slot] = 1 - self._turns[slot]

    def clear_states(self, slot: int = 0) -> None:
        """Begin a sequence: the next call of a slot reads states and logs of zeros."""
        for name in self._states:
            array = self.values[name]
            address = self._place(name, slot)
            self._state.stream.clear(address, byte_count(array.shape, array.dtype))

    def _upload(self, port: Port, array: Array) -> Shape:
        """Copy an input to the device, padded; the shape it has there.

        Raises:
            RequestError: It is larger than its memory.
        """
        value = self.values[port.name]
        array = self._padded(port.role, array)
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

    def _padded(self, role: Role, array: Array) -> Array:
        """What tells of each token's place, for the rows of padding too: any place will do."""
        if role not in (Role.POSITIONS, Role.IMAGE_ROWS):
            return array
        missing = max(0, self.min_rows - array.shape[-1])
        return np.pad(array, [*[(0, 0)] * (array.ndim - 1), (0, missing)])

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


def _no_update(graph: str, name: str, cache: str) -> BundleError:
    return BundleError(
        "bundle/engine",
        f"output {name!r} of engine {graph!r} is no update of {cache!r}: it has another size",
        help="compile the bundle again",
    )
