"""Lowerings of elementwise ops."""

from __future__ import annotations

from edgecc.backends.onnx.emitter import ONNX_TYPES, Emitter, lowers
from edgecc.ir.core import Node
from edgecc.ir.ops.elementwise import GeluAttributes


@lowers("add")
def add(e: Emitter, node: Node) -> None:
    """`Add`."""
    e.result(node, "Add", e.operands(node))


@lowers("cast")
def cast(e: Emitter, node: Node) -> None:
    """`Cast`, which rounds to nearest even as well."""
    e.result(node, "Cast", e.operands(node), to=ONNX_TYPES[node.result.type.dtype])


@lowers("gelu")
def gelu(e: Emitter, node: Node) -> None:
    """`Gelu`, which has the same two forms."""
    attrs = node.attrs
    assert isinstance(attrs, GeluAttributes)
    e.result(node, "Gelu", e.operands(node), approximate=attrs.approximate)


@lowers("mul")
def mul(e: Emitter, node: Node) -> None:
    """`Mul`."""
    e.result(node, "Mul", e.operands(node))


@lowers("sigmoid")
def sigmoid(e: Emitter, node: Node) -> None:
    """`Sigmoid`."""
    e.result(node, "Sigmoid", e.operands(node))


@lowers("silu")
def silu(e: Emitter, node: Node) -> None:
    """`Sigmoid` times x: ONNX Runtime merges the two, and has no kernel for Swish-24."""
    (x,) = e.operands(node)
    (s,) = e.op("Sigmoid", [x])
    e.result(node, "Mul", [x, s])


@lowers("sub")
def sub(e: Emitter, node: Node) -> None:
    """`Sub`."""
    e.result(node, "Sub", e.operands(node))


@lowers("tanh")
def tanh(e: Emitter, node: Node) -> None:
    """`Tanh`."""
    e.result(node, "Tanh", e.operands(node))


@lowers("swiglu")
def swiglu(e: Emitter, node: Node) -> None:
    """`silu(gate) * up`."""
    gate, up = e.operands(node)
    (s,) = e.op("Sigmoid", [gate])
    (activated,) = e.op("Mul", [gate, s])
    e.result(node, "Mul", [activated, up])
