"""Layers with a recurrent state: short causal convolution, and the Gated DeltaNet."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.ops import Attributes
from edgecc.ir.ops.state import L2_EPSILON, GatedDeltaNetAttributes


def causal_conv1d(call: Call[Attributes]) -> tuple[Tensor, Tensor]:
    """`conv1d` with one group a channel, over the rows behind those of the state."""
    x, state = call.operands
    (weight,) = (w.dense() for w in call.weights)
    window = torch.cat((state, x.transpose(1, 2)), dim=2)
    if x.shape[1] == 0:
        return x, state
    y = functional.conv1d(window, weight, groups=x.shape[2])
    return y.transpose(1, 2), window[:, :, x.shape[1] :]


def normalized(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPSILON)


def gated_delta_net(call: Call[GatedDeltaNetAttributes]) -> tuple[Tensor, Tensor]:
    """The recurrence, row by row, all sequences and heads at once.

    With k and q as columns, `S' = exp(g) S` becomes `S' + k (beta (v - k^T S'))`, and the output is
    `q^T` times that.
    """
    q, k, v, a, b, state = call.operands
    rate, bias = (w.dense() for w in call.weights)
    heads, repeat = call.attrs.value_heads, call.attrs.value_heads // call.attrs.key_heads
    key_dim, value_dim = state.shape[2:]
    queries, keys = (
        normalized(torch.unflatten(x, -1, (-1, key_dim))).repeat_interleave(repeat, dim=2)
        for x in (q, k)
    )
    queries = queries * key_dim**-0.5
    values = torch.unflatten(v, -1, (heads, value_dim))
    decay = torch.exp(-torch.exp(rate) * functional.softplus(a + bias))[..., None, None]
    beta = torch.sigmoid(b)[..., None, None]
    rows = []
    for t in range(v.shape[1]):
        state = state * decay[:, t]
        key = keys[:, t, :, None, :]
        wrong = values[:, t, :, None, :] - key @ state
        state = state + key.mT @ (beta[:, t] * wrong)
        rows.append(queries[:, t, :, None, :] @ state)
    if not rows:
        return v, state
    return torch.stack(rows, dim=1).flatten(2), state


KERNELS: Mapping[str, Kernel] = {
    "causal_conv1d": causal_conv1d,
    "gated_delta_net": gated_delta_net,
}
