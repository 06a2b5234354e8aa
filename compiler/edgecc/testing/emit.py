"""From expressions to nodes."""

from __future__ import annotations

from edgecc.ir.builder import Builder
from edgecc.ir.core import Location, Module, Node, Value
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.types import symbols_of
from edgecc.roles import Role
from edgecc.testing.expressions import SYMBOLS, Apply, Call, Expr, Leaf
from edgecc.testing.weight_trees import add_weight


class Emitter:
    """Builds one graph; equal expressions become one value.

    Args:
        module: Module to add the graph to.
        name: Name of the graph.
        callees: Names of the graphs that other emitters of the module made for calls.
    """

    def __init__(self, module: Module, name: str, callees: dict[tuple[Expr, ...], str]) -> None:
        self._module = module
        self._name = name
        self._callees = callees
        self._builder = Builder(module, name)
        self._inputs: dict[Leaf, Value] = {}
        self._nodes: dict[Apply | Call, Node] = {}

    def __call__(self, tree: Expr) -> Value:
        """The value of an expression."""
        if isinstance(tree, Leaf):
            if tree not in self._inputs:
                self._inputs[tree] = self._input(tree)
            return self._inputs[tree]
        key = Call(tree.body, tree.arguments) if isinstance(tree, Call) else _first(tree)
        if key not in self._nodes:
            self._nodes[key] = self._call(key) if isinstance(key, Call) else self._apply(key)
        return self._nodes[key].results[tree.index]

    def output(self, tree: Expr, name: str) -> None:
        """Return the value of an expression."""
        self._builder.output(self(tree), name, Role.ACTIVATION)

    def return_caches(self) -> None:
        """Return the first update of each cache or state as an output that overwrites the input."""
        inputs = {i.value: i for i in self._builder.graph.inputs}
        for node in self._builder.graph.nodes:
            for before, after in _updates(node):
                found = inputs.pop(before, None)
                if found is not None:
                    found.role = Role.KV_CACHE if "cache" in node.op.name else Role.STATE
                    name = f"{found.name}.updated"
                    self._builder.output(after, name, found.role, alias=found.name)

    def _input(self, leaf: Leaf) -> Value:
        for symbol in sorted(symbols_of(leaf.wanted.shape)):
            self._module.symbols.setdefault(symbol, SYMBOLS[symbol])
        type = leaf.wanted.type
        return self._builder.input(leaf.name, type.dtype, type.shape, Role.ACTIVATION)

    def _apply(self, tree: Apply) -> Node:
        operands = [self(operand) for operand in tree.operands]
        weights = [add_weight(self._module, weight) for weight in tree.weights]
        # The origin a frontend would give: the checkpoint module the node computes.
        self._builder.location = Location(f"{self._name}.{len(self._nodes)}.{tree.op}")
        return self._builder.node(tree.op, operands, weights, tree.attrs)

    def _call(self, tree: Call) -> Node:
        callee = self._callees.get(tree.body) or self._new_graph(tree.body)
        arguments = [self(argument) for argument in tree.arguments]
        self._builder.location = Location(f"{self._name}.{len(self._nodes)}.call")
        return self._builder.node("call", arguments, attrs=CallAttributes(callee))

    def _new_graph(self, body: tuple[Expr, ...]) -> str:
        emit = Emitter(self._module, f"callee{len(self._module.graphs)}", self._callees)
        for number, root in enumerate(body):
            emit.output(root, f"y{number}")
        self._callees[body] = emit._name
        return emit._name


def _first(tree: Apply) -> Apply:
    return Apply(tree.op, tree.operands, tree.weights, tree.attrs)


def _updates(node: Node) -> list[tuple[Value, Value]]:
    """Caches and states a node updates, before and after."""
    first = _CARRIED.get(node.op.name)
    if first is None:
        return []
    after = node.results[-1:] if len(node.results) < 3 else node.results[1:]
    return list(zip(node.operands[first : first + len(after)], after, strict=True))


_CARRIED = {
    "cache_update": 0,
    "cached_attention": 3,
    "causal_conv1d": 1,
    "gated_delta_net": 5,
    "logged_delta_net": 3,
}
"""The first operand that a last result replaces."""
