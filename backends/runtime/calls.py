"""Engine calls as values: what a sequence waits for, and who makes the call.

A sequence is written as coroutines: it yields each `Call` that it needs and goes on with the
`Reply`. So it does not know whether its call is made at once, as `drive` does for a sequence alone,
or together with those of other sequences, as a scheduler does.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter
from typing import TypeAlias, TypeVar

from edgecc.backends.base import Array, Executable, Role

T = TypeVar("T")


class Entry(StrEnum):
    """The entries of a bundle that a sequence calls, by the names that engines have for them."""

    TARGET = "target"
    DRAFT = "draft"
    VISION = "vision"


@dataclass(frozen=True, slots=True)
class Call:
    """One engine call with the rows of one sequence.

    Attributes:
        entry: What is called.
        inputs: As for `Executable.run`, with b = 1. They are read while the call is made, not
            later.
        outputs: Roles wanted.
        alone: It is not to be made together with calls of other sequences. The others want the
            logits of all their rows, in order.
        earlier: Rows `[1, k, ...]` before those of `inputs`. The call may be made with the last of
            them in front, and a cache length less by as many, so that it has as many rows as
            others: they are in the caches already, with the same bits. No entry: it may not.
    """

    entry: Entry
    inputs: Mapping[Role, Array]
    outputs: tuple[Role, ...]
    alone: bool = False
    earlier: Mapping[Role, Array] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came out of a call.

    Attributes:
        results: The wanted outputs of this sequence, with b = 1. HIDDEN_TAP is valid until the
            sequence's next call of the target, all others until its next call, whatever it is, and
            only while the coroutine runs.
        seconds: How long the call took.
    """

    results: Mapping[Role, Array]
    seconds: float


Steps: TypeAlias = Generator[Call, Reply, T]
"""A coroutine that needs engine calls to come to its result: use it with `yield from`, or run it
with `drive`."""


def drive(steps: Steps[T], entries: Mapping[Entry, Executable]) -> T:
    """Run a coroutine to its end, making each call as it comes.

    Args:
        steps: The coroutine, not started yet.
        entries: What can be called.

    Returns:
        The coroutine's result.
    """
    try:
        call = next(steps)
        while True:
            begin = perf_counter()
            results = entries[call.entry].run(call.inputs, call.outputs)
            call = steps.send(Reply(results, perf_counter() - begin))
    except StopIteration as end:
        result: T = end.value
        return result
