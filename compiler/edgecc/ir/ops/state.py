"""Layers with a recurrent state: short causal convolution, and the Gated DeltaNet.

A state summarizes all rows before a call in a fixed number of values. It is a graph input of role
`state`, zero before the first row, and its successor is an output that aliases it. A cache can be
cut back to fewer rows, a state cannot: what it was before a call has to be kept by whoever may want
to go back.

All references walk over the rows one at a time, so a call on many rows gives the bits of many
calls on fewer rows, for results and states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edgecc.ir.encodings import Array
from edgecc.ir.ops.base import (
    Attributes,
    EvalContext,
    Op,
    Scope,
    WeightView,
    check_indices,
    require,
    require_equal,
    require_float,
    require_type,
)
from edgecc.ir.ops.elementwise import sigmoid, silu
from edgecc.ir.types import Dim, DType, TensorType
from edgecc.ir.weights import Weight

L2_EPSILON = 1e-6
"""Added to the sum of squares of a query or key; fixed, whatever the epsilon of the norms."""

SOFTPLUS_THRESHOLD = 20.0
"""Above it softplus is the identity, as in PyTorch: float32 has no digits for the difference."""


@dataclass(frozen=True, slots=True)
class GatedDeltaNetAttributes(Attributes):
    """How many heads q and k have (`key_heads`), and how many v and the gates (`value_heads`)."""

    key_heads: int
    value_heads: int


def softplus(x: Array) -> Array:
    """`log(1 + exp(x))`, and x itself above the threshold."""
    capped = np.minimum(x, x.dtype.type(SOFTPLUS_THRESHOLD))
    return np.where(x > SOFTPLUS_THRESHOLD, x, np.log1p(np.exp(capped)))


def l2_normalize(x: Array) -> Array:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis."""
    total = np.sum(np.square(x), axis=-1, keepdims=True)
    return np.asarray(x / np.sqrt(total + x.dtype.type(L2_EPSILON)))


def delta_step(
    state: Array, q: Array, k: Array, v: Array, decay: Array, beta: Array
) -> tuple[Array, Array]:
    """One row of the gated delta rule in every value head.

    Args:
        state: `[Hv, Dk, Dv]`.
        q: `[Hv, Dk]`, normalized and scaled.
        k: `[Hv, Dk]`, normalized.
        v: `[Hv, Dv]`.
        decay: `[Hv]`, factor on the state, in 0..1.
        beta: `[Hv]`, how much of the new value is written, in 0..1.

    Returns:
        The new state and the output `[Hv, Dv]`: with `S' = decay S` and
        `u = beta (v - S'^T k)`, the state is `S' + k u^T` and the output `(S' + k u^T)^T q`.
    """
    decayed = state * decay[:, None, None]
    update = beta[:, None] * (v - np.einsum("hkv,hk->hv", decayed, k))
    after = decayed + k[:, :, None] * update[:, None, :]
    return after, np.einsum("hkv,hk->hv", after, q)


def _size(what: str, dim: Dim, parts: int) -> int:
    """Width of one head of an axis of `parts` heads."""
    require(
        isinstance(dim, int) and parts > 0 and dim > 0 and dim % parts == 0,
        f"width {dim} of {what} must divide into {parts} heads",
    )
    return int(str(dim)) // parts


class CausalConv1d(Op[Attributes]):
    """Short causal depthwise convolution over the rows: x `[b, t, C]`, state `[b, C, K-1]`.

    `y[t, c] = sum_j w[c, 0, j] x[t - (K-1) + j, c]` with a weight `[C, 1, K]`, as PyTorch stores
    that of a Conv1d with one group per channel: the last tap meets the row's own input. Rows before
    the call come from the state, which holds the last K-1 inputs of each channel, oldest first.
    Results: y `[b, t, C]` and the state after the last row.
    """

    name = "causal_conv1d"
    operands = ("x", "state")
    weights = ("weight",)
    results = ("result", "state")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The types of x and of the state."""
        x, state = operands
        require_float("x", x)
        require_type("x", x, rank=3)
        require_type("state", state, x.dtype, rank=3)
        shape = weights[0].shape
        require(
            len(shape) == 3 and shape[1] == 1 and shape[2] > 1,
            f"the weight must be [channels, 1, taps] with at least 2 taps, got {list(shape)}",
        )
        require_equal("channels of x", x.shape[2], shape[0])
        require_equal("shape of the state", state.shape, (x.shape[0], shape[0], shape[2] - 1))
        return (x, state)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Taps from the oldest to the newest, added in that order."""
        x, state = operands
        taps = weights[0].dense()[:, 0, :].T
        window = np.concatenate([state.transpose(0, 2, 1), x], axis=1)
        rows = x.shape[1]
        y = window[:, :rows] * taps[0]
        for j in range(1, len(taps)):
            y = y + window[:, j : j + rows] * taps[j]
        kept = window[:, rows:].transpose(0, 2, 1)
        return y, np.ascontiguousarray(kept)


class GatedDeltaNet(Op[GatedDeltaNetAttributes]):
    """Linear attention with a decaying state that is corrected by the delta rule.

    q and k `[b, t, Hk * Dk]`, v `[b, t, Hv * Dv]`, a and b `[b, t, Hv]`, state
    `[b, Hv, Dk, Dv]`; weights `A_log` and `dt_bias` `[Hv]`. Value head h reads key head
    `h // (Hv / Hk)`. For each row and value head:

    - `q = q / sqrt(sum(q^2) + 1e-6) * Dk^-0.5`, `k = k / sqrt(sum(k^2) + 1e-6)`;
    - `g = -exp(A_log) * softplus(a + dt_bias)`, `beta = sigmoid(b)`;
    - `S = exp(g) * S`; `u = beta * (v - S^T k)`; `S = S + k u^T`; `result = S^T q`.

    Results: `[b, t, Hv * Dv]` and the state after the last row. Source: Gated Delta Networks
    (arXiv 2412.06464), in the form of transformers' modeling_qwen3_5.
    """

    name = "gated_delta_net"
    attributes = GatedDeltaNetAttributes
    operands = ("q", "k", "v", "a", "b", "state")
    weights = ("A_log", "dt_bias")
    results = ("result", "state")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: GatedDeltaNetAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The types of v and of the state."""
        q, k, v, a, b, state = operands
        require_float("q", q)
        for what, x in (("q", q), ("k", k), ("v", v), ("a", a), ("b", b)):
            require_type(what, x, q.dtype, rank=3)
            require_equal(f"rows of {what}", x.shape[:2], q.shape[:2])
        heads = attrs.value_heads
        require(
            attrs.key_heads > 0 and heads > 0 and heads % attrs.key_heads == 0,
            f"value_heads / key_heads is not whole: {heads} / {attrs.key_heads}",
        )
        key_dim, value_dim = _size("q", q.shape[2], attrs.key_heads), _size("v", v.shape[2], heads)
        require_equal("width of k", k.shape[2], q.shape[2])
        for what, x in (("a", a), ("b", b)):
            require_equal(f"width of {what}", x.shape[2], heads)
        require_type("state", state, q.dtype, rank=4)
        shape = (q.shape[0], heads, key_dim, value_dim)
        require_equal("shape of the state", state.shape, shape)
        for what, weight in zip(self.weights, weights, strict=True):
            require_equal(f"shape of {what}", weight.shape, (heads,))
        return (v, state)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: GatedDeltaNetAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """See `delta_step`, row by row."""
        *rows, state = operands
        out, after = np.empty_like(rows[2]), np.empty_like(state)
        for i in range(len(state)):
            walk = _Walk(attrs, weights, state[i])
            out[i] = walk.over([x[i] for x in rows])
            after[i] = walk.state
        return out, after


class LoggedDeltaNet(Op[GatedDeltaNetAttributes]):
    """Convolution, SiLU and Gated DeltaNet over new rows, after the accepted rows of a log.

    What `causal_conv1d`, `silu`, `split` into q, k and v, and `gated_delta_net` compute from rows
    x `[b, t, C]` and gates a and b `[b, t, Hv]`, for targets that may have to go back. A log
    `[b, R, C + 2 Hv]` holds x, a and b of the last rows whose fate was not known when they were
    computed; `replay` i64 `[b]` says how many of them, from the first on, count.

    - The states `[b, C, K-1]` and `[b, Hv, Dk, Dv]` are taken on over those rows of the log.
    - From there the new rows give the results `[b, t, Hv * Dv]`.
    - The new states are those after `commit` i64 `[b]` new rows. With 0 they are where the replay
      ended: the new rows may still be rejected. With more, the rows from there on are padding,
      which is computed with decay 1 and write strength 0.
    - The new log has the new rows in its first rows; those that do not fit are not kept, and rows
      that are not overwritten stay.

    So no state is kept for each row, and going back is a smaller `replay` of the next call.
    """

    name = "logged_delta_net"
    attributes = GatedDeltaNetAttributes
    operands = ("x", "a", "b", "conv_state", "delta_state", "log", "replay", "commit")
    weights = ("conv1d", "A_log", "dt_bias")
    results = ("result", "conv_state", "delta_state", "log")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: GatedDeltaNetAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The rows of x in the width of the values, and the types of what is carried."""
        x, a, b, conv_state, delta_state, log, replay, commit = operands
        _CONV.infer((x, conv_state), weights[:1], Attributes(), scope)
        require_type("delta_state", delta_state, x.dtype, rank=4)
        _, _, key_dim, value_dim = delta_state.shape
        keys = attrs.key_heads * key_dim
        values = attrs.value_heads * value_dim
        require_equal("channels of x: q, k and v", x.shape[2], 2 * keys + values)
        q, v = (TensorType(x.dtype, (*x.shape[:2], width)) for width in (keys, values))
        _DELTA.infer((q, q, v, a, b, delta_state), weights[1:], attrs, scope)
        require_type("log", log, x.dtype, rank=3)
        width = x.shape[2] + 2 * attrs.value_heads
        require_equal("log", (log.shape[0], log.shape[2]), (x.shape[0], width))
        rows = log.shape[1]
        require(isinstance(rows, int) and rows > 0, f"the log must have rows, got {log}")
        for what, count in (("replay", replay), ("commit", commit)):
            require_type(what, count, DType.I64, rank=1)
            require_equal(f"batch of {what}", count.shape[0], x.shape[0])
        return (v, conv_state, delta_state, log)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: GatedDeltaNetAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Row by row, each sequence for itself."""
        x, a, b, conv_state, delta_state, log, replay, commit = operands
        check_indices("replayed rows", replay, log.shape[1] + 1)
        check_indices("committed rows", commit, x.shape[1] + 1)
        new = np.concatenate([x, a, b], axis=2)
        made = [np.empty((*x.shape[:2], attrs.value_heads * delta_state.shape[3]), x.dtype)]
        made += [np.empty_like(state) for state in (conv_state, delta_state)]
        channels, gates = x.shape[2], attrs.value_heads
        for i, (replayed, committed) in enumerate(zip(replay, commit, strict=True)):
            rows = np.concatenate([log[i, :replayed], new[i]])
            inputs, a_rows, b_rows = np.split(rows, [channels, channels + gates], axis=1)
            pair = inputs[None], conv_state[i : i + 1]
            mixed, _ = _CONV.evaluate(pair, weights[:1], Attributes(), ctx)
            window = np.concatenate([conv_state[i].T, inputs])
            kept = replayed + committed
            made[1][i] = window[kept : kept + conv_state.shape[2]].T
            keys = attrs.key_heads * delta_state.shape[2]
            q, k, v = np.split(silu(mixed[0]), [keys, 2 * keys], axis=1)
            walk = _Walk(attrs, weights[1:], delta_state[i])
            parts = [q, k, v, a_rows, b_rows]
            walk.over([part[:replayed] for part in parts])
            before = walk.state
            real = replayed + (committed or len(new[i]))
            live, padding = ([p[s] for p in parts] for s in _spans(replayed, real))
            made[0][i] = np.concatenate([walk.over(live), walk.over(padding, neutral=True)])
            made[2][i] = walk.state if committed else before
        fresh = new[:, : log.shape[1]]
        return (*made, np.concatenate([fresh, log[:, fresh.shape[1] :]], axis=1))


class _Walk:
    """The delta rule over the rows of one sequence; `state` is that after the last one."""

    def __init__(
        self, attrs: GatedDeltaNetAttributes, weights: Sequence[WeightView], state: Array
    ) -> None:
        self.state = state
        self._attrs = attrs
        self._rate, self._bias = np.exp(weights[0].dense()), weights[1].dense()

    def over(self, rows: Sequence[Array], *, neutral: bool = False) -> Array:
        """Results `[t, Hv * Dv]` of rows q, k, v, a, b.

        Args:
            rows: The operands of `gated_delta_net` for one sequence.
            neutral: Decay 1 and write strength 0, whatever a and b are.
        """
        out = np.empty_like(rows[2])
        for t, (q, k, v, a, b) in enumerate(zip(*rows, strict=True)):
            decay = np.exp(-self._rate * softplus(a + self._bias))
            beta = sigmoid(b)
            if neutral:
                decay, beta = np.ones_like(decay), np.zeros_like(beta)
            out[t] = self._step(q, k, v, decay, beta)
        return out

    def _step(self, q: Array, k: Array, v: Array, decay: Array, beta: Array) -> Array:
        heads, key_heads = self._attrs.value_heads, self._attrs.key_heads
        _, key_dim, value_dim = self.state.shape
        scale = q.dtype.type(key_dim**-0.5)
        query = l2_normalize(q.reshape(key_heads, key_dim)) * scale
        key = l2_normalize(k.reshape(key_heads, key_dim))
        repeat = heads // key_heads
        self.state, row = delta_step(
            self.state,
            query.repeat(repeat, axis=0),
            key.repeat(repeat, axis=0),
            v.reshape(heads, value_dim),
            decay,
            beta,
        )
        return row.reshape(-1)


def _spans(start: int, stop: int) -> Iterator[slice]:
    """The rows from `start` to `stop`, and those behind."""
    yield slice(start, stop)
    yield slice(stop, None)


_CONV, _DELTA = CausalConv1d(), GatedDeltaNet()

OPS = (_CONV, _DELTA, LoggedDeltaNet())
