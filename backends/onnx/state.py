"""Lowerings of layers with a recurrent state.

Convolution and recurrence are kernels of ONNX Runtime where the dialect has them, else sums of
shifted rows and a `Scan`. Everything else is common.

Each carried input (states, log) has one reader, of which all that is written over it depends, so
that engines may bind input and output to one buffer: a test walks over the models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto

from edgecc.backends.onnx.emitter import CONTRIB, Emitter, lowers
from edgecc.backends.onnx.scan import delta_scan
from edgecc.devices import Dialect
from edgecc.ir.core import Node
from edgecc.ir.ops.state import L2_EPSILON, GatedDeltaNetAttributes

PACKET = 16
"""Softplus gives a number other bits at the end of a vector than in the middle of a SIMD packet:
rows are padded to a multiple of this many elements, so that they all start a packet."""

END = np.iinfo(np.int64).max


@lowers("causal_conv1d")
def causal_conv1d(e: Emitter, node: Node) -> None:
    """The kernel over rows after those of the state; the new state is cut from both."""
    x, state = e.operands(node)
    taps = _size(node, 1, 2) + 1
    y, new_state = (e.name(r) for r in node.results)
    (past,) = e.op("Transpose", [state], perm=[0, 2, 1])
    (window,) = e.op("Concat", [past, x], axis=1)
    _convolution(e, window, e.weight(node.weights[0]), taps, activated=False, result=y)
    (kept,) = e.op("Slice", [window, e.ints(1 - taps), e.ints(END), e.ints(1)])
    e.op("Transpose", [kept], [new_state], perm=[0, 2, 1])


@lowers("gated_delta_net")
def gated_delta_net(e: Emitter, node: Node) -> None:
    """Normalized keys and queries, gates, then the recurrence."""
    sizes = _Sizes.of(node, state=5)
    q, k, v, a, b, state = e.operands(node)
    q, k = (_normalized(e, x, sizes.key_heads, sizes) for x in (q, k))
    log_decay, beta = _gates(e, a, b, node.weights, sizes)
    results = [e.name(r) for r in node.results]
    _recurrence(e, (q, k, v, log_decay, beta), state, sizes, results)


@lowers("logged_delta_net")
def logged_delta_net(e: Emitter, node: Node) -> None:
    """One pass over replayed and new rows, then the recurrence over each of the two.

    What is the same for all layers, which rows are read and which count, is computed once.
    """
    sizes = _Sizes.of(node, state=4)
    x, a, b, conv_state, delta_state, log, replay, commit = e.operands(node)
    result, new_conv, new_delta, new_log = (e.name(r) for r in node.results)
    channels, taps, rows = _size(node, 0, 2), _size(node, 3, 2) + 1, _size(node, 5, 1)
    plan = e.once(
        ("replay", replay, commit, rows, taps, str(node.operands[0].type.shape[1])),
        lambda: _Plan.emit(e, replay, commit, e.size(node.operands[0], 1), rows, taps),
    )
    (new,) = e.op("Concat", [x, a, b], axis=2)
    (known,) = e.op("Concat", [log, new], axis=1)
    e.op("Gather", [known, plan.log_rows], [new_log], axis=1)
    heads = sizes.value_heads
    inputs, gates = e.op("Split", [known, e.ints(channels, 2 * heads)], 2, axis=2)
    (past,) = e.op("Transpose", [conv_state], perm=[0, 2, 1])
    (inputs,) = e.op("Concat", [past, inputs], axis=1)
    (window,) = e.op("GatherND", [inputs, plan.window_rows], batch_dims=1)
    (kept,) = e.op("GatherND", [window, plan.state_rows], batch_dims=1)
    e.op("Transpose", [kept], [new_conv], perm=[0, 2, 1])
    mixed = _convolution(e, window, e.weight(node.weights[0]), taps, activated=True)
    keys = 2 * sizes.key_heads * sizes.key_dim
    qk, v = e.op("Split", [mixed, e.ints(keys, channels - keys)], 2, axis=2)
    qk = _normalized(e, qk, 2 * sizes.key_heads, sizes)
    q, k = e.op("Split", [qk, e.ints(keys // 2, keys // 2)], 2, axis=2)
    (gates,) = e.op("GatherND", [gates, plan.gate_rows], batch_dims=1)
    a, b = e.op("Split", [gates, e.ints(heads, heads)], 2, axis=2)
    log_decay, beta = _gates(e, a, b, node.weights[1:], sizes)
    # Rows that do not count leave the state as it is: they decay by exp(0) and write nothing.
    log_decay, beta = (e.op("Mul", [g, plan.counts])[0] for g in (log_decay, beta))
    parts = [e.op("Split", [part, plan.sizes], 2, axis=1) for part in (q, k, v, log_decay, beta)]
    _, before = _recurrence(e, [p[0] for p in parts], delta_state, sizes)
    _, after = _recurrence(e, [p[1] for p in parts], before, sizes, [result, ""])
    e.op("Where", [plan.commits, after, before], [new_delta])


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Heads and widths of a delta rule."""

    key_heads: int
    value_heads: int
    key_dim: int

    @classmethod
    def of(cls, node: Node, state: int) -> _Sizes:
        attrs = node.attrs
        assert isinstance(attrs, GatedDeltaNetAttributes)
        return cls(attrs.key_heads, attrs.value_heads, _size(node, state, 2))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which rows a call reads and counts, for all its layers.

    A call works on k + t rows: those it replays, right-aligned in the k that the sequence with most
    of them needs, at least one, then the new ones.

    Attributes:
        log_rows: i64 `[R]`, rows of log and new rows that are the next log.
        window_rows: i64 `[b, K-1+k+t, 1]`, rows of state, log and new rows for the convolution.
        gate_rows: i64 `[b, k+t, 1]`, rows of log and new rows.
        state_rows: i64 `[b, K-1, 1]`, rows of the window that are the next convolution state.
        counts: f32 `[b, k+t, 1]`, 1 where a row changes the state, else 0.
        sizes: i64 `[2]`, k and t.
        commits: bool `[b, 1, 1, 1]`, whether new rows are final.
    """

    log_rows: str
    window_rows: str
    gate_rows: str
    state_rows: str
    counts: str
    sizes: str
    commits: str

    @classmethod
    def emit(cls, e: Emitter, replay: str, commit: str, new: str, rows: int, taps: int) -> _Plan:
        """Append the nodes that compute a plan.

        Args:
            e: Where to.
            replay: i64 `[b]`.
            commit: i64 `[b]`.
            new: i64 `[1]`, number of new rows.
            rows: Of the log.
            taps: Of the convolution.
        """

        def one(op: str, *inputs: str, **attributes: Any) -> str:
            return e.op(op, inputs, **attributes)[0]

        zero, one_, past = e.ints(0), e.ints(1), e.ints(taps - 1)
        column, scalar = e.constant(np.array([[0]], np.int64)), e.constant(np.array(0, np.int64))
        step = e.constant(np.array(1, np.int64))
        most = one("Max", one("ReduceMax", replay, keepdims=1), one_)
        total = one("Add", most, new)
        replayed, final = (one("Unsqueeze", n, one_) for n in (replay, commit))  # [b, 1]
        skipped = one("Sub", most, replayed)  # rows before the replayed ones
        # Rows of the log that the new rows overwrite, from the first on.
        place = e.constant(np.arange(rows, dtype=np.int64))
        fresh = one("Less", place, new)
        log_rows = one("Where", fresh, one("Add", place, e.ints(rows)), place)
        index = one("Range", scalar, one("Squeeze", total), step)  # [k + t]
        live = one("Sub", index, skipped)  # [b, k + t], counted from the first replayed row
        jump = one("Sub", e.ints(rows), replayed)

        def source(number: str, first_new: str) -> str:
            moved = one("Where", one("Less", number, first_new), number, one("Add", number, jump))
            return one("Unsqueeze", one("Max", moved, column), e.ints(2))

        wide = one("Range", scalar, one("Squeeze", one("Add", total, past)), step)
        window = source(one("Sub", wide, skipped), one("Add", replayed, past))
        end = one("Add", most, final)  # [b, 1]
        kept = one("Add", e.constant(np.arange(taps - 1, dtype=np.int64)), end)
        commits = one("Greater", final, zero)  # [b, 1]
        counted = one("Or", one("Not", commits), one("Less", index, end))
        counted = one("And", counted, one("GreaterOrEqual", live, zero))
        counts = one("Unsqueeze", one("Cast", counted, to=TensorProto.FLOAT), e.ints(2))
        return cls(
            log_rows=log_rows,
            window_rows=window,
            gate_rows=source(live, replayed),
            state_rows=one("Unsqueeze", kept, e.ints(2)),
            counts=counts,
            sizes=one("Concat", most, new, axis=0),
            commits=one("Unsqueeze", commits, e.ints(2, 3)),
        )


def _size(node: Node, operand: int, axis: int) -> int:
    return int(str(node.operands[operand].type.shape[axis]))


def _convolution(
    e: Emitter, window: str, weight: str, taps: int, *, activated: bool, result: str = ""
) -> str:
    """Causal convolution of `[b, K-1+n, C]`; the rows after the first K-1."""
    outputs = [result] if result else 1
    if e.dialect is Dialect.ORT_CONTRIB:
        extra = {"activation": "silu"} if activated else {}
        (y, _) = e.op(
            "CausalConvWithState", [window, weight], 2, domain=CONTRIB, channels_last=1, **extra
        )
        return e.op("Slice", [y, e.ints(taps - 1), e.ints(END), e.ints(1)], outputs)[0]
    columns = e.op(
        "Split", [e.op("Transpose", [weight], perm=[1, 2, 0])[0]], taps, axis=1, num_outputs=taps
    )
    total = ""
    for j, column in enumerate(columns):
        stop = e.ints(END) if j == taps - 1 else e.ints(j + 1 - taps)
        (rows,) = e.op("Slice", [window, e.ints(j), stop, e.ints(1)])
        last = not activated and j == taps - 1 and j > 0
        (part,) = e.op("Mul", [rows, column])
        total = e.op("Add", [total, part], outputs if last else 1)[0] if total else part
    if not activated:
        return total
    (s,) = e.op("Sigmoid", [total])
    return e.op("Mul", [total, s], outputs)[0]


def _normalized(e: Emitter, x: str, heads: int, sizes: _Sizes) -> str:
    """`x / sqrt(sum(x^2) + eps)` in each head: a norm by the mean, with all weights Dk^-0.5."""
    dim = sizes.key_dim
    (split,) = e.op("Reshape", [x, e.ints(0, 0, heads, dim)])
    weight = e.constant(np.full(dim, dim**-0.5, np.float32))
    (y,) = e.op("RMSNormalization", [split, weight], axis=-1, epsilon=L2_EPSILON / dim)
    return e.op("Reshape", [y, e.ints(0, 0, heads * dim)])[0]


def _gates(e: Emitter, a: str, b: str, weights: Sequence[str], sizes: _Sizes) -> tuple[str, str]:
    """The logarithm of the decay, `-exp(A_log) * softplus(a + dt_bias)`, and `sigmoid(b)`."""
    heads = sizes.value_heads
    a_log, dt_bias = (e.weight(w) for w in weights)
    (x,) = e.op("Add", [a, dt_bias])
    missing = -heads % PACKET
    if missing:
        (x,) = e.op("Pad", [x, e.ints(0, missing), "", e.ints(2)], mode="constant")
    (x,) = e.op("Softplus", [x])
    if missing:
        (x,) = e.op("Slice", [x, e.ints(0), e.ints(heads), e.ints(2)])
    (rate,) = e.op("Neg", e.op("Exp", [a_log]))
    (log_decay,) = e.op("Mul", [x, rate])
    return log_decay, e.op("Sigmoid", [b])[0]


def _recurrence(
    e: Emitter,
    rows: Sequence[str],
    state: str,
    sizes: _Sizes,
    outputs: Sequence[str] = ("", ""),
) -> tuple[str, str]:
    """The delta rule over normalized rows q, k, v, log decay, beta; results and new state."""
    names = [name or e.fresh("delta") for name in outputs]
    if e.dialect is Dialect.STANDARD:
        delta_scan(e, rows, state, sizes.key_heads, sizes.value_heads, sizes.key_dim, names)
        return names[0], names[1]
    q, k, v, log_decay, beta = rows
    e.op(
        "LinearAttention",
        [q, k, v, state, log_decay, beta],
        names,
        domain=CONTRIB,
        q_num_heads=sizes.key_heads,
        kv_num_heads=sizes.value_heads,
        update_rule="gated_delta",
        scale=sizes.key_dim**-0.5,
    )
    return names[0], names[1]
