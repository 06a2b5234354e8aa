"""Lowerings of the ops of vision encoders, and of models that read what they make."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from edgecc.backends.onnx.emitter import CONTRIB, Emitter, lowers
from edgecc.devices import Dialect
from edgecc.ir.core import Node
from edgecc.ir.ops.vision import (
    MergeRowsAttributes,
    MultiAxisRopeAttributes,
    MultiHeadAttentionAttributes,
)
from edgecc.ir.types import DType


@lowers("multi_axis_rope")
def multi_axis_rope(e: Emitter, node: Node) -> None:
    """`RotaryEmbedding-23` with the cosines and sines of each row, made once for all layers."""
    attrs = node.attrs
    assert isinstance(attrs, MultiAxisRopeAttributes)
    x, positions = e.operands(node)
    head_dim = int(str(node.result.type.shape[2])) // attrs.heads
    rotated = 2 * len(attrs.axes)
    e.result(
        node,
        "RotaryEmbedding",
        [x, *(_by_axis(e, node, symbol, positions, attrs.axes) for symbol in node.weights)],
        num_heads=attrs.heads,
        rotary_embedding_dim=0 if rotated == head_dim else rotated,
    )


def _by_axis(e: Emitter, node: Node, symbol: str, positions: str, axes: tuple[int, ...]) -> str:
    """`[b, s, R/2]`: of the table rows of all axes, each column from the row of its own axis.

    The others are multiplied by zero, which is exact: a table holds no infinities.
    """

    def make() -> str:
        count = int(str(node.operands[1].type.shape[0]))
        own = np.equal.outer(np.arange(count), np.array(axes)).astype(np.float32)
        mask = e.constant(own[:, None, None, :])
        (rows,) = e.op("Gather", [e.weight(symbol), positions], axis=0)
        (picked,) = e.op("Mul", [rows, mask])
        return e.op("ReduceSum", [picked, e.ints(0)], keepdims=0)[0]

    return e.once(("by axis", symbol, positions, axes), make)


@lowers("multi_head_attention", Dialect.ORT_CONTRIB)
def multi_head_attention(e: Emitter, node: Node) -> None:
    """`MultiHeadAttention`: its kernel never holds the scores of all rows at once."""
    attrs = node.attrs
    assert isinstance(attrs, MultiHeadAttentionAttributes)
    e.result(
        node,
        "MultiHeadAttention",
        e.operands(node),
        domain=CONTRIB,
        num_heads=attrs.heads,
        scale=attrs.scale,
    )


@lowers("multi_head_attention", Dialect.STANDARD)
def multi_head_attention_standard(e: Emitter, node: Node) -> None:
    """`Attention-24` without cache and mask."""
    attrs = node.attrs
    assert isinstance(attrs, MultiHeadAttentionAttributes)
    e.result(
        node,
        "Attention",
        e.operands(node),
        q_num_heads=attrs.heads,
        kv_num_heads=attrs.heads,
        scale=attrs.scale,
        is_causal=0,
    )


@lowers("merge_rows")
def merge_rows(e: Emitter, node: Node) -> None:
    """`Reshape`, with the number of rows left to it."""
    attrs = node.attrs
    assert isinstance(attrs, MergeRowsAttributes)
    (x,) = node.operands
    keep = [0] * (x.type.rank - 2)
    width = int(str(node.result.type.shape[-1]))
    e.result(node, "Reshape", [e.name(x), e.ints(*keep, -1, width)])


@lowers("replace_rows")
def replace_rows(e: Emitter, node: Node) -> None:
    """`Gather`, and `Where` to take its rows or those of x.

    A row of zeros in front of `rows` is what -1 reads, so that there may be no rows at all.
    """
    x, rows, index = e.operands(node)
    width = int(str(node.result.type.shape[2]))
    zero = e.constant(np.zeros((1, width), dtype=np.float32))
    (all_rows,) = e.op("Concat", [zero, rows], axis=0)
    one = e.constant(np.array(1, dtype=np.int64))
    (found,) = e.op("Gather", [all_rows, e.op("Add", [index, one])[0]], axis=0)
    (stays,) = e.op("Less", [index, e.constant(np.array(0, dtype=np.int64))])
    e.result(node, "Where", [e.op("Unsqueeze", [stays, e.ints(2)])[0], x, found])


@lowers("embedding_bag")
def embedding_bag(e: Emitter, node: Node) -> None:
    """`Gather`, `Mul` and `ReduceSum`; a 16-bit table is widened by rows."""
    ids, factors = e.operands(node)
    table = e.module.weights
    weight = table[table.resolve(node.weights[0])]
    (rows,) = e.op("Gather", [e.weight(node.weights[0]), ids], axis=0)
    if weight.encoding.components(weight.shape)["weight"].dtype is not DType.F32:
        (rows,) = e.op("Cast", [rows], to=TensorProto.FLOAT)
    (column,) = e.op("Unsqueeze", [factors, e.ints(-1)])
    (scaled,) = e.op("Mul", [rows, column])
    e.result(node, "ReduceSum", [scaled, e.ints(-2)], keepdims=0)
