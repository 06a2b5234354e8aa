"""Choosing tokens: argmax and the sequential heads of block drafts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.ops.sampling import ArgmaxAttributes, MarkovChainAttributes


def argmax(call: Call[ArgmaxAttributes]) -> Tensor:
    """`torch.argmax`, which takes the first on a tie."""
    return call.operands[0][..., : call.attrs.limit].argmax(dim=-1)


def markov_chain(call: Call[MarkovChainAttributes]) -> tuple[Tensor, ...]:
    """Token after token; the low-rank matrix is read once for all steps."""
    base, token = call.operands
    table, up = call.weights[0], call.weights[1].dense()
    tokens, logits, embeddings = [], [], []
    for slot in base.unbind(dim=1)[: call.attrs.steps]:
        embedding = table.rows(token)
        biased = torch.addmm(slot, embedding, up.T)
        token = biased[:, : call.attrs.limit].argmax(dim=-1)
        tokens.append(token)
        logits.append(biased)
        embeddings.append(embedding)
    return torch.stack(tokens, 1), torch.stack(logits, 1), torch.stack(embeddings, 1)


KERNELS: Mapping[str, Kernel] = {"argmax": argmax, "markov_chain": markov_chain}
