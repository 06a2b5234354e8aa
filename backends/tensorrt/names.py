"""What the parts of a graph are called in its plan.

Graphs of equal layers with other weights make one network, so its plan must not tell which layers
it was built from: numbers count from the first layer of the graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from edgecc.backends.stored_weights import tensor_name
from edgecc.backends.tensorrt.operands import Operand
from edgecc.ir.core import Graph, Input, Location, Module, Node, Output, Value
from edgecc.ir.printer import print_graph
from edgecc.ir.relative_names import RelativeNames
from edgecc.ir.types import symbols_of


class PlanNames:
    """Names for one graph.

    Args:
        module: Owner of the graph.
        graph: Without calls.

    Attributes:
        graph: Of the graph: that of the one it is a part of.
    """

    def __init__(self, module: Module, graph: Graph) -> None:
        head, _, last = graph.name.rpartition(".")
        self.graph = head if head and last.isdecimal() else graph.name
        self._relative = RelativeNames()
        self._resolve = module.weights.resolve
        self._weights = {self.weight(s): s for s in map(self._resolve, graph.used_weights())}

    @property
    def weights(self) -> Mapping[str, str]:
        """The graph's resolved weights by their names in the plan."""
        return self._weights

    def weight(self, symbol: str) -> str:
        """Of a resolved weight, or of one that such a weight is made from."""
        return self._relative(symbol)

    def input(self, operand: Operand) -> str:
        """Of an array of a weight that is an input."""
        tensor = tensor_name(self._relative(operand.symbol), operand.components[0])
        return f"@{tensor}/{operand.form}/{operand.dtype.value}"

    def node(self, node: Node) -> str:
        """What a layer is told to be for, in the builder's and the engine's own listings."""
        weights = f" of {self.weight(self._resolve(node.weights[0]))}" if node.weights else ""
        return f"@{self.graph}, {node.op.name}{weights}"


def network_digest(module: Module, graph: Graph, sizes: Mapping[str, int]) -> str:
    """SHA-256 of a graph as its network has it, and of its sizes.

    Where weights come from does not count: neither files nor numbers of layers are in a plan.

    Args:
        module: Owner of the graph.
        graph: Without calls.
        sizes: Symbols that have one size in all calls.
    """
    names = PlanNames(module, graph)
    values = [i.value for i in graph.inputs] + [r for n in graph.nodes for r in n.results]
    used = sorted(symbols_of(d for v in values for d in v.type.shape))
    known = [f"{name}: {sizes.get(name, module.symbols.get(name))}" for name in used]
    for name, symbol in names.weights.items():
        weight = module.weights[symbol]
        known.append(f"{name}: {weight.encoding} {weight.shape}")
    text = "\n".join([*known, print_graph(_renamed(module, graph, names))])
    return hashlib.sha256(text.encode()).hexdigest()


def _renamed(module: Module, graph: Graph, names: PlanNames) -> Graph:
    """A copy that reads weights by their names in the plan."""
    made = Graph(names.graph)
    values: dict[Value, Value] = {}
    for item in graph.inputs:
        old = item.value
        values[old] = Value(old.type, old.name, None, old.index)
        made.inputs.append(Input(values[old], item.role))
    for node in graph.nodes:
        copy = Node(
            node.op,
            [values[o] for o in node.operands],
            [names.weight(module.weights.resolve(w)) for w in node.weights],
            node.attrs,
            [r.type for r in node.results],
            [r.name for r in node.results],
            Location(),
        )
        made.nodes.append(copy)
        values.update(zip(node.results, copy.results, strict=True))
    made.outputs = [Output(values[o.value], o.name, o.role, o.alias) for o in graph.outputs]
    return made
