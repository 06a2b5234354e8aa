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
from edgecc.ir.ops.base import check_indices
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


def logged_delta_net(call: Call[GatedDeltaNetAttributes]) -> tuple[Tensor, ...]:
    """Each sequence for itself, as chunks of rows: those replayed, then the new ones.

    Padding rows have gates of minus infinity, which decay by nothing and write nothing.

    Raises:
        RequestError: More rows are replayed or committed than there are.
    """
    x, a, b, conv_state, delta_state, log, replay, commit = call.operands
    check_indices("replayed rows", replay.cpu().numpy(), log.shape[1] + 1)
    check_indices("committed rows", commit.cpu().numpy(), x.shape[1] + 1)
    new = torch.cat((x, a, b), dim=-1)
    width = call.attrs.value_heads * delta_state.shape[3]
    made = (
        x.new_empty((*x.shape[:2], width)),
        torch.empty_like(conv_state),
        torch.empty_like(delta_state),
    )
    for i, (m, c) in enumerate(zip(replay.tolist(), commit.tolist(), strict=True)):
        found = _replayed(call, torch.cat((log[i, :m], new[i])), i, m, c)
        for tensor, value in zip(made, found, strict=True):
            tensor[i] = value
    after = torch.cat((new, log[:, new.shape[1] :]), dim=1)[:, : log.shape[1]]
    return (*made, after)


def _replayed(
    call: Call[GatedDeltaNetAttributes], rows: Tensor, index: int, replayed: int, committed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Results and states of one sequence, from its logged and new rows `[m + t, C + 2 Hv]`."""
    x, _, _, conv_state, delta_state, *_ = call.operands
    attrs, (conv1d, *gates) = call.attrs, call.weights
    keys = attrs.key_heads * delta_state.shape[2]
    sizes = [keys, keys, x.shape[2] - 2 * keys, attrs.value_heads, attrs.value_heads]
    inputs, switches = torch.split(rows, [x.shape[2], 2 * attrs.value_heads], dim=-1)
    window = torch.cat((conv_state[index], inputs.T), dim=-1)
    weight = conv1d.dense()
    mixed = functional.silu(functional.conv1d(window[None], weight, groups=weight.shape[0]))[0].T
    end = replayed + committed
    if committed:
        switches = switches.clone()
        switches[end:] = -torch.inf
    parts = torch.split(torch.cat((mixed, switches), dim=-1), sizes, dim=-1)

    def walk(state: Tensor, span: slice) -> tuple[Tensor, ...]:
        operands = (*(part[None, span] for part in parts), state)
        return gated_delta_net(Call(operands, tuple(gates), attrs, call.run))

    _, before = walk(delta_state[index : index + 1], slice(replayed))
    result, after = walk(before, slice(replayed, None))
    kept = window[:, end : end + conv_state.shape[2]]
    return result[0], kept, (after if committed else before)[0]


KERNELS: Mapping[str, Kernel] = {
    "causal_conv1d": causal_conv1d,
    "gated_delta_net": gated_delta_net,
    "logged_delta_net": logged_delta_net,
}
