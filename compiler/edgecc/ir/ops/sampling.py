"""Choosing tokens: argmax and the sequential heads of block drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgecc.ir.encodings import Array
from edgecc.ir.ops.base import (
    Attributes,
    EvalContext,
    Op,
    Scope,
    WeightView,
    require,
    require_equal,
    require_float,
    require_type,
)
from edgecc.ir.ops.matmul import product
from edgecc.ir.types import DType, TensorType
from edgecc.ir.weights import Weight


@dataclass(frozen=True, slots=True)
class ArgmaxAttributes(Attributes):
    """`limit`: only the first `limit` elements take part (padding rows of a vocabulary do not)."""

    limit: int


@dataclass(frozen=True, slots=True)
class MarkovChainAttributes(Attributes):
    """`steps`: tokens to propose. `limit`: see `argmax`."""

    steps: int
    limit: int


class Argmax(Op[ArgmaxAttributes]):
    """Index of the largest of the first `limit` elements of the last axis, i64; first on a tie."""

    name = "argmax"
    attributes = ArgmaxAttributes
    operands = ("x",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: ArgmaxAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The last axis disappears."""
        (x,) = operands
        require_float("x", x)
        width = x.shape[-1] if x.rank else 0
        require(
            isinstance(width, int) and 0 < attrs.limit <= width,
            f"limit {attrs.limit} is outside the last axis of {x}",
        )
        return (TensorType(DType.I64, x.shape[:-1]),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: ArgmaxAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """`numpy.argmax`."""
        return (np.argmax(operands[0][..., : attrs.limit], axis=-1).astype(np.int64),)


class MarkovChain(Op[MarkovChainAttributes]):
    """The vanilla Markov head of DSpark: proposes tokens one after the other from block logits.

    Operands: base logits f32 `[b, B, V]` and the anchor i64 `[b]`. Weights: `w1` `[V, r]`, indexed
    by the previous token, and `w2` `[V, r]`. For j in 0..steps-1, with prev_0 the anchor:
    `e_j = w1[prev_j]`, `logits_j = base_j + e_j w2^T`, `token_j = argmax(logits_j)`, and prev_{j+1}
    is token_j. Results: tokens i64 `[b, steps]`, logits f32 `[b, steps, V]`, embeddings e f32
    `[b, steps, r]` (the confidence head reads them). Source: DeepSpec's DSpark reference, section
    "Markov head" of the paper (arXiv 2607.05147).
    """

    name = "markov_chain"
    attributes = MarkovChainAttributes
    operands = ("base_logits", "anchor")
    weights = ("w1", "w2")
    results = ("tokens", "logits", "embeddings")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: MarkovChainAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """See the class."""
        base, anchor = operands
        require_type("base_logits", base, DType.F32, rank=3)
        require_type("anchor", anchor, DType.I64, rank=1)
        require_equal("batch of the anchor", anchor.shape[0], base.shape[0])
        w1, w2 = weights
        require_equal("ranks of w1 and w2", (len(w1.shape), len(w2.shape)), (2, 2))
        require_equal("rank of the Markov head (columns of w2)", w2.shape[1], w1.shape[1])
        require_equal("rows of w2 (vocabulary of the logits)", w2.shape[0], base.shape[2])
        slots = base.shape[1]
        require(
            isinstance(slots, int) and 0 < attrs.steps <= slots,
            f"steps {attrs.steps} is outside the {slots} slots of the block",
        )
        require(0 < attrs.limit <= w2.shape[0], f"limit {attrs.limit} is outside the vocabulary")
        b = base.shape[0]
        return (
            TensorType(DType.I64, (b, attrs.steps)),
            TensorType(base.dtype, (b, attrs.steps, w2.shape[0])),
            TensorType(base.dtype, (b, attrs.steps, w1.shape[1])),
        )

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: MarkovChainAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """The loop, literally."""
        base, previous = operands
        tokens, logits, embeddings = [], [], []
        for step in range(attrs.steps):
            embedding = weights[0].rows(previous)
            biased = base[:, step] + product(embedding, weights[1])
            previous = np.argmax(biased[:, : attrs.limit], axis=-1).astype(np.int64)
            tokens.append(previous)
            logits.append(biased)
            embeddings.append(embedding)
        return np.stack(tokens, 1), np.stack(logits, 1), np.stack(embeddings, 1)


OPS = (Argmax(), MarkovChain())
