"""Lowerings of products with weights and rows of tables."""

from __future__ import annotations

from edgecc.backends.tensorrt.emitter import Emitter, lowers
from edgecc.backends.tensorrt.operands import product_type
from edgecc.backends.tensorrt.quantization import quantized
from edgecc.backends.tensorrt.shape import as_rows
from edgecc.backends.tensorrt.weights import matrix, table
from edgecc.ir.core import Node
from edgecc.ir.types import DType


@lowers("linear")
def linear(e: Emitter, node: Node) -> None:
    """A matrix multiplication in the type of the result, then what scales a whole side of it.

    Packed weights are widened by dequantize layers, which kernels take in. What cannot be applied
    there without rounding (the global scale of NVFP4, the scale of quantized activations)
    multiplies the product in float32.
    """
    dtype, value = node.result.type.dtype, node.operands[0]
    packed = quantized(e, value)
    inner = DType.F32 if packed else product_type(e.module, node.weights[0], dtype)
    x, scale = packed or (e.cast(as_rows(e, value), inner), None)
    weight, factor = matrix(e, node.weights[0], inner, packed=packed is not None)
    y = e.matmul(x, weight, transpose_b=True)
    for outer in (scale, factor):
        if outer is not None:
            y = e.binary("PROD", e.cast(y, DType.F32), outer)
    if len(node.weights) > 1:
        bias = e.reshape(table(e, node.weights[1]), (1, node.result.type.shape[-1]))
        y = e.binary("SUM", e.cast(y, DType.F32), bias)
    y = e.cast(y, dtype)
    e.result(node, y if value.type.rank == 2 else e.reshape(y, node.result.type.shape))


@lowers("embedding")
def embedding(e: Emitter, node: Node) -> None:
    """A gather of rows, which are widened afterwards."""
    (ids,) = e.operands(node)
    rows = e.out("gather", e.network.add_gather(table(e, node.weights[0]), ids, 0))
    e.result(node, e.cast(rows, node.result.type.dtype))


@lowers("lookup")
def lookup(e: Emitter, node: Node) -> None:
    """A gather from a vector."""
    (ids,) = e.operands(node)
    e.result(node, e.out("gather", e.network.add_gather(table(e, node.weights[0]), ids, 0)))
