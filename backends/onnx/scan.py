"""The delta rule as a `Scan` of standard operators, one row an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgecc.backends.onnx.emitter import Emitter

_ROW = ("q", "k", "v", "decay", "beta")


def delta_scan(
    e: Emitter,
    rows: Sequence[str],
    state: str,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    results: Sequence[str],
) -> None:
    """Append the recurrence over normalized rows.

    Args:
        e: Where to.
        rows: q and k `[b, n, Hk * Dk]`, v `[b, n, Hv * Dv]`, the logarithm of the decay and beta
            `[b, n, Hv]`; n is 1 at least.
        state: `[b, Hv, Dk, Dv]`.
        key_heads: Hk.
        value_heads: Hv.
        key_dim: Dk.
        results: Names of the result `[b, n, Hv * Dv]` and of the new state.
    """
    q, k, v, log_decay, beta = rows
    scale = e.constant(np.array(key_dim**-0.5, np.float32))
    (q,) = e.op("Mul", [q, scale])
    q, k = (_per_value_head(e, x, key_heads, value_heads, key_dim) for x in (q, k))
    (v,) = e.op("Reshape", [v, e.ints(0, 0, value_heads, 1, -1)])
    (decay,) = e.op("Exp", [log_decay])
    decay, beta = (e.op("Unsqueeze", [x, e.ints(3, 4)])[0] for x in (decay, beta))
    swap = [1, 0, 2, 3, 4]  # the reference evaluator of onnx scans axis 0 only
    scanned = [e.op("Transpose", [x], perm=swap)[0] for x in (q, k, v, decay, beta)]
    label = e.fresh("scan")
    (_, walked) = e.op(
        "Scan",
        [state, *scanned],
        [results[1], f"{label}.rows"],
        body=_body(label),
        num_scan_inputs=len(_ROW),
    )
    (walked,) = e.op("Transpose", [walked], perm=swap)
    e.op("Reshape", [walked, e.ints(0, 0, -1)], [results[0]])


def _per_value_head(e: Emitter, x: str, key_heads: int, value_heads: int, key_dim: int) -> str:
    """`[b, n, Hk * Dk]` to `[b, n, Hv, 1, Dk]`; each key head serves Hv / Hk value heads."""
    if key_heads != value_heads:
        (x,) = e.op("Reshape", [x, e.ints(0, 0, key_heads, 1, key_dim)])
        (x,) = e.op("Tile", [x, e.ints(1, 1, 1, value_heads // key_heads, 1)])
    return e.op("Reshape", [x, e.ints(0, 0, value_heads, 1, key_dim)])[0]


def _body(label: str) -> onnx.GraphProto:
    """One row: q and k `[b, Hv, 1, Dk]`, v `[b, Hv, 1, Dv]`, decay and beta `[b, Hv, 1, 1]`."""

    def name(value: str) -> str:
        return f"{label}.{value}"

    def info(value: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name(value), TensorProto.FLOAT, None)

    steps: list[tuple[str, tuple[str, ...], str, dict[str, Any]]] = [
        ("Mul", ("state", "decay"), "decayed", {}),
        ("MatMul", ("k", "decayed"), "seen", {}),
        ("Sub", ("v", "seen"), "missing", {}),
        ("Mul", ("beta", "missing"), "update", {}),
        ("Transpose", ("k",), "column", {"perm": [0, 1, 3, 2]}),
        ("Mul", ("column", "update"), "written", {}),
        ("Add", ("decayed", "written"), "new_state", {}),
        ("MatMul", ("q", "new_state"), "row", {}),
    ]
    nodes = [
        helper.make_node(op, [name(i) for i in inputs], [name(out)], name=name(out), **attributes)
        for op, inputs, out, attributes in steps
    ]
    return helper.make_graph(
        nodes, label, [info(i) for i in ("state", *_ROW)], [info(o) for o in ("new_state", "row")]
    )
