"""Lowerings of products with weights and rows of tables."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from edgecc.backends.onnx.emitter import CONTRIB, Emitter, lowers
from edgecc.devices import Dialect
from edgecc.ir.core import Node
from edgecc.ir.encodings import Int8Block
from edgecc.ir.types import DType


@lowers("linear", Dialect.ORT_CONTRIB)
def linear(e: Emitter, node: Node) -> None:
    """`FusedMatMul` with the weight as stored, `[N, K]`; `MatMulNBits` for 8-bit codes."""
    table = e.module.weights
    weight = table[table.resolve(node.weights[0])]
    (x,) = e.operands(node)
    if isinstance(weight.encoding, Int8Block):
        y = _split_product(e, node, x)
    else:
        (y,) = e.op("FusedMatMul", [x, e.weight(node.weights[0])], domain=CONTRIB, transB=1)
    _finish(e, node, y)


@lowers("linear", Dialect.STANDARD)
def linear_standard(e: Emitter, node: Node) -> None:
    """`MatMul` with the transposed weight; engines fold the transposition when they load."""
    weight = e.weight(node.weights[0])
    transposed = e.once(("transposed", weight), lambda: e.op("Transpose", [weight], perm=[1, 0])[0])
    (y,) = e.op("MatMul", [e.operands(node)[0], transposed])
    _finish(e, node, y)


@lowers("embedding")
def embedding(e: Emitter, node: Node) -> None:
    """`Gather`, then the rows are widened: a 16-bit table stays mapped from its file."""
    (ids,) = e.operands(node)
    table = e.module.weights
    weight = table[table.resolve(node.weights[0])]
    inputs = [e.weight(node.weights[0]), ids]
    if weight.encoding.components(weight.shape)["weight"].dtype is DType.F32:
        e.result(node, "Gather", inputs, axis=0)
        return
    (rows,) = e.op("Gather", inputs, axis=0)
    e.result(node, "Cast", [rows], to=TensorProto.FLOAT)


@lowers("lookup")
def lookup(e: Emitter, node: Node) -> None:
    """`Gather` from a vector."""
    e.result(node, "Gather", [e.weight(node.weights[0]), *e.operands(node)], axis=0)


def _finish(e: Emitter, node: Node, y: str) -> None:
    """Name the product after the result, with the bias added if there is one."""
    if len(node.weights) > 1:
        e.result(node, "Add", [y, e.weight(node.weights[1])])
    else:
        e.rename_last(y, e.name(node.result))


def _split_product(e: Emitter, node: Node, x: str) -> str:
    """`x W^T` with x as the sum of two 8-bit parts per block.

    The kernel rounds activations to 8 bits; given the two parts, that only touches the smaller one
    (relative error 2e-5 instead of 5e-3). high = round(x / s) * s with s = max|x| / 127 over each
    block of 16, low = x - high; both are rows of one product, which reads the weight once.
    """
    table = e.module.weights
    symbol = node.weights[0]
    weight = table[table.resolve(symbol)]
    encoding = weight.encoding
    assert isinstance(encoding, Int8Block)
    rows, columns = weight.shape
    block = encoding.block
    keep = [0] * (node.operands[0].type.rank - 1)
    (blocks,) = e.op("Reshape", [x, e.ints(*keep, columns // block, block)])
    (largest,) = e.op("ReduceMax", [e.op("Abs", [blocks])[0], e.ints(-1)], keepdims=1)
    scale = e.constant(np.array(127, dtype=np.float32))
    tiny = e.constant(np.array(1e-30, dtype=np.float32))
    (step,) = e.op("Max", [e.op("Div", [largest, scale])[0], tiny])
    (high_blocks,) = e.op("Mul", [e.op("Round", [e.op("Div", [blocks, step])[0]])[0], step])
    (high,) = e.op("Reshape", [high_blocks, e.ints(*keep, columns)])
    (low,) = e.op("Sub", [x, high])
    (both,) = e.op("Concat", [high, low], axis=0)
    (product,) = e.op(
        "MatMulNBits",
        [both, e.weight(symbol), e.weight_part(symbol, "weight_scale")],
        domain=CONTRIB,
        K=columns,
        N=rows,
        bits=8,
        block_size=block,
        accuracy_level=4,
    )
    first, second = e.op("Split", [product], 2, axis=0, num_outputs=2)
    return e.op("Add", [first, second])[0]
