"""Lowering of token choice."""

from __future__ import annotations

from edgecc.backends.onnx.emitter import Emitter, lowers
from edgecc.ir.core import Node
from edgecc.ir.ops.sampling import ArgmaxAttributes


@lowers("argmax")
def argmax(e: Emitter, node: Node) -> None:
    """`ArgMax` (first index on a tie), padding rows cut off before."""
    attrs = node.attrs
    assert isinstance(attrs, ArgmaxAttributes)
    (x,) = e.operands(node)
    if attrs.limit != node.operands[0].type.shape[-1]:
        (x,) = e.op("Slice", [x, e.ints(0), e.ints(attrs.limit), e.ints(-1)])
    e.result(node, "ArgMax", [x], axis=-1, keepdims=0)
