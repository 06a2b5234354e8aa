"""Lowerings of normalizations: primitives in float32, there is no layer for them."""

from __future__ import annotations

import numpy as np

from edgecc.backends.tensorrt.emitter import Emitter, Tensor, lowers
from edgecc.backends.tensorrt.weights import table
from edgecc.ir.core import Node
from edgecc.ir.ops.norm import AddRmsNormAttributes, LayerNormAttributes, RmsNormAttributes
from edgecc.ir.types import DType


@lowers("rms_norm")
def rms_norm(e: Emitter, node: Node) -> None:
    """`x / sqrt(mean(x^2) + eps) * w`, between two reshapes when the last axis has groups."""
    attrs = node.attrs
    assert isinstance(attrs, RmsNormAttributes)
    (x,) = e.operands(node)
    *lead, width = node.result.type.shape
    weight = table(e, node.weights[0])
    if attrs.groups > 1:
        x = e.reshape(x, (*lead, attrs.groups, int(str(width)) // attrs.groups))
    y = _normalize(e, x, weight, attrs.eps, len(lead) + (attrs.groups > 1))
    if attrs.groups > 1:
        y = e.reshape(y, node.result.type.shape)
    e.result(node, e.cast(y, node.result.type.dtype))


@lowers("add_rms_norm")
def add_rms_norm(e: Emitter, node: Node) -> None:
    """The sum, then the normalization of it."""
    attrs = node.attrs
    assert isinstance(attrs, AddRmsNormAttributes)
    normed, total = node.results
    both = e.binary("SUM", *e.operands(node))
    y = _normalize(e, both, table(e, node.weights[0]), attrs.eps, total.type.rank - 1)
    e.result(node, e.cast(y, normed.type.dtype), both)


@lowers("layer_norm")
def layer_norm(e: Emitter, node: Node) -> None:
    """`(x - mean) / sqrt(variance + eps) * w + bias` in float32."""
    attrs = node.attrs
    assert isinstance(attrs, LayerNormAttributes)
    (x,) = e.operands(node)
    axis = node.result.type.rank - 1
    x = e.cast(x, DType.F32)
    average = e.trt.ReduceOperation.AVG
    mean = e.out("mean", e.network.add_reduce(x, average, 1 << axis, True))
    centered = e.binary("SUB", x, mean)
    weight, bias = (e.cast(table(e, w), DType.F32) for w in node.weights)
    # What is left has no mean, so its root mean square is the deviation.
    y = _normalize(e, centered, weight, attrs.eps, axis)
    y = e.binary("SUM", y, _broadcast(e, bias, axis))
    e.result(node, e.cast(y, node.result.type.dtype))


def _normalize(e: Emitter, x: Tensor, weight: Tensor, eps: float, axis: int) -> Tensor:
    """Float32 result over the last axis, whose number is `axis`."""
    x = e.cast(x, DType.F32)
    square = e.binary("PROD", x, x)
    mean = e.reduce("AVG", square, axis)
    ones = (1,) * (axis + 1)
    floor = e.constant(np.full(ones, eps, dtype=np.float32))
    root = e.unary("SQRT", e.binary("SUM", mean, floor))
    shaped = e.once(("broadcast", weight.name, axis), lambda: _broadcast(e, weight, axis))
    return e.binary("PROD", e.binary("DIV", x, root), shaped)


def _broadcast(e: Emitter, weight: Tensor, axis: int) -> Tensor:
    return e.reshape(weight, (*(1,) * axis, weight.shape[0]))
