"""Ops of vision encoders, and of language models that read what they make."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from edgecc.backends.torch.attention import look_up, rotate
from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.ops import Attributes
from edgecc.ir.ops.base import check_indices
from edgecc.ir.ops.vision import (
    MergeRowsAttributes,
    MultiAxisRopeAttributes,
    MultiHeadAttentionAttributes,
)


def multi_axis_rope(call: Call[MultiAxisRopeAttributes]) -> Tensor:
    """The tables of all axes, of which `gather` picks one for each frequency."""
    x, positions = call.operands
    axes = torch.tensor(call.attrs.axes, device=x.device).expand(1, *x.shape[:2], -1)
    cos, sin = (t.gather(0, axes).squeeze(0) for t in look_up(call.weights, positions))
    return rotate(x, cos, sin, call.attrs.heads)


def multi_head_attention(call: Call[MultiHeadAttentionAttributes]) -> Tensor:
    """`scaled_dot_product_attention` without a mask."""
    heads = call.attrs.heads
    q, k, v = (
        torch.unflatten(x, -1, (heads, x.shape[-1] // heads)).transpose(1, 2) for x in call.operands
    )
    out = functional.scaled_dot_product_attention(q, k, v, scale=call.attrs.scale)
    return out.transpose(1, 2).flatten(-2)


def merge_rows(call: Call[MergeRowsAttributes]) -> Tensor:
    """Rows in groups, flattened."""
    (x,) = call.operands
    count = call.attrs.count
    return torch.unflatten(x, -2, (x.shape[-2] // count, count)).flatten(-2)


def replace_rows(call: Call[Attributes]) -> Tensor:
    """Rows of both, the second ones picked where the index is not -1.

    Raises:
        RequestError: An index is out of range.
    """
    x, rows, index = call.operands
    check_indices("replace_rows", index.cpu().numpy() + 1, rows.shape[0] + 1)
    picked = index >= 0
    return x.index_put(torch.where(picked), rows[index[picked]])


def embedding_bag(call: Call[Attributes]) -> Tensor:
    """`torch.nn.functional.embedding_bag` with weights, over the rows that occur."""
    ids, factors = call.operands
    table = call.weights[0]
    rows = table.rows(ids.reshape(-1))
    bags = torch.arange(rows.shape[0], device=ids.device).reshape(-1, ids.shape[-1])
    total = functional.embedding_bag(
        bags, rows, mode="sum", per_sample_weights=factors.reshape(bags.shape)
    )
    return total.reshape(*ids.shape[:-1], table.weight.shape[1])


KERNELS: Mapping[str, Kernel] = {
    "multi_axis_rope": multi_axis_rope,
    "multi_head_attention": multi_head_attention,
    "merge_rows": merge_rows,
    "replace_rows": replace_rows,
    "embedding_bag": embedding_bag,
}
