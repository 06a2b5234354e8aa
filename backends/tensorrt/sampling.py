"""Lowering of token choice."""

from __future__ import annotations

from edgecc.backends.tensorrt.emitter import Emitter, lowers
from edgecc.backends.tensorrt.shape import cut
from edgecc.ir.core import Node
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.types import DType


@lowers("argmax")
def argmax(e: Emitter, node: Node) -> None:
    """`TopK` with k = 1, padding rows cut off before."""
    attrs = node.attrs
    assert isinstance(attrs, ArgmaxAttributes)
    value = node.operands[0]
    x, axis = e.value(value), value.type.rank - 1
    if attrs.limit != value.type.shape[-1]:
        x = cut(e, value, axis, 0, attrs.limit)
    top = e.layer("topk", e.network.add_topk(x, e.trt.TopKOperation.MAX, 1, 1 << axis))
    index = e.cast(top.get_output(1), DType.I64)
    e.result(node, e.reshape(index, node.result.type.shape))
