"""Lowerings of products with weights and rows of tables."""

from __future__ import annotations

from collections.abc import Sequence

from edgecc.backends.tensorrt.emitter import Emitter, lowers
from edgecc.backends.tensorrt.weights import matrix, table
from edgecc.ir.core import Node
from edgecc.ir.types import Dim, DType


@lowers("linear")
def linear(e: Emitter, node: Node) -> None:
    """A matrix multiplication in the type of the result, then what scales the whole weight.

    Packed weights are widened by dequantize layers, which kernels take in. What cannot be applied
    there without rounding (the global scale of NVFP4) multiplies the product in float32.
    """
    dtype = node.result.type.dtype
    *lead, width = node.operands[0].type.shape
    rows = node.result.type.shape[-1]
    (x,) = e.operands(node)
    flat = len(lead) != 1
    if flat:
        x = e.reshape(x, (_product(e, lead), width))
    weight, factor = matrix(e, node.weights[0], dtype)
    y = e.matmul(x, weight, transpose_b=True)
    if factor is not None:
        y = e.binary("PROD", e.cast(y, DType.F32), factor)
    if len(node.weights) > 1:
        bias = e.reshape(table(e, node.weights[1]), (1, rows))
        y = e.binary("SUM", e.cast(y, DType.F32), bias)
    y = e.cast(y, dtype)
    e.result(node, e.reshape(y, node.result.type.shape) if flat else y)


def _product(e: Emitter, lead: Sequence[Dim]) -> Dim:
    """Number of rows: a number where all sizes are, else left to the reshape."""
    total = 1
    for dim in lead:
        size = e.size(dim)
        if not isinstance(size, int):
            return size
        total *= size
    return total


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
