"""Attention over fixed-capacity KV caches, and rotary position embedding.

All sequences of a batch are computed at once: what a sequence does not have is masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.backends.torch.weights import TorchWeight
from edgecc.ir.ops import Attributes
from edgecc.ir.ops.attention import (
    AttentionAttributes,
    RopeAttributes,
    SplitHeadsAttributes,
    check_length,
    check_start,
)
from edgecc.ir.ops.base import check_indices


def rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Rotary embedding in the form `x * cos + rotate_half(x) * sin`.

    Args:
        x: `[b, s, heads * D]`.
        cos: `[b, s, R/2]`; the first R <= D dims of a head are rotated, the rest pass.
        sin: Like cos.
        heads: Number of heads.
    """
    split = torch.unflatten(x, -1, (heads, x.shape[-1] // heads))
    rotary = 2 * cos.shape[-1]
    turned, rest = torch.split(split, [rotary, split.shape[-1] - rotary], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    half_turned = torch.cat((-second, first), dim=-1)
    cos, sin = (torch.cat((t, t), dim=-1).unsqueeze(-2) for t in (cos, sin))
    return torch.cat((turned * cos + half_turned * sin, rest), dim=-1).flatten(-2)


def look_up(tables: Sequence[TorchWeight], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[b, s, R/2]` at i64 positions `[b, s]`.

    Raises:
        RequestError: The tables have no such position.
    """
    check_indices("rotary tables", positions.cpu().numpy(), tables[0].weight.shape[0])
    cos, sin = (functional.embedding(positions, t.dense()) for t in tables)
    return cos, sin


def positions_from(start: Tensor, rows: int) -> Tensor:
    """Positions of `rows` new rows: i64 `[b]` to `[b, rows]`."""
    return start.unsqueeze(1) + torch.arange(rows, device=start.device)


def write_rows(cache: Tensor, new: Tensor, start: Tensor) -> Tensor:
    """A copy of the cache with new rows `[b, s, kv_heads * D]` put at `start` and after.

    Raises:
        RequestError: The rows do not fit into the capacity.
    """
    batch, heads, capacity, width = cache.shape
    check_start(start.cpu().numpy(), new.shape[1], capacity)
    updated = cache.clone()
    sequence = torch.arange(batch, device=cache.device).unsqueeze(1)
    rows = positions_from(start, new.shape[1])
    updated.transpose(1, 2).index_put_((sequence, rows), torch.unflatten(new, -1, (heads, width)))
    return updated


def attend(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, length: Tensor, attrs: AttentionAttributes
) -> Tensor:
    """`scaled_dot_product_attention` of the last rows over all valid rows, with an explicit mask.

    Raises:
        RequestError: There are fewer valid rows than queries, or more than the caches hold.
    """
    check_length(length.cpu().numpy(), q.shape[1], k_cache.shape[2])
    longest = max(length.tolist(), default=0)
    column = torch.arange(longest, device=q.device)
    valid = column < length[:, None]  # [b, longest]
    seen = valid.unsqueeze(1).expand(-1, q.shape[1], -1)
    if attrs.causal:
        own = positions_from(length - q.shape[1], q.shape[1])
        seen = column <= own.unsqueeze(-1)
        if attrs.window is not None:
            seen = seen & (own.unsqueeze(-1) - column < attrs.window)
    # A mask does not keep garbage out: zero times infinity is no number.
    keys, values = (
        cache[:, :, :longest].masked_fill(~valid[:, None, :, None], 0)
        for cache in (k_cache, v_cache)
    )
    queries = torch.unflatten(q, -1, (attrs.heads, k_cache.shape[3])).transpose(1, 2)
    out = functional.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=seen.unsqueeze(1),
        scale=attrs.scale,
        enable_gqa=attrs.heads != attrs.kv_heads,
    )
    return out.transpose(1, 2).flatten(-2)


def rope(call: Call[RopeAttributes]) -> Tensor:
    """Look up, then `rotate`."""
    x, positions = call.operands
    return rotate(x, *look_up(call.weights, positions), call.attrs.heads)


def cache_update(call: Call[Attributes]) -> Tensor:
    """See `write_rows`."""
    cache, new, start = call.operands
    return write_rows(cache, new, start)


def attention(call: Call[AttentionAttributes]) -> Tensor:
    """See `attend`."""
    q, k_cache, v_cache, length = call.operands
    return attend(q, k_cache, v_cache, length, call.attrs)


def cached_attention(call: Call[AttentionAttributes]) -> tuple[Tensor, ...]:
    """Rotate, write, attend."""
    q, k, v, k_cache, v_cache, start = call.operands
    if call.weights:
        cos, sin = look_up(call.weights, positions_from(start, k.shape[1]))
        older = k.shape[1] - q.shape[1]
        k = rotate(k, cos, sin, call.attrs.kv_heads)
        q = rotate(q, cos[:, older:], sin[:, older:], call.attrs.heads)
    k_cache, v_cache = write_rows(k_cache, k, start), write_rows(v_cache, v, start)
    out = attend(q, k_cache, v_cache, start + k.shape[1], call.attrs)
    return out, k_cache, v_cache


def split_heads(call: Call[SplitHeadsAttributes]) -> tuple[Tensor, ...]:
    """`torch.split` of each head."""
    attrs = call.attrs
    heads = torch.unflatten(call.operands[0], -1, (attrs.heads, sum(attrs.sizes)))
    return tuple(p.flatten(-2) for p in torch.split(heads, list(attrs.sizes), dim=-1))


KERNELS: Mapping[str, Kernel] = {
    "split_heads": split_heads,
    "rope": rope,
    "cache_update": cache_update,
    "attention": attention,
    "cached_attention": cached_attention,
}
