"""Comparing what modules compute."""

from __future__ import annotations

import numpy as np

from edgecc.ir.core import Module, Node, Value
from edgecc.ir.encodings import Array
from edgecc.ir.ops import Trait

_COUNTING = ("position_ids", "advance")
"""Ops that read a float operand for its shape alone."""


def compare_arrays(found: Array, expected: Array, tolerance: float = 0.0) -> str:
    """Where two arrays differ first; empty when they do not.

    Args:
        found: What was computed.
        expected: The reference.
        tolerance: 0 compares bits, signs of zeros and payloads of NaNs included. Otherwise floats
            may differ by this times the largest finite magnitude of the reference, and must agree
            on where they are not finite.
    """
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype}{list(found.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if found.tobytes() == expected.tobytes():
        return ""
    if tolerance and expected.dtype.kind == "f":
        wrong = _outside(found, expected, tolerance)
    else:
        wrong = _bits(found) != _bits(expected)
    if not wrong.any():
        return ""
    first = tuple(int(i) for i in np.argwhere(wrong)[0])
    return (
        f"{int(wrong.sum())} of {wrong.size} elements, first at {list(first)}: "
        f"{found[first]!r} instead of {expected[first]!r}"
    )


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _outside(found: Array, expected: Array, tolerance: float) -> Array:
    finite = np.isfinite(expected)
    scale = float(np.abs(expected, where=finite, out=np.zeros_like(expected)).max(initial=0))
    both = finite & np.isfinite(found)
    distance = np.abs(np.where(both, found, 0) - np.where(both, expected, 0))
    other = ~both & (_bits(found) != _bits(expected)) & ~(np.isnan(found) & np.isnan(expected))
    outside: Array = (distance > tolerance * scale) | other
    return outside


def chosen_outputs(module: Module) -> set[str]:
    """Outputs of entries, as `graph.output`, that depend on an integer chosen by comparing floats.

    The smallest difference of those floats may give another integer; and so it is with floats that
    are rounded to few values.
    """
    return {
        f"{graph.name}.{output.name}"
        for graph in module.entries()
        for output in graph.outputs
        if _depends_on_choice(module, output.value)
    }


def _depends_on_choice(module: Module, value: Value) -> bool:
    waiting, seen = [value], set[Value]()
    while waiting:
        found = waiting.pop()
        if found in seen or found.producer is None:
            continue
        seen.add(found)
        if _chooses(module, found.producer):
            return True
        waiting += found.producer.operands
    return False


def _chooses(module: Module, node: Node) -> bool:
    if node.op.name == "call":
        callee = module.graphs[node.attrs.callee]  # type: ignore[attr-defined]
        return any(_chooses(module, inner) for inner in callee.nodes)
    return Trait.STEPWISE in node.op.traits or (
        node.op.name not in _COUNTING
        and any(not r.type.dtype.is_float for r in node.results)
        and any(o.type.dtype.is_float for o in node.operands)
    )
