"""Module, Graph, Node, Value: the mutable part of the IR, compared by identity.

Ownership: a module owns graphs and one weight table; a graph owns its nodes in execution order; a
node owns its results. Every value knows its uses, both directions are kept by `Builder` and
`Rewriter` alone. Names are hints for people: nothing looks a value up by name, the runtime binds
graph inputs and outputs by role.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edgecc.errors import InternalError
from edgecc.ir.node_list import NodeList
from edgecc.ir.ops import Attributes, Op
from edgecc.ir.ops.base import GraphSignature, Scope
from edgecc.ir.types import SymbolRange, TensorType
from edgecc.ir.weights import WeightTable
from edgecc.roles import Role

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None


@dataclass(frozen=True, slots=True)
class Location:
    """Where a node comes from: a checkpoint tensor, then the passes that rewrote it."""

    origin: str = ""
    passes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " <- ".join([self.origin, *self.passes]) if self.origin or self.passes else ""

    @classmethod
    def parse(cls, text: str) -> Location:
        """The inverse of `str`."""
        origin, *passes = text.split(" <- ")
        return cls(origin, tuple(passes))


class Value:
    """An SSA value: a graph input or the result of a node."""

    __slots__ = ("index", "name", "producer", "type", "uses")

    def __init__(self, type: TensorType, name: str, producer: Node | None, index: int) -> None:
        self.type = type
        self.name = name
        self.producer = producer
        self.index = index
        self.uses: dict[tuple[Node, int], None] = {}

    def users(self) -> list[Node]:
        """The nodes that read the value, each once, in the order their uses were made."""
        return list(dict.fromkeys(node for node, _ in self.uses))

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"


class Node:
    """One operation. Its edges are changed through `Rewriter` only.

    `checked` belongs to the verifier: the types, weights and attributes it found to fit the op.
    """

    __slots__ = ("_operands", "attrs", "checked", "location", "op", "results", "weights")

    def __init__(
        self,
        op: Op[Any],
        operands: Sequence[Value],
        weights: Sequence[str],
        attrs: Attributes,
        result_types: Sequence[TensorType],
        names: Sequence[str],
        location: Location,
    ) -> None:
        self.op = op
        self._operands: tuple[Value, ...] = ()
        self.weights = tuple(weights)
        self.attrs = attrs
        self.checked: object = None
        self.location = location
        self.results = tuple(
            Value(t, names[i] if i < len(names) else op.name, self, i)
            for i, t in enumerate(result_types)
        )
        self._set_operands(operands)

    @property
    def operands(self) -> tuple[Value, ...]:
        """The values the node reads."""
        return self._operands

    @property
    def result(self) -> Value:
        """The only result.

        Raises:
            InternalError: The node has another number of results.
        """
        if len(self.results) != 1:
            raise InternalError("ir/results", f"{self.op.name} has {len(self.results)} results")
        return self.results[0]

    def _set_operands(self, operands: Sequence[Value]) -> None:
        for index, value in enumerate(self._operands):
            del value.uses[self, index]
        self._operands = tuple(operands)
        for index, value in enumerate(self._operands):
            value.uses[self, index] = None

    def __repr__(self) -> str:
        results = ", ".join(f"%{r.name}" for r in self.results)
        return f"{results} = {self.op.name}({', '.join(f'%{o.name}' for o in self._operands)})"


@dataclass(slots=True, eq=False)
class Input:
    """A graph input and what it means. `name` is unique among the graph's inputs and outputs."""

    value: Value
    role: Role

    @property
    def name(self) -> str:
        """The binding name."""
        return self.value.name


@dataclass(slots=True, eq=False)
class Output:
    """A graph output.

    Attributes:
        value: What is returned.
        name: Binding name, unique among the graph's outputs.
        role: What it means.
        alias: Name of the input whose buffer it overwrites (updated caches), or None.
    """

    value: Value
    name: str
    role: Role
    alias: str | None = None


class Graph:
    """A function of its inputs and the module's weights."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inputs: list[Input] = []
        self.outputs: list[Output] = []
        self.nodes = NodeList()

    def signature(self) -> GraphSignature:
        """Input and output types."""
        return GraphSignature(
            tuple(i.value.type for i in self.inputs), tuple(o.value.type for o in self.outputs)
        )

    def input(self, name: str) -> Input:
        """The input called `name`.

        Raises:
            InternalError: No such input.
        """
        for item in self.inputs:
            if item.name == name:
                return item
        raise InternalError("ir/unknown-input", f"graph @{self.name} has no input %{name}")

    def by_role(self, role: Role) -> list[Input]:
        """Inputs with a role."""
        return [i for i in self.inputs if i.role is role]

    def outputs_by_role(self, role: Role) -> list[Output]:
        """Outputs with a role."""
        return [o for o in self.outputs if o.role is role]

    def used_weights(self) -> Iterator[str]:
        """Weight symbols in the order their nodes first name them, each once."""
        yield from dict.fromkeys(w for n in self.nodes for w in n.weights)

    def callees(self) -> Iterator[str]:
        """Graphs this graph calls, in call order, each once."""
        yield from dict.fromkeys(
            str(getattr(n.attrs, "callee", "")) for n in self.nodes if n.op.name == "call"
        )

    def __repr__(self) -> str:
        return f"<graph @{self.name}: {len(self.nodes)} nodes>"


def site(graph: Graph, node: Node) -> str:
    """Where a node is: its graph, and the checkpoint module that it comes from, if known."""
    origin = node.location.origin
    return f"@{graph.name}, " + (f"{node.op.name} of {origin}" if origin else repr(node))


@dataclass(eq=False)
class Module:
    """Several graphs over one weight table: a target/draft pair is one module.

    Attributes:
        name: For people.
        graphs: By name, in order.
        weights: One table for all graphs, so that sharing is visible by reading it.
        symbols: Ranges of the dimension symbols.
        metadata: JSON facts the runtime needs (block size, token ids ...), by top-level key.
        decisions: What passes decided and why, one line each, in order.
        checkpoints: Folder of each checkpoint that stored weights name, as the user gave it.
    """

    name: str
    graphs: dict[str, Graph] = field(default_factory=dict)
    weights: WeightTable = field(default_factory=WeightTable)
    symbols: dict[str, SymbolRange] = field(default_factory=dict)
    metadata: dict[str, Json] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    checkpoints: dict[str, str] = field(default_factory=dict)

    def scope(self) -> Scope:
        """Signatures of all graphs, for ops that call one."""
        return {name: graph.signature() for name, graph in self.graphs.items()}

    def entries(self) -> list[Graph]:
        """Graphs no other graph calls: what the runtime starts."""
        called = {c for g in self.graphs.values() for c in g.callees()}
        return [g for name, g in self.graphs.items() if name not in called]

    def unbound_weights(self, graph: Graph) -> Iterator[str]:
        """Unbound weights that a graph or one it calls reads, directly or through derived ones."""
        for symbol in graph.used_weights():
            yield from self.weights.unbound(symbol)
        for name in graph.callees():
            yield from self.unbound_weights(self.graphs[name])

    def weight_users(self) -> dict[str, list[str]]:
        """The graphs that read each weight; aliases count for what they stand for."""
        users: dict[str, list[str]] = {}
        for name, graph in self.graphs.items():
            for symbol in graph.used_weights():
                names = users.setdefault(self.weights.resolve(symbol), [])
                if name not in names:
                    names.append(name)
        return users
