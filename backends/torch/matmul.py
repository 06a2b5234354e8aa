"""Products with weights and rows of tables: linear layers, embeddings, maps between ids."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.ops import Attributes
from edgecc.ir.ops.base import check_indices


def linear(call: Call[Attributes]) -> Tensor:
    """`torch.nn.functional.linear`, one block of weight rows after the other."""
    (x,) = call.operands
    weight, *more = call.weights
    bias = more[0].dense() if more else None
    pieces = [
        functional.linear(x, block, None if bias is None else bias[start:stop])
        for start, stop, block in weight.blocks()
    ]
    return torch.cat(pieces, dim=-1)


def embedding(call: Call[Attributes]) -> Tensor:
    """Rows of the table."""
    (ids,) = call.operands
    return call.weights[0].rows(ids)


def lookup(call: Call[Attributes]) -> Tensor:
    """Entries of the table, which is small and taken whole.

    Raises:
        RequestError: There is no such entry.
    """
    (ids,) = call.operands
    weight = call.weights[0]
    check_indices(f"table @{weight.symbol}", ids.cpu().numpy(), weight.weight.shape[0])
    return weight.dense()[ids]


KERNELS: Mapping[str, Kernel] = {"linear": linear, "embedding": embedding, "lookup": lookup}
