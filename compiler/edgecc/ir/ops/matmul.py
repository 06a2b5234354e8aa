"""Products with weights and rows of tables: linear layers, embeddings, maps between ids."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from edgecc.ir.encodings import Array, Dense
from edgecc.ir.ops.base import (
    Attributes,
    EvalContext,
    Op,
    Scope,
    Trait,
    WeightView,
    require,
    require_equal,
    require_float,
    require_type,
)
from edgecc.ir.types import DType, TensorType
from edgecc.ir.weights import Weight

_PRODUCT_BYTES = 1 << 20
"""Float32 bytes of the weight rows that are multiplied together: they stay in a core's cache until
the last row of x has been. From 2 MB on, OpenBLAS divides each product among all cores, and where
other work runs on those, waiting takes 10 to 30 times as long as the product (measured)."""


def product(x: Array, weight: WeightView) -> Array:
    """`x @ weight.T`, streaming blocks of weight rows, one row of x at a time.

    Args:
        x: `[..., K]`.
        weight: `[N, K]`, any encoding.

    Returns:
        `[..., N]`. Each row is its own matrix-vector product, so its bits do not depend on the
        other rows (a matrix-matrix product may sum in another order).
    """
    # Not -1: NumPy cannot tell how many rows of no columns there are.
    rows = np.ascontiguousarray(x.reshape(prod(x.shape[:-1]), x.shape[-1]))
    out = np.empty((rows.shape[0], weight.weight.shape[0]), dtype=x.dtype)
    for start, stop, block in weight.blocks(_PRODUCT_BYTES):
        for i, row in enumerate(rows):
            out[i, start:stop] = np.resize(block @ row, stop - start)
    return out.reshape(*x.shape[:-1], out.shape[1])


class Linear(Op[Attributes]):
    """`y = x W^T + b`: f32 `[..., K]` with a weight `[N, K]` of any encoding gives `[..., N]`.

    The weight's encoding decides the kernel; the values are those of its exact dequantization.
    The optional bias is `[N]`.
    """

    name = "linear"
    operands = ("x",)
    weights = ("weight", "bias?")
    traits = Trait.ROWWISE

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """`[..., K] x [N, K] -> [..., N]`."""
        (x,) = operands
        require_float("x", x)
        require(x.rank >= 1, f"x must have at least one axis, got {x}")
        require_equal("rank of the weight", len(weights[0].shape), 2)
        rows, columns = weights[0].shape
        require_equal("columns of the weight (last axis of x)", columns, x.shape[-1])
        if len(weights) > 1:
            require_equal("shape of the bias", weights[1].shape, (rows,))
        return (TensorType(x.dtype, (*x.shape[:-1], rows)),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Row by row, see `product`."""
        y = product(operands[0], weights[0])
        return (y + weights[1].dense() if len(weights) > 1 else y,)


class Embedding(Op[Attributes]):
    """Rows of a table: i64 ids `[...]` and a table `[V, H]` of any encoding give f32 `[..., H]`."""

    name = "embedding"
    operands = ("ids",)
    weights = ("table",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """`[...] -> [..., H]`."""
        require_type("ids", operands[0], DType.I64)
        require_equal("rank of the table", len(weights[0].shape), 2)
        return (TensorType(DType.F32, (*operands[0].shape, weights[0].shape[1])),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Reads only the rows that occur."""
        return (weights[0].rows(operands[0]),)


class Lookup(Op[Attributes]):
    """Entries of an integer table: i64 ids `[...]` and a dense i64 table `[V]` give i64 `[...]`.

    Maps ids of one vocabulary to those of another, for example of a reduced draft vocabulary to the
    target's.
    """

    name = "lookup"
    operands = ("ids",)
    weights = ("table",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of the ids."""
        (ids,) = operands
        require_type("ids", ids, DType.I64)
        require_equal("rank of the table", len(weights[0].shape), 1)
        require_equal("encoding of the table", weights[0].encoding, Dense(DType.I64))
        return (ids,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Reads only the entries that occur."""
        return (weights[0].rows(operands[0]).astype(np.int64),)


OPS = (Linear(), Embedding(), Lookup())
