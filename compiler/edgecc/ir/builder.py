"""Checked construction of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgecc.errors import InternalError
from edgecc.ir.core import Graph, Input, Location, Module, Node, Output, Value
from edgecc.ir.ops import Attributes, Op, TypeRuleError, get_op
from edgecc.ir.types import Dim, DType, TensorType
from edgecc.roles import Role


class Builder:
    """Adds inputs, nodes and outputs to one graph; result types come from the op's shape rule.

    Args:
        module: Owner of the graph and of the weights nodes name.
        graph: Graph to extend, or the name of a new one.
    """

    def __init__(self, module: Module, graph: Graph | str) -> None:
        self.module = module
        if isinstance(graph, str):
            if graph in module.graphs:
                raise InternalError("ir/duplicate-graph", f"graph @{graph} exists")
            graph = module.graphs.setdefault(graph, Graph(graph))
        self.graph = graph
        self.location = Location()

    def at(self, origin: str) -> Builder:
        """Set the origin of the nodes added next; returns the builder."""
        self.location = Location(origin)
        return self

    def input(self, name: str, dtype: DType, shape: Sequence[Dim], role: Role) -> Value:
        """Add a graph input."""
        if any(i.name == name for i in self.graph.inputs):
            raise InternalError("ir/duplicate-input", f"@{self.graph.name} has an input %{name}")
        value = Value(TensorType(dtype, tuple(shape)), name, None, len(self.graph.inputs))
        self.graph.inputs.append(Input(value, role))
        return value

    def output(self, value: Value, name: str, role: Role, alias: str | None = None) -> None:
        """Add a graph output."""
        self.graph.outputs.append(Output(value, name, role, alias))

    def node(
        self,
        op: str,
        operands: Sequence[Value],
        weights: Sequence[str] = (),
        attrs: Attributes | None = None,
        names: Sequence[str] = (),
    ) -> Node:
        """Append a node.

        Raises:
            InternalError: The operands do not fit the op; frontends check user input before.
        """
        node = make_node(self.module, op, operands, weights, attrs, names, self.location)
        self.graph.nodes.append(node)
        return node

    def op(
        self,
        op: str,
        *operands: Value,
        weights: Sequence[str] = (),
        attrs: Attributes | None = None,
        name: str = "",
    ) -> Value:
        """Append a node with one result and return that."""
        return self.node(op, operands, weights, attrs, (name,) if name else ()).result


def make_node(
    module: Module,
    op: str,
    operands: Sequence[Value],
    weights: Sequence[str] = (),
    attrs: Attributes | None = None,
    names: Sequence[str] = (),
    location: Location = Location(),  # noqa: B008 (immutable)
) -> Node:
    """A node with inferred result types, not yet part of a graph.

    Raises:
        InternalError: The operands do not fit the op.
    """
    rule = get_op(op)
    attrs = Attributes() if attrs is None else attrs
    types = infer(module, rule, operands, weights, attrs, location)
    return Node(rule, operands, weights, attrs, types, names, location)


def infer(
    module: Module,
    op: Op[Any],
    operands: Sequence[Value],
    weights: Sequence[str],
    attrs: Attributes,
    location: Location,
) -> tuple[TensorType, ...]:
    """Result types of an op on these operands, by its shape rule.

    Raises:
        InternalError: The operands do not fit the op.
    """
    table = module.weights
    try:
        op.check_counts(len(operands), len(weights))
        op.check_attributes(attrs)
        return op.infer(
            [v.type for v in operands],
            [table[table.resolve(w)] for w in weights],
            attrs,
            module.scope() if op.name == "call" else {},
        )
    except TypeRuleError as error:
        raise InternalError(
            "ir/type-rule", f"{op.name}: {error}", where=str(location), notes=[repr(list(operands))]
        ) from error
