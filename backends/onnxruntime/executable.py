"""One entry of a bundle as a program of ONNX Runtime sessions.

For each combination of row counts and wanted outputs a *plan* is built once: every input, cache,
state, intermediate and output is bound to a buffer that stays, so that a later call only copies its
small inputs and starts the sessions back to back. Values handed from one session to the next are
never copied.
"""

from __future__ import annotations

import math
import mmap
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgecc.backends.base import Array, Role
from edgecc.backends.interface import Interface, Port, buffers, needed_steps, slot_name
from edgecc.errors import BackendError

if TYPE_CHECKING:
    import onnxruntime

MAX_PLANS = 32
CACHED_ROWS = 64
"""Plans for more rows than this are not kept: their buffers are large and their calls rare."""


@dataclass(slots=True)
class _Plan:
    """Bindings of one shape combination."""

    steps: list[tuple[onnxruntime.InferenceSession, Any]]
    buffers: dict[Role, Array]
    outputs: dict[Role, Array]


class OrtExecutable:
    """Runs one entry; owns its caches, its states and their logs.

    Args:
        sessions: Session of each model.
        program: Steps of the entry, from the manifest.
        interface: Inputs and outputs of the entry.
        min_rows: Calls with fewer token rows are padded to this many, because kernels for a single
            row sum in another order; results of padding rows are cut off, and what they write into
            caches and logs lies behind the valid rows.
        slots: Sequences that it holds, the most of a call.
    """

    def __init__(
        self,
        sessions: Mapping[str, onnxruntime.InferenceSession],
        program: Sequence[Mapping[str, Any]],
        interface: Interface,
        *,
        min_rows: int,
        slots: int = 1,
    ) -> None:
        self._sessions = sessions
        self._program = program
        self._interface = interface
        self._min_rows = min_rows
        self._plans: OrderedDict[object, _Plan] = OrderedDict()
        padding = min_rows - 1 if Role.TOKEN_IDS in interface.inputs else 0
        self._capacity = max(0, interface.rows - padding)
        self._log_rows = interface.log_rows
        self._slots = slots
        self._carried = {port.name: allocate(port, slots) for port in interface.carried}
        self._states = [self._carried[port.name] for port in interface.states]
        self._spare: dict[tuple[int, ...], Array] = {}
        held = buffers(program, interface.updates)
        self._updates = dict(held)
        for value, cache in held.items():
            names = ((slot_name(value, i), slot_name(cache, i)) for i in range(slots))
            self._updates.update(names)

    @property
    def slots(self) -> int:
        """Sequences that it holds."""
        return self._slots

    @property
    def batch_size(self) -> int:
        """Most sequences of one call."""
        return self._slots

    @property
    def capacity(self) -> int:
        """Rows a cache holds for the runtime."""
        return self._capacity

    @property
    def log_rows(self) -> int:
        """Rows the logs of the states hold."""
        return self._log_rows

    def run(
        self, inputs: Mapping[Role, Array], outputs: Sequence[Role], *, slot: int = 0
    ) -> dict[Role, Array]:
        """See `Executable.run`.

        Raises:
            RequestError: An input or output is missing, unknown, of the wrong dtype or shape, or
                the new rows do not fit into the caches.
            BackendError: ONNX Runtime refused the call.
        """
        left = self._slots - slot
        count = self._interface.check(inputs, outputs, self._capacity, most=left)
        if self._states:
            (begun,) = np.nonzero(inputs[Role.CACHE_LENGTH] == 0)
            for state in self._states:
                state[slot + begun] = 0
        padding = self._padding(inputs)
        shapes = {role: self._shape(role, array, padding) for role, array in inputs.items()}
        key = (slot, tuple(sorted(shapes.items())), tuple(sorted(outputs)))
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            _fill(plan.buffers, inputs)
            for session, binding in plan.steps:
                _start(session, binding)
        else:
            plan = self._first_run(shapes, inputs, outputs, slice(slot, slot + count))
            if max((s[1] for s in shapes.values() if len(s) > 1), default=0) <= CACHED_ROWS:
                self._plans[key] = plan
                if len(self._plans) > MAX_PLANS:
                    self._plans.popitem(last=False)
        if padding and Role.HIDDEN_TAP in plan.outputs:
            kept = inputs[Role.TOKEN_IDS].shape[1]
            return {**plan.outputs, Role.HIDDEN_TAP: plan.outputs[Role.HIDDEN_TAP][:, :kept]}
        return plan.outputs

    def _padding(self, inputs: Mapping[Role, Array]) -> int:
        tokens = inputs.get(Role.TOKEN_IDS)
        return 0 if tokens is None else max(0, self._min_rows - tokens.shape[1])

    def _shape(self, role: Role, array: Array, padding: int) -> tuple[int, ...]:
        """Shape of a buffer: whatever has a row for each token gets the padding rows as well."""
        ports = self._interface.inputs
        if not padding:
            return array.shape
        tokens = ports[Role.TOKEN_IDS].shape[1]
        axes = zip(array.shape, ports[role].shape, strict=True)
        return tuple(size + padding if dim == tokens else size for size, dim in axes)

    def _first_run(
        self,
        shapes: Mapping[Role, tuple[int, ...]],
        inputs: Mapping[Role, Array],
        outputs: Sequence[Role],
        slots: slice,
    ) -> _Plan:
        """Bind and run step by step: a step's input buffers are the outputs of steps before it."""
        import onnxruntime as ort

        ports = self._interface
        buffers = {
            role: np.zeros(shape, dtype=ports.inputs[role].dtype) for role, shape in shapes.items()
        }
        _fill(buffers, inputs)
        values: dict[str, Any] = {
            ports.inputs[role].name: ort.OrtValue.ortvalue_from_numpy(buffer)
            for role, buffer in buffers.items()
        }
        values.update(self._held(slots))
        updates = self._updates
        wanted = [ports.outputs[role].value for role in outputs]
        steps = []
        for step in needed_steps(self._program, {*wanted, *updates}):
            session = self._sessions[step["graph"]]
            binding = session.io_binding()
            for name, value in step["inputs"].items():
                binding.bind_ortvalue_input(name, values[value])
            for name, value in step["outputs"].items():
                cache = updates.get(value)
                if cache is not None:
                    values[value] = values[cache]
                    binding.bind_ortvalue_output(name, values[cache])
                else:
                    binding.bind_output(name, "cpu")
            _start(session, binding)
            order = list(step["outputs"].values())
            made = binding.get_outputs()  # in the order of the bind calls above
            for value, result in zip(order, made, strict=True):
                values.setdefault(value, result)
            steps.append((session, binding))
        arrays = {role: values[ports.outputs[role].value].numpy() for role in outputs}
        return _Plan(steps, buffers, arrays)

    def _held(self, slots: slice) -> dict[str, Any]:
        """What is carried, of some slots, by its names in a program: together, and apart.

        A model that has caches apart has them for all slots. Those that take no part have no rows
        if there is one sequence, else all of them write to one buffer: pages of it are taken by the
        rows of a call only.
        """
        import onnxruntime as ort

        wrap = ort.OrtValue.ortvalue_from_numpy
        held = {name: wrap(array[slots]) for name, array in self._carried.items()}
        count = slots.stop - slots.start
        for port in self._interface.caches:
            array = self._carried[port.name]
            idle = array[:0]
            if 1 < count < self._slots:
                idle = self._spare.setdefault(
                    array.shape[1:], _zeros((1, *array.shape[1:]), array.dtype)
                )
            apart = [array[i : i + 1] for i in range(slots.start, slots.stop)]
            apart += [idle] * (self._slots - count)
            held.update((slot_name(port.name, i), wrap(part)) for i, part in enumerate(apart))
        return held


def allocate(port: Port, slots: int) -> Array:
    """A zeroed buffer; the system gives a page of it when something is written there.

    NumPy's own large arrays ask for huge pages (on Linux): a first row of each head would take
    megabytes, whole caches if they are small.
    """
    return _zeros((slots, *map(int, port.shape[1:])), port.dtype)


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    size = max(1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MAP_PRIVATE"):
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    else:  # Windows, where it is private in any case
        pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.ndarray(shape, dtype, buffer=pages)


def _fill(buffers: Mapping[Role, Array], inputs: Mapping[Role, Array]) -> None:
    """Copy inputs into their buffers; padding rows keep what they had."""
    for role, array in inputs.items():
        buffers[role][tuple(map(slice, array.shape))] = array


def _start(session: onnxruntime.InferenceSession, binding: Any) -> None:
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # ONNX Runtime raises its own classes, all derived from Exception
        raise BackendError("onnxruntime/run", f"ONNX Runtime failed: {error}") from error
