"""Lowerings of elementwise ops: activations in float32, rounded once to the type of the result."""

from __future__ import annotations

from edgecc.backends.tensorrt.emitter import Emitter, Tensor, lowers
from edgecc.ir.core import Node
from edgecc.ir.ops.elementwise import GeluAttributes
from edgecc.ir.types import DType


@lowers("add")
def add(e: Emitter, node: Node) -> None:
    """`SUM`; its one rounding is that of the type."""
    e.result(node, e.binary("SUM", *e.operands(node)))


@lowers("mul")
def mul(e: Emitter, node: Node) -> None:
    """`PROD`."""
    e.result(node, e.binary("PROD", *e.operands(node)))


@lowers("sub")
def sub(e: Emitter, node: Node) -> None:
    """`SUB`."""
    e.result(node, e.binary("SUB", *e.operands(node)))


@lowers("cast")
def cast(e: Emitter, node: Node) -> None:
    """A cast layer."""
    e.result(node, e.cast(e.operands(node)[0], node.result.type.dtype))


@lowers("gelu")
def gelu(e: Emitter, node: Node) -> None:
    """`GELU_ERF` or `GELU_TANH` in float32."""
    attrs = node.attrs
    assert isinstance(attrs, GeluAttributes)
    kind = "GELU_TANH" if attrs.approximate == "tanh" else "GELU_ERF"
    (x,) = e.operands(node)
    wide = e.cast(x, DType.F32)
    y = e.out("gelu", e.network.add_activation(wide, getattr(e.trt.ActivationType, kind)))
    e.result(node, e.cast(y, node.result.type.dtype))


@lowers("sigmoid")
def sigmoid(e: Emitter, node: Node) -> None:
    """`SIGMOID` in float32."""
    _activation(e, node, "SIGMOID")


@lowers("tanh")
def tanh(e: Emitter, node: Node) -> None:
    """`TANH` in float32."""
    _activation(e, node, "TANH")


@lowers("silu")
def silu(e: Emitter, node: Node) -> None:
    """`x * sigmoid(x)` in float32."""
    (x,) = e.operands(node)
    e.result(node, e.cast(_silu(e, e.cast(x, DType.F32)), node.result.type.dtype))


@lowers("swiglu")
def swiglu(e: Emitter, node: Node) -> None:
    """`silu(gate) * up` in float32."""
    gate, up = (e.cast(x, DType.F32) for x in e.operands(node))
    e.result(node, e.cast(e.binary("PROD", _silu(e, gate), up), node.result.type.dtype))


def _activation(e: Emitter, node: Node, kind: str) -> None:
    (x,) = e.operands(node)
    e.result(node, e.cast(e.activation(kind, e.cast(x, DType.F32)), node.result.type.dtype))


def _silu(e: Emitter, x: Tensor) -> Tensor:
    return e.binary("PROD", x, e.activation("SIGMOID", x))
