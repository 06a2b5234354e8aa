"""Inputs and outputs of an entry as the manifest describes them, and checks of what a call passes.

A wrong call must not reach the engine: it would truncate numbers, read padding rows, or fail with a
message about a node in the middle of the model.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from edgecc.backends.base import Array, Role
from edgecc.errors import RequestError

CARRIED = (Role.KV_CACHE, Role.STATE, Role.STATE_LOG)
"""What the engine keeps between calls."""

UNLIMITED = sys.maxsize


def slot_name(name: str, slot: int) -> str:
    """Name of a cache of one slot, where each slot has a cache of its own."""
    return f"{name}@{slot}"


DTYPES: Mapping[str, np.dtype[Any]] = {
    "i64": np.dtype(np.int64),
    "i32": np.dtype(np.int32),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output.

    Attributes:
        name: Its name in the entry.
        role: What it means.
        dtype: Element type.
        shape: Sizes; names stand for sizes that calls choose.
        value: The value of the program it is.
        alias: The cache an updated cache overwrites.
    """

    name: str
    role: Role
    dtype: np.dtype[Any]
    shape: tuple[int | str, ...]
    value: str
    alias: str | None

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> Port:
        """A port of the manifest."""
        return cls(
            item["name"],
            Role(item["role"]),
            DTYPES[item["dtype"]],
            tuple(item["shape"]),
            item.get("value", item["name"]),
            item.get("alias"),
        )


class Interface:
    """Ports of one entry.

    Args:
        entry: `entries.<name>` of the artifact, checked.

    Attributes:
        inputs: Inputs a caller passes, by role.
        outputs: Outputs a caller may ask for, by role.
        caches: Caches, which the engine owns.
        states: States, which it owns as well.
        logs: Logs of the states, likewise.
        updates: Values that are updates of these, and what each of them overwrites.
    """

    def __init__(self, entry: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        inputs = [Port.of(i) for i in entry["inputs"]]
        outputs = [Port.of(o) for o in entry["outputs"]]
        self.inputs: dict[Role, Port] = {p.role: p for p in inputs if p.role not in CARRIED}
        self.outputs: dict[Role, Port] = {p.role: p for p in outputs if p.role not in CARRIED}
        self.caches, self.states, self.logs = (
            [p for p in inputs if p.role is role] for role in CARRIED
        )
        self.updates = {p.value: p.alias for p in outputs if p.alias is not None}

    @property
    def rows(self) -> int:
        """Rows of the caches. Without any: 0, or no limit if there are states."""
        return min((int(c.shape[2]) for c in self.caches), default=UNLIMITED if self.states else 0)

    @property
    def log_rows(self) -> int:
        """Rows of the logs; 0 without any."""
        return min((int(log.shape[1]) for log in self.logs), default=0)

    def check(
        self,
        inputs: Mapping[Role, Array],
        outputs: Sequence[Role],
        capacity: int,
        *,
        most: int = 1,
    ) -> int:
        """Check a call.

        Args:
            inputs: What was passed.
            outputs: What is wanted.
            capacity: Rows of the caches that may be filled.
            most: Sequences that a call may have from its first slot on.

        Returns:
            The number of sequences.

        Raises:
            RequestError: A role is missing or unknown, an array has another dtype or shape than
                its port, a row index or count is out of range, or the new rows do not fit into the
                caches or logs.
        """
        if inputs.keys() != self.inputs.keys():
            raise RequestError(
                "run/inputs", f"the entry takes {_names(self.inputs)}, got {_names(inputs)}"
            )
        for role in outputs:
            if role not in self.outputs:
                raise RequestError(
                    "run/outputs",
                    f"the entry has no output {role!s}",
                    notes=[f"it has {_names(self.outputs)}"],
                    help="optional outputs of a draft are kept by compiling with draft_outputs",
                )
        sizes: dict[int | str, int] = {}
        for role, port in self.inputs.items():
            _check_array(port, inputs[role], sizes)
        count = max((sizes.get(c.shape[0], 1) for c in self.carried), default=1)
        if self.carried and not count <= most:
            raise RequestError(
                "run/slots", f"{count} sequences from a slot on, after which {most} are held"
            )
        self._check_rows(inputs, capacity)
        return count

    @property
    def carried(self) -> list[Port]:
        """Caches, states and logs."""
        return [*self.caches, *self.states, *self.logs]

    def _check_rows(self, inputs: Mapping[Role, Array], capacity: int) -> None:
        rows = inputs.get(Role.TOKEN_IDS, inputs.get(Role.FEATURES))
        if rows is None:
            return
        wanted, length = inputs.get(Role.LOGIT_ROWS), inputs.get(Role.CACHE_LENGTH)
        if wanted is not None and (wanted.min() < 0 or wanted.max() >= rows.shape[1]):
            raise RequestError(
                "run/logit-rows", f"logit rows {wanted.tolist()} of {rows.shape[1]} token rows"
            )
        self._check_counts(inputs, rows.shape[1])
        if self.caches and length is not None:
            for start in length.tolist():
                end = start + rows.shape[1]
                if start < 0 or end > capacity:
                    raise RequestError(
                        "run/cache-overflow",
                        f"rows {start}..{end} exceed the cache capacity {capacity}",
                    )

    def _check_counts(self, inputs: Mapping[Role, Array], rows: int) -> None:
        """What is replayed and committed must be there, and what is not final must be logged."""
        if not self.logs:
            return
        for role, most in ((Role.REPLAY_LENGTH, self.log_rows), (Role.COMMIT_LENGTH, rows)):
            for count in inputs[role].tolist() if role in inputs else ():
                if not 0 <= count <= most:
                    raise RequestError("run/row-count", f"{role} is {count}, expected 0 to {most}")
        if rows > self.log_rows and not inputs[Role.COMMIT_LENGTH].all():
            raise RequestError(
                "run/log-overflow", f"{rows} rows that are not final, the log has {self.log_rows}"
            )


def needed_steps(
    program: Sequence[Mapping[str, Any]], wanted: Collection[str]
) -> list[Mapping[str, Any]]:
    """The steps of a program that wanted values depend on, in order.

    Args:
        program: Steps of an entry.
        wanted: Values; updated caches among them, if they are to be updated.
    """
    needed = set(wanted)
    kept = []
    for step in reversed(program):
        if needed & set(step["outputs"].values()):
            kept.append(step)
            needed |= set(step["inputs"].values())
    return kept[::-1]


def buffers(program: Sequence[Mapping[str, Any]], updates: Mapping[str, str]) -> dict[str, str]:
    """Values that lie in the buffer of a cache or state, and of which.

    Args:
        program: Steps of an entry.
        updates: Those that the entry ends with, see `Interface`.
    """
    found = dict(updates)
    for step in program:
        for value, before in step.get("updates", {}).items():
            found[value] = found.get(before, before)
    return found


def _check_array(port: Port, array: Array, sizes: dict[int | str, int]) -> None:
    if array.dtype != port.dtype:
        raise RequestError("run/dtype", f"{port.role} must be {port.dtype}, got {array.dtype}")
    fits = array.ndim == len(port.shape) and array.size > 0
    if fits:
        for size, dim in zip(array.shape, port.shape, strict=True):
            fits &= size == (dim if isinstance(dim, int) else sizes.setdefault(dim, size))
    if not fits:
        expected = ", ".join(str(sizes.get(d, d)) for d in port.shape)
        raise RequestError(
            "run/shape", f"{port.role} must have shape [{expected}], got {list(array.shape)}"
        )


def _names(roles: Mapping[Role, object]) -> str:
    return ", ".join(sorted(map(str, roles))) or "nothing"
