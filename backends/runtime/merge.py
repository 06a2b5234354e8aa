"""Several sequences' calls of one entry as one engine call, and its results for each of them.

Rows are padded at the end to those of the longest. The block of a draft that reads states follows
its last feature, so its calls are padded in front, with features that it was given before: their
rows are written once more, with the bits that they have. Slots between them take part as well:
nothing is read of what comes out for them, and what is written lies behind their valid rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgecc.backends.base import Array, Role
from edgecc.backends.runtime.calls import Call
from edgecc.errors import InternalError


@dataclass(frozen=True, slots=True)
class _Axes:
    """Where an input has its sequences and its rows.

    Attributes:
        batch: The axis of sequences; None for an input that all of them share.
        rows: The axis of rows, if it has one.
        fill: What pads it.
    """

    batch: int | None
    rows: int | None = None
    fill: int = 0


_INPUTS: Mapping[Role, _Axes] = {
    Role.TOKEN_IDS: _Axes(0, 1),
    Role.CACHE_LENGTH: _Axes(0),
    Role.LOGIT_ROWS: _Axes(None, 0),
    Role.REPLAY_LENGTH: _Axes(0),
    Role.COMMIT_LENGTH: _Axes(0),
    Role.POSITIONS: _Axes(1, 2),
    Role.IMAGE_ROWS: _Axes(0, 1, -1),
    Role.IMAGE_FEATURES: _Axes(None),
    Role.FEATURES: _Axes(0, 1),
    Role.NEXT_TOKEN_IDS: _Axes(0, 1),
    Role.ANCHOR: _Axes(0),
}

_BY_ROW = frozenset({Role.LOGITS, Role.CHOSEN_TOKENS, Role.HIDDEN_TAP})
"""Outputs `[b, rows, ...]` with the rows of the call."""


@dataclass(frozen=True, slots=True)
class Idle:
    """A slot that takes part without a call.

    Attributes:
        length: Valid rows of its caches.
    """

    length: int


def rows_of(call: Call) -> int:
    """New rows of a call."""
    rows = call.inputs.get(Role.TOKEN_IDS, call.inputs.get(Role.FEATURES))
    if rows is None:
        raise InternalError("runtime/merge", f"a call of {call.entry} without rows")
    return int(rows.shape[1])


def start_of(call: Call, rows: int) -> int | None:
    """Where a call begins to write if it is made with more rows.

    Args:
        call: Of one sequence.
        rows: At least its own.

    Returns:
        The place of its first row in the caches; None if it cannot have as many.
    """
    length = int(call.inputs[Role.CACHE_LENGTH][0])
    missing = rows - rows_of(call)
    if Role.LOGIT_ROWS in call.inputs or not missing:  # padded at the end: its own rows are told
        return length
    known = call.earlier.get(Role.FEATURES)
    return length - missing if known is not None and known.shape[1] >= missing else None


def _widened(call: Call | Idle, rows: int) -> Call | Idle:
    """A call with earlier rows in front, as many as it lacks; of the target it is as it was."""
    missing = 0 if isinstance(call, Idle) or not call.earlier else rows - rows_of(call)
    if not missing or isinstance(call, Idle):
        return call
    inputs = dict(call.inputs)
    inputs[Role.CACHE_LENGTH] = inputs[Role.CACHE_LENGTH] - missing
    for role, before in call.earlier.items():
        inputs[role] = np.concatenate([before[:, -missing:], inputs[role]], axis=1)
    return replace(call, inputs=inputs)


def joined(calls: Sequence[Call | Idle]) -> tuple[Mapping[Role, Array], tuple[Role, ...]]:
    """The inputs of all calls, and all the outputs that any of them wants.

    Args:
        calls: Of neighbouring slots, in order; the first is a call. They want the logits of all
            their rows.

    Returns:
        What to run.
    """
    real = [call for call in calls if isinstance(call, Call)]
    if len(calls) == 1:
        return real[0].inputs, real[0].outputs
    rows = max(map(rows_of, real))
    calls = [_widened(call, rows) for call in calls]
    inputs = {role: _joined(role, calls, first, rows) for role, first in real[0].inputs.items()}
    outputs = dict.fromkeys(role for call in real for role in call.outputs)
    return inputs, tuple(outputs)


def _joined(role: Role, calls: Sequence[Call | Idle], first: Array, rows: int) -> Array:
    """One input for all calls."""
    axes = _INPUTS[role]
    real = [call for call in calls if isinstance(call, Call)]
    if axes.batch is None:  # row numbers, or features of images, which only prompts read
        return max((call.inputs[role] for call in real), key=len)
    shape = list(first.shape)
    shape[axes.batch] = len(calls)
    if axes.rows is not None:
        shape[axes.rows] = rows
    filled = np.full(shape, axes.fill, dtype=first.dtype)
    for index, call in enumerate(calls):
        if isinstance(call, Call):
            own = call.inputs[role]
            place = [slice(size) for size in own.shape]
            place[axes.batch] = slice(index, index + 1)
            filled[tuple(place)] = own
        elif role is Role.CACHE_LENGTH:
            filled[index] = call.length
    return filled


def part(results: Mapping[Role, Array], index: int, call: Call) -> dict[Role, Array]:
    """The results of one of the sequences of a call.

    HIDDEN_TAP is a copy, because it must outlive calls of other sequences.

    Args:
        results: Of the merged call.
        index: Which of its sequences.
        call: What that one asked for.
    """
    found = {}
    for role in call.outputs:
        own = results[role][index : index + 1]
        if role in _BY_ROW or (role is Role.PROPOSALS and Role.LOGIT_ROWS in call.inputs):
            wanted = Role.TOKEN_IDS if role is Role.HIDDEN_TAP else Role.LOGIT_ROWS
            own = own[:, : call.inputs[wanted].shape[-1]]
        found[role] = own.copy() if role is Role.HIDDEN_TAP else own
    return found
