"""Lowering of constants."""

from __future__ import annotations

from edgecc.backends.onnx.emitter import Emitter, lowers
from edgecc.ir.core import Node


@lowers("constant")
def constant(e: Emitter, node: Node) -> None:
    """`Identity` of the initializer, which engines remove when they load the model."""
    e.result(node, "Identity", [e.weight(node.weights[0])])
