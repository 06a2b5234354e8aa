"""One entry of a bundle as a program of ONNX Runtime sessions.

For each combination of row counts and wanted outputs a *plan* is built once: every input, cache,
intermediate and output is bound to a buffer that stays, so that a later call only copies its small
inputs and starts the sessions back to back. Values handed from one session to the next are never
copied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from edgecc.backends.base import Array, Role
from edgecc.errors import BackendError

if TYPE_CHECKING:
    import onnxruntime

MAX_PLANS = 32
CACHED_ROWS = 64
"""Plans for more rows than this are not kept: their buffers are large and their calls rare."""

_DTYPES: Mapping[str, Any] = {"i64": np.int64, "f32": np.float32}


@dataclass(slots=True)
class _Plan:
    """Bindings of one shape combination."""

    steps: list[tuple[onnxruntime.InferenceSession, Any]]
    buffers: dict[Role, Array]
    outputs: dict[Role, Array]


class OrtExecutable:
    """Runs one entry; owns its caches.

    Args:
        sessions: Session of each model.
        program: Steps of the entry, from the manifest.
        interface: Inputs and outputs of the entry, from the manifest.
        min_rows: Calls with fewer token rows are padded to this many, because kernels for a single
            row sum in another order; results of padding rows are cut off, and what they write into
            the caches lies behind the valid rows.
    """

    def __init__(
        self,
        sessions: Mapping[str, onnxruntime.InferenceSession],
        program: Sequence[Mapping[str, Any]],
        interface: Mapping[str, Sequence[Mapping[str, Any]]],
        *,
        min_rows: int,
    ) -> None:
        self._sessions = sessions
        self._program = program
        self._min_rows = min_rows
        self._inputs = {Role(i["role"]): i for i in interface["inputs"] if _is_plain(i)}
        self._outputs = {Role(o["role"]): o for o in interface["outputs"] if _is_plain(o)}
        self._plans: OrderedDict[object, _Plan] = OrderedDict()
        caches = [i for i in interface["inputs"] if i["role"] == Role.KV_CACHE]
        rows = min((int(c["shape"][2]) for c in caches), default=0)
        padded = Role.TOKEN_IDS in self._inputs
        self._capacity = rows - (min_rows - 1 if padded else 0)
        self._caches = {i["name"]: _allocate(i) for i in caches}
        # An updated cache is the same buffer under another name.
        self._aliases = {
            o["value"]: o["alias"] for o in interface["outputs"] if o["alias"] is not None
        }

    @property
    def capacity(self) -> int:
        """Rows a cache holds for the runtime."""
        return self._capacity

    def run(self, inputs: Mapping[Role, Array], outputs: Sequence[Role]) -> dict[Role, Array]:
        """See `Executable.run`.

        Raises:
            BackendError: ONNX Runtime refused the call.
        """
        padding = self._padding(inputs)
        shapes = {role: self._shape(role, array, padding) for role, array in inputs.items()}
        key = (tuple(sorted(shapes.items())), tuple(sorted(outputs)))
        plan = self._plans.get(key)
        if plan is not None:
            self._plans.move_to_end(key)
            _fill(plan.buffers, inputs)
            for session, binding in plan.steps:
                _start(session, binding)
        else:
            plan = self._first_run(shapes, inputs, outputs)
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
        if role is Role.TOKEN_IDS:
            return (array.shape[0], array.shape[1] + padding)
        return array.shape

    def _first_run(
        self,
        shapes: Mapping[Role, tuple[int, ...]],
        inputs: Mapping[Role, Array],
        outputs: Sequence[Role],
    ) -> _Plan:
        """Bind and run step by step: a step's input buffers are the outputs of steps before it."""
        import onnxruntime as ort

        buffers = {
            role: np.zeros(shape, dtype=_DTYPES[self._inputs[role]["dtype"]])
            for role, shape in shapes.items()
        }
        _fill(buffers, inputs)
        values: dict[str, Any] = {
            self._inputs[role]["name"]: ort.OrtValue.ortvalue_from_numpy(buffer)
            for role, buffer in buffers.items()
        }
        values.update({name: value for name, (_, value) in self._caches.items()})
        wanted = [self._outputs[role]["value"] for role in outputs]
        steps = []
        for step in self._needed(wanted):
            session = self._sessions[step["graph"]]
            binding = session.io_binding()
            for name, value in step["inputs"].items():
                binding.bind_ortvalue_input(name, values[value])
            for name, value in step["outputs"].items():
                cache = self._aliases.get(value)
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
        arrays = {role: values[self._outputs[role]["value"]].numpy() for role in outputs}
        return _Plan(steps, buffers, arrays)

    def _needed(self, wanted: Sequence[str]) -> list[Mapping[str, Any]]:
        """The steps that update caches or that wanted values depend on, in order."""
        needed = set(wanted) | set(self._aliases)
        kept = []
        for step in reversed(self._program):
            if needed & set(step["outputs"].values()):
                kept.append(step)
                needed |= set(step["inputs"].values())
        return kept[::-1]


def _is_plain(item: Mapping[str, Any]) -> bool:
    return bool(item["role"] != Role.KV_CACHE)


def _allocate(item: Mapping[str, Any]) -> tuple[Array, Any]:
    """A zeroed cache for one sequence; pages are only taken when rows are written."""
    import onnxruntime as ort

    shape = [1, *item["shape"][1:]]
    array = np.zeros(shape, dtype=_DTYPES[item["dtype"]])
    return array, ort.OrtValue.ortvalue_from_numpy(array)


def _fill(buffers: Mapping[Role, Array], inputs: Mapping[Role, Array]) -> None:
    """Copy inputs into their buffers; padding rows keep what they had."""
    for role, array in inputs.items():
        buffer = buffers[role]
        if buffer.shape == array.shape:
            buffer[...] = array
        else:
            buffer[:, : array.shape[1]] = array


def _start(session: onnxruntime.InferenceSession, binding: Any) -> None:
    try:
        session.run_with_iobinding(binding)
    except Exception as error:  # ONNX Runtime raises its own classes, all derived from Exception
        raise BackendError("onnxruntime/run", f"ONNX Runtime failed: {error}") from error
