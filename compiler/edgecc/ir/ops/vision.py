"""Ops of vision encoders, and of language models that read what they make.

Rows of an image are its patches. Nothing is kept between calls: all rows of an image are there at
once, and each sees all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgecc.ir.encodings import Array
from edgecc.ir.ops.attention import check_tables, look_up, rotate
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
from edgecc.ir.types import Dim, DimExpr, DType, TensorType
from edgecc.ir.weights import Weight


@dataclass(frozen=True, slots=True)
class MultiAxisRopeAttributes(Attributes):
    """`heads` of x. `axes`: for each frequency, which axis of the positions it turns with."""

    heads: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MultiHeadAttentionAttributes(Attributes):
    """`heads`, and the `scale` of the scores."""

    heads: int
    scale: float


@dataclass(frozen=True, slots=True)
class MergeRowsAttributes(Attributes):
    """`count`: how many rows become one."""

    count: int


class MultiAxisRope(Op[MultiAxisRopeAttributes]):
    """Rotary embedding by positions on several axes: x `[b, s, heads * D]`, i64 `[A, b, s]`.

    Like `rope`, but frequency j turns with the position on axis `axes[j]`: rows and columns of an
    image (axial), or time, row and column of a multimodal token (M-RoPE). The tables `cos` and
    `sin` are f32 `[positions, R/2]`; R <= D dims are rotated.
    """

    name = "multi_axis_rope"
    attributes = MultiAxisRopeAttributes
    operands = ("x", "positions")
    weights = ("cos", "sin")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: MultiAxisRopeAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of x."""
        x, positions = operands
        require_float("x", x)
        require_type("x", x, rank=3)
        require_type("positions", positions, DType.I64, rank=3)
        require_equal("rows of positions", positions.shape[1:], x.shape[:2])
        _require_heads("x", x, attrs.heads)
        check_tables(weights, int(str(x.shape[2])) // attrs.heads)
        require_equal("frequencies in axes", len(attrs.axes), weights[0].shape[1])
        count = positions.shape[0]
        require(
            isinstance(count, int) and all(0 <= axis < count for axis in attrs.axes),
            f"axes {attrs.axes} must be below the {count} axes of positions",
        )
        return (x,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: MultiAxisRopeAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """The column of each frequency from the table row of its own axis, then `rotate`."""
        x, positions = operands
        axes = np.array(attrs.axes, dtype=np.int64)
        cos, sin = (
            np.moveaxis(table[axes, ..., np.arange(len(axes))], 0, -1)
            for table in look_up(weights, positions)
        )
        return (rotate(x, cos, sin, attrs.heads),)


class MultiHeadAttention(Op[MultiHeadAttentionAttributes]):
    """Softmax attention of all rows over all rows of a sequence: no cache, no mask.

    q, k and v are `[b, s, heads * D]`. Scores are `scale * q k`.
    """

    name = "multi_head_attention"
    attributes = MultiHeadAttentionAttributes
    operands = ("q", "k", "v")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: MultiHeadAttentionAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of q."""
        q, k, v = operands
        require_float("q", q)
        require_type("q", q, rank=3)
        require(q == k == v, f"q, k and v must have one type, got {q}, {k}, {v}")
        _require_heads("q", q, attrs.heads)
        return (q,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: MultiHeadAttentionAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """One query row at a time."""
        q, k, v = (_heads(x, attrs.heads) for x in operands)
        out = np.empty_like(q)
        for row in np.ndindex(q.shape[:2]):
            scores = np.einsum("hd,nhd->hn", q[row], k[row[0]]) * q.dtype.type(attrs.scale)
            shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
            shares /= shares.sum(axis=-1, keepdims=True)
            out[row] = np.einsum("hn,nhd->hd", shares, v[row[0]])
        return (out.reshape(operands[0].shape),)


class MergeRows(Op[MergeRowsAttributes]):
    """Each `count` rows side by side as one: `[..., count * s, H]` gives `[..., s, count * H]`."""

    name = "merge_rows"
    attributes = MergeRowsAttributes
    operands = ("x",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: MergeRowsAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """Fewer and wider rows."""
        (x,) = operands
        require(x.rank >= 2, f"x must have at least two axes, got {x}")
        require(attrs.count > 0, f"count must be positive, got {attrs.count}")
        *lead, rows, width = x.shape
        return (TensorType(x.dtype, (*lead, _quotient(rows, attrs.count), width * attrs.count)),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: MergeRowsAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """A reshape."""
        *lead, rows, width = operands[0].shape
        return (operands[0].reshape(*lead, rows // attrs.count, width * attrs.count),)


class ReplaceRows(Op[Attributes]):
    """Some rows of x taken from elsewhere: x `[b, s, H]`, rows `[n, H]`, index i64 `[b, s]`.

    Row i of the result is `rows[index[i]]`, or row i of x where the index is -1. This is how image
    features take the places of their placeholder tokens.
    """

    name = "replace_rows"
    operands = ("x", "rows", "index")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of x."""
        x, rows, index = operands
        require_float("x", x)
        require_type("x", x, rank=3)
        require_type("rows", rows, x.dtype, rank=2)
        require_type("index", index, DType.I64, rank=2)
        require_equal("width of rows", rows.shape[1], x.shape[2])
        require_equal("axes of index", index.shape, x.shape[:2])
        return (x,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """A copy of x with rows put in; indices out of range raise."""
        x, rows, index = operands
        check_indices("replace_rows", index + 1, rows.shape[0] + 1)
        out = x.copy()
        out[index >= 0] = rows[index[index >= 0]]
        return (out,)


class EmbeddingBag(Op[Attributes]):
    """Weighted sum of table rows: ids i64 `[..., k]`, factors f32 `[..., k]`, table `[V, H]`.

    The result is f32 `[..., H]`: `sum_k factors[k] * table[ids[k]]`. With four neighbours and their
    bilinear weights it resamples a grid of learned position embeddings.
    """

    name = "embedding_bag"
    operands = ("ids", "factors")
    weights = ("table",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """`[..., k] -> [..., H]`."""
        ids, factors = operands
        require_type("ids", ids, DType.I64)
        require_type("factors", factors, DType.F32)
        require(ids.rank >= 1, f"ids must have at least one axis, got {ids}")
        require_equal("shape of factors", factors.shape, ids.shape)
        require_equal("rank of the table", len(weights[0].shape), 2)
        return (TensorType(DType.F32, (*ids.shape[:-1], weights[0].shape[1])),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Reads only the rows that occur; adds them in order."""
        ids, factors = operands
        total = np.zeros((*ids.shape[:-1], weights[0].weight.shape[1]), dtype=factors.dtype)
        for i in range(ids.shape[-1]):
            total += weights[0].rows(ids[..., i]) * factors[..., i, None]
        return (total,)


def _require_heads(what: str, x: TensorType, heads: int) -> None:
    width = x.shape[-1]
    require(
        isinstance(width, int) and heads > 0 and width % heads == 0,
        f"the last axis of {what} {x} must divide into {heads} heads",
    )


def _heads(x: Array, heads: int) -> Array:
    """`[b, s, heads * D]` to `[b, s, heads, D]`."""
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads)


def _quotient(dim: Dim, count: int) -> Dim:
    """A dimension divided by a number, which must leave no rest whatever its symbols are."""
    numbers = [dim] if isinstance(dim, int) else [dim.constant, *(c for _, c in dim.terms)]
    require(all(n % count == 0 for n in numbers), f"{dim} rows do not divide by {count}")
    if isinstance(dim, int):
        return dim // count
    return DimExpr(tuple((s, c // count) for s, c in dim.terms), dim.constant // count)


OPS = (MultiAxisRope(), MultiHeadAttention(), MergeRows(), ReplaceRows(), EmbeddingBag())
