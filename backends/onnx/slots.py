"""Caches of several sequences: one input and one output of the model for each.

GroupQueryAttention takes several new rows after old ones of one sequence only, and writes in place
only where old and new cache are one buffer. So a model for several sequences has their caches as
inputs of their own (`k_cache@0`, `k_cache@1` ...), and an attention node for each of them. Which of
the compiled number are there is known when it runs: a call of one sequence takes the branch with
one node; in the other branch, nodes of sequences that are not there work on rows of another one
and on a cache that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from edgecc.backends.interface import slot_name
from edgecc.backends.onnx.emitter import ONNX_TYPES, Emitter
from edgecc.ir.core import Node

Kernel = Callable[[Sequence[str], Sequence[str], tuple[str, str], Sequence[str]], None]
"""Appends the kernel for one sequence: `kernel(rows, caches, (seqlens, total), outputs)`."""


@dataclass(frozen=True, slots=True)
class _Places:
    """Where each slot's sequence is in a call, for all layers of a graph.

    Attributes:
        alone: bool scalar, whether there is one sequence only.
        count: i64 `[1]`, how many there are.
        index: i64 `[1]` a slot, its sequence; the last one for slots that have none.
        seqlens: i32 `[1]` a slot, valid rows after the call, less one.
        totals: i32 scalars, valid rows after the call.
    """

    alone: str
    count: str
    index: list[str]
    seqlens: list[str]
    totals: list[str]

    @classmethod
    def emit(cls, e: Emitter, start: str, count: str, new: str) -> _Places:
        """Append the nodes.

        Args:
            e: Where to.
            start: i64 `[b]`, valid rows before the call.
            count: i64 `[1]`, b.
            new: i64 `[1]`, new rows.
        """
        slots = e.slots

        def one(op: str, *inputs: str, **attributes: Any) -> str:
            return e.op(op, inputs, **attributes)[0]

        def split(values: str) -> list[str]:
            return e.op("Split", [values], slots, axis=0, num_outputs=slots)

        alone = one("Squeeze", one("Equal", count, e.ints(1)))
        numbers = e.constant(np.arange(slots, dtype=np.int64))
        index = split(one("Min", numbers, one("Sub", count, e.ints(1))))
        none = e.constant(np.zeros(slots, dtype=np.int64))
        starts = one("Slice", one("Concat", start, none, axis=0), e.ints(0), e.ints(slots))
        ends = one("Add", starts, new)
        totals = split(one("Cast", ends, to=TensorProto.INT32))
        seqlens = split(one("Cast", one("Sub", ends, e.ints(1)), to=TensorProto.INT32))
        return cls(alone, count, index, seqlens, [one("Squeeze", total) for total in totals])


def attend_by_slot(
    e: Emitter,
    node: Node,
    rows: Sequence[str],
    lengths: tuple[str, str],
    result: str,
    kernel: Kernel,
) -> None:
    """Append the attention of a call of any number of sequences, up to the compiled one.

    Args:
        e: Where to.
        node: A `cached_attention`.
        rows: New queries, keys and values, `[b, t, w]` each.
        lengths: What the kernel takes in a call of one sequence.
        result: Name of the attention's output.
        kernel: Appends the kernel.
    """
    k, start = node.operands[1], node.operands[5]
    new = e.size(k, 1)
    places = e.once(
        ("places", e.name(start), new),
        lambda: _Places.emit(e, e.name(start), e.size(start, 0), new),
    )
    element = ONNX_TYPES[node.results[0].type.dtype]
    old, after = (
        [[slot_name(e.name(v), slot) for v in values] for slot in range(e.slots)]
        for values in (node.operands[3:5], node.results[1:])
    )
    outputs = [result, *(name for pair in after for name in pair)]

    def alone(made: Sequence[str]) -> None:
        kernel(rows, old[0], lengths, made[:3])
        for before, name in zip((c for pair in old[1:] for c in pair), made[3:], strict=True):
            e.op("Identity", [before], [name])

    def several(made: Sequence[str]) -> None:
        parts = []
        for slot in range(e.slots):
            own = [e.op("Gather", [x, places.index[slot]], axis=0)[0] for x in rows]
            parts.append(e.fresh("rows"))
            caches = made[1 + 2 * slot : 3 + 2 * slot]
            length = places.seqlens[slot], places.totals[slot]
            kernel(own, old[slot], length, [parts[-1], *caches])
        (all_rows,) = e.op("Concat", parts, axis=0)
        e.op("Slice", [all_rows, e.ints(0), places.count], [made[0]])

    branches = {
        "then_branch": e.branch("alone", len(outputs), element, alone),
        "else_branch": e.branch("several", len(outputs), element, several),
    }
    e.op("If", [places.alone], outputs, **branches)
