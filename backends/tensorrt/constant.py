"""Lowering of constants."""

from __future__ import annotations

from edgecc.backends.tensorrt.emitter import Emitter, lowers
from edgecc.backends.tensorrt.weights import table
from edgecc.ir.core import Node


@lowers("constant")
def constant(e: Emitter, node: Node) -> None:
    """A constant layer."""
    e.result(node, e.cast(table(e, node.weights[0], bind=False), node.result.type.dtype))
