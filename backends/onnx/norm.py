"""Lowering of normalizations."""

from __future__ import annotations

from edgecc.backends.onnx.emitter import Emitter, lowers
from edgecc.ir.core import Node
from edgecc.ir.ops.norm import RmsNormAttributes


@lowers("rms_norm")
def rms_norm(e: Emitter, node: Node) -> None:
    """`RMSNormalization`, around two reshapes when the last axis has groups."""
    attrs = node.attrs
    assert isinstance(attrs, RmsNormAttributes)
    (x,) = e.operands(node)
    weight = e.weight(node.weights[0])
    if attrs.groups == 1:
        e.result(node, "RMSNormalization", [x, weight], axis=-1, epsilon=attrs.eps)
        return
    keep = [0] * (node.result.type.rank - 1)
    (grouped,) = e.op("Reshape", [x, e.ints(*keep, attrs.groups, -1)])
    (normed,) = e.op("RMSNormalization", [grouped, weight], axis=-1, epsilon=attrs.eps)
    e.result(node, "Reshape", [normed, e.ints(*keep, -1)])
