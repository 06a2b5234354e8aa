"""The only way to change a finished graph: keeps uses, order, names and locations right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgecc.errors import InternalError
from edgecc.ir.builder import infer, make_node
from edgecc.ir.core import Graph, Location, Module, Node, Value
from edgecc.ir.ops import Attributes


class Rewriter:
    """Edits one graph on behalf of one pass.

    New nodes are inserted before an *anchor* node, so definitions stay before uses. Replaced nodes
    hand their location on: the new node's chain ends with the name of the pass.

    Args:
        module: Owner of the graph.
        graph: Graph to edit.
        pass_name: Recorded in the locations of new nodes.
    """

    def __init__(self, module: Module, graph: Graph, pass_name: str) -> None:
        self.module = module
        self.graph = graph
        self.pass_name = pass_name

    def insert(
        self,
        anchor: Node,
        op: str,
        operands: Sequence[Value],
        weights: Sequence[str] = (),
        attrs: Attributes | None = None,
        names: Sequence[str] = (),
        origin: Location | None = None,
    ) -> Node:
        """Add a node right before `anchor`.

        Args:
            anchor: Node of this graph; operands must be defined before it.
            op: Name of the op.
            operands: Values to read.
            weights: Weight symbols to read.
            attrs: Attributes of the op.
            names: Names of the results.
            origin: Location to continue; the anchor's when not given.

        Raises:
            InternalError: The anchor or an operand is not in the graph, or an operand is defined at
                or after the anchor.
        """
        place = self._order(anchor)
        for value in operands:
            if self._defined_at(value) >= place:
                raise InternalError("ir/order", f"%{value.name} is not defined before {anchor!r}")
        base = origin or anchor.location
        location = Location(base.origin, (*base.passes, self.pass_name))
        node = make_node(self.module, op, operands, weights, attrs, names, location)
        self.graph.nodes.insert_before(anchor, node)
        return node

    def replace_value(self, old: Value, new: Value) -> None:
        """Make every user of `old`, graph outputs included, read `new` instead.

        The node that makes `new` may read `old` and goes on doing so. Nothing is changed when an
        error is raised.

        Raises:
            InternalError: The types differ, a value is not in the graph, or a user stands before
                the new definition.
        """
        if old.type != new.type:
            raise InternalError("ir/replace-type", f"cannot replace {old!r} by {new!r}")
        self._defined_at(old)
        place = self._defined_at(new)
        uses = [(user, index) for user, index in old.uses if user is not new.producer]
        for user, _ in uses:
            if self._order(user) <= place:
                raise InternalError("ir/order", f"{user!r} stands before %{new.name}")
        for user, index in uses:
            operands = list(user.operands)
            operands[index] = new
            user._set_operands(operands)
        for output in self.graph.outputs:
            if output.value is old:
                output.value = new

    def replace(self, node: Node, values: Sequence[Value]) -> None:
        """Replace all results of a node and erase it; names of the old results are kept.

        Raises:
            InternalError: There is not one value for each result, or see `replace_value`, `erase`.
        """
        if len(values) != len(node.results):
            raise InternalError(
                "ir/replace-count", f"{len(values)} values for the results of {node!r}"
            )
        for old, new in zip(node.results, values, strict=True):
            self.replace_value(old, new)
            if new.producer is not None and self.pass_name in new.producer.location.passes:
                new.name = old.name
        self.erase(node)

    def erase(self, node: Node) -> None:
        """Remove a node nobody reads.

        Raises:
            InternalError: A result is still used, or the node is not in the graph.
        """
        self._order(node)
        if any(r.uses for r in node.results) or any(
            o.value in node.results for o in self.graph.outputs
        ):
            raise InternalError("ir/erase-used", f"{node!r} is still used")
        self.graph.nodes.remove(node)
        node._set_operands(())

    def replace_weights(self, node: Node, weights: Sequence[str]) -> None:
        """Make a node read other weights that give the same result types.

        Raises:
            InternalError: The node is not in the graph, or its op does not take these weights.
        """
        self._order(node)
        types = infer(self.module, node.op, node.operands, weights, node.attrs, node.location)
        if types != tuple(r.type for r in node.results):
            raise InternalError("ir/replace-type", f"{weights} change the results of {node!r}")
        node.weights = tuple(weights)
        node.location = Location(node.location.origin, (*node.location.passes, self.pass_name))

    def _defined_at(self, value: Value) -> int:
        """Order of the node that defines a value, -1 for a graph input."""
        if value.producer is not None:
            return self._order(value.producer)
        inputs = self.graph.inputs
        expected = inputs[value.index].value if value.index < len(inputs) else None
        if expected is not value and all(i.value is not value for i in inputs):
            raise InternalError(
                "ir/foreign-value", f"{value!r} is not part of graph @{self.graph.name}"
            )
        return -1

    def _order(self, node: Node) -> int:
        try:
            return self.graph.nodes.order(node)
        except ValueError:
            raise InternalError(
                "ir/foreign-node", f"{node!r} is not part of graph @{self.graph.name}"
            ) from None


def clone_nodes(
    module: Module, nodes: Sequence[Node], graph: Graph, mapping: Mapping[Value, Value]
) -> dict[Value, Value]:
    """Copy nodes into another graph.

    Args:
        module: Owner of both graphs.
        nodes: Nodes in execution order.
        graph: Where the copies are appended.
        mapping: Values of the old graph to values of the new one: at least all free operands.

    Returns:
        The mapping, extended by the results of the copied nodes.
    """
    extended = dict(mapping)
    for node in nodes:
        copy = Node(
            node.op,
            [extended[o] for o in node.operands],
            node.weights,
            node.attrs,
            [r.type for r in node.results],
            [r.name for r in node.results],
            node.location,
        )
        graph.nodes.append(copy)
        extended.update(zip(node.results, copy.results, strict=True))
    return extended
