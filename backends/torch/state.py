"""Layers with a recurrent state: short causal convolution, and the Gated DeltaNet.

The delta rule is not walked row by row here: the updates of a chunk of rows are the solution of one
triangular system, as in "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484),
with the decays of Gated Delta Networks (arXiv 2412.06464).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.ops import Attributes
from edgecc.ir.ops.state import GatedDeltaNetAttributes

CHUNK = 64
"""Rows solved at once: the system is of this size."""


def causal_conv1d(call: Call[Attributes]) -> tuple[Tensor, ...]:
    """`torch.nn.functional.conv1d` with one group per channel, the state in front of the rows."""
    x, state = call.operands
    if not x.shape[1]:
        return x, state
    window = torch.cat((state, x.transpose(1, 2)), dim=-1)  # [b, C, K-1 + t]
    weight = call.weights[0].dense()
    y = functional.conv1d(window, weight, groups=weight.shape[0])
    return y.transpose(1, 2), window[..., x.shape[1] :]


def normalized(x: Tensor) -> Tensor:
    """`x / sqrt(sum(x^2) + 1e-6)` over the last axis."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + 1e-6)


def delta_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over a chunk of rows at once.

    With `c_t` the sum of log decays up to row t, the state after it is
    `S_t = exp(c_t) S_0 + sum_{i<=t} exp(c_t - c_i) k_i u_i^T`. Put into
    `u_t = beta_t (v_t - S'_t^T k_t)` with `S'_t = exp(g_t) S_{t-1}`, that is a unit lower
    triangular system for all updates u.

    Args:
        state: `[b, h, Dk, Dv]` before the first row.
        q: `[b, h, n, Dk]`, normalized and scaled.
        k: `[b, h, n, Dk]`, normalized.
        v: `[b, h, n, Dv]`.
        log_decay: `[b, h, n]`, not positive.
        beta: `[b, h, n]`.

    Returns:
        Results `[b, h, n, Dv]` and the state after the last row.
    """
    total = log_decay.cumsum(dim=-1)
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    later = torch.ones_like(between, dtype=torch.bool).triu(1)
    decay = between.masked_fill(later, -torch.inf).exp()  # [b, h, n, n], 0 for rows to come
    carried = total.exp().unsqueeze(-1)
    write = beta.unsqueeze(-1)
    system = (write * decay * (k @ k.mT)).tril(-1)
    right = write * (v - carried * (k @ state))
    update = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = carried * (q @ state) + (decay * (q @ k.mT)) @ update
    left = (total[..., -1:] - total).exp().unsqueeze(-1)  # decay from each row to the last
    after = total[..., -1, None, None].exp() * state + (left * k).mT @ update
    return out, after


def gated_delta_net(call: Call[GatedDeltaNetAttributes]) -> tuple[Tensor, ...]:
    """Chunk by chunk, see `delta_chunk`; in float32 at least, half precision has no solver."""
    attrs = call.attrs
    dtype = torch.promote_types(call.operands[0].dtype, torch.float32)
    q, k, v, a, b, state = (x.to(dtype) for x in call.operands)
    rate, bias = (weight.dense().to(dtype) for weight in call.weights)
    repeat = attrs.value_heads // attrs.key_heads
    q, k = (
        normalized(
            torch.unflatten(x, -1, (attrs.key_heads, state.shape[2])).transpose(1, 2)
        ).repeat_interleave(repeat, dim=1)  # [b, Hv, t, Dk]
        for x in (q, k)
    )
    rows = (
        q * state.shape[2] ** -0.5,
        k,
        torch.unflatten(v, -1, (attrs.value_heads, state.shape[3])).transpose(1, 2),
        (-rate.exp() * functional.softplus(a + bias)).transpose(1, 2),
        b.sigmoid().transpose(1, 2),
    )
    pieces = [v.new_empty(v.shape[0], attrs.value_heads, 0, state.shape[3])]
    for first in range(0, v.shape[1], CHUNK):
        out, state = delta_chunk(state, *(x[:, :, first : first + CHUNK] for x in rows))
        pieces.append(out)
    result = torch.cat(pieces, dim=2).transpose(1, 2).flatten(-2)
    like = call.operands[0].dtype
    return result.to(like), state.to(like)


KERNELS: Mapping[str, Kernel] = {
    "causal_conv1d": causal_conv1d,
    "gated_delta_net": gated_delta_net,
}
