"""Lowerings of the ops of vision encoders, and of models that read what they make."""

from __future__ import annotations

import numpy as np

from edgecc.backends.tensorrt.attention import heads_first
from edgecc.backends.tensorrt.emitter import Emitter, Tensor, lowers
from edgecc.backends.tensorrt.weights import table
from edgecc.ir.core import Node
from edgecc.ir.ops.vision import (
    MergeRowsAttributes,
    MultiAxisRopeAttributes,
    MultiHeadAttentionAttributes,
)
from edgecc.ir.types import DType


@lowers("multi_axis_rope")
def multi_axis_rope(e: Emitter, node: Node) -> None:
    """A rotary embedding layer in float32, with the cosines and sines of each row."""
    attrs = node.attrs
    assert isinstance(attrs, MultiAxisRopeAttributes)
    (value, _), shape = node.operands, node.result.type.shape
    width = int(str(shape[2])) // attrs.heads
    x = e.cast(heads_first(e, e.value(value), shape, attrs.heads, width), DType.F32)
    cos, sin = (_by_axis(e, node, symbol, attrs.axes) for symbol in node.weights)
    layer = e.network.add_rotary_embedding(x, cos, sin, False, 2 * len(attrs.axes))
    turned = e.cast(e.out("rope", layer), value.type.dtype)
    e.result(node, e.reshape(e.transpose(turned, (0, 2, 1, 3)), shape))


def _by_axis(e: Emitter, node: Node, symbol: str, axes: tuple[int, ...]) -> Tensor:
    """`[b, s, R/2]`: of the table rows of all axes, each column from the row of its own axis."""
    positions = node.operands[1]

    def make() -> Tensor:
        count = int(str(positions.type.shape[0]))
        own = np.equal.outer(np.arange(count), np.array(axes)).astype(np.float32)
        rows = e.out("gather", e.network.add_gather(table(e, symbol), e.value(positions), 0))
        picked = e.binary("PROD", rows, e.constant(own[:, None, None, :]))
        return e.out("sum", e.network.add_reduce(picked, e.trt.ReduceOperation.SUM, 1, False))

    return e.once(("by axis", symbol, positions, axes), make)


@lowers("multi_head_attention")
def multi_head_attention(e: Emitter, node: Node) -> None:
    """An attention layer without a mask; queries are scaled before, in float32."""
    attrs = node.attrs
    assert isinstance(attrs, MultiHeadAttentionAttributes)
    shape, dtype = node.result.type.shape, node.result.type.dtype
    width = int(str(shape[2])) // attrs.heads
    q, k, v = (heads_first(e, x, shape, attrs.heads, width) for x in e.operands(node))
    scale = e.constant(np.full((1, 1, 1, 1), attrs.scale, dtype=np.float32))
    q = e.cast(e.binary("PROD", e.cast(q, DType.F32), scale), dtype)
    kinds = e.trt.AttentionNormalizationOp.SOFTMAX, e.trt.CausalMaskKind.NONE
    layer = e.layer("attention", e.network.add_attention_v2(q, k, v, *kinds))
    layer.decomposable = True  # where no fused kernel takes the shape or type
    e.result(node, e.reshape(e.transpose(layer.get_output(0), (0, 2, 1, 3)), shape))


@lowers("merge_rows")
def merge_rows(e: Emitter, node: Node) -> None:
    """A reshape."""
    assert isinstance(node.attrs, MergeRowsAttributes)
    (x,) = e.operands(node)
    e.result(node, e.reshape(x, node.result.type.shape))


@lowers("replace_rows")
def replace_rows(e: Emitter, node: Node) -> None:
    """A gather from the rows, with a row of zeros in front for -1, and a selection."""
    value, _, index = node.operands
    x, rows, where = e.operands(node)
    batch, count, width = value.type.shape
    zero = np.zeros((1, int(str(width))), dtype=value.type.dtype.numpy)
    joined = e.layer("concat", e.network.add_concatenation([e.constant(zero), rows]))
    joined.axis = 0
    one, nothing = (e.constant(np.full((1, 1), n, dtype=np.int64)) for n in (1, 0))
    shifted = e.binary("SUM", where, one)
    found = e.out("gather", e.network.add_gather(joined.get_output(0), shifted, 0))
    stays = e.binary("LESS", where, nothing)
    stays = e.reshape(stays, (batch, count, 1))
    assert index.type.shape == (batch, count)
    e.result(node, e.out("select", e.network.add_select(stays, x, found)))


@lowers("embedding_bag")
def embedding_bag(e: Emitter, node: Node) -> None:
    """A gather of rows, which are widened, weighted and added up."""
    ids, factors = e.operands(node)
    shape = node.operands[0].type.shape
    rows = e.out("gather", e.network.add_gather(table(e, node.weights[0]), ids, 0))
    rows = e.cast(rows, DType.F32)
    scaled = e.binary("PROD", rows, e.reshape(factors, (*shape, 1)))
    kind = e.trt.ReduceOperation.SUM
    axes = 1 << (len(shape) - 1)
    e.result(node, e.out("sum", e.network.add_reduce(scaled, kind, axes, False)))
