"""Pieces of graphs that become graphs of their own: what outlining passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from edgecc.ir.core import Graph, Input, Module, Node, Output, Value
from edgecc.ir.rewriter import clone_nodes
from edgecc.ir.types import DimExpr, TensorType, symbols_of
from edgecc.roles import Role


@dataclass(slots=True)
class Piece:
    """Nodes that become a graph.

    Attributes:
        name: Of the graph.
        nodes: In order.
        taken: Values they read, made elsewhere.
        returned: Values others want from them.
        results: What a call of the graph gives, in order: these, and None for what it does not want
            of a graph that another piece has.
    """

    name: str
    nodes: list[Node]
    taken: list[Value]
    returned: list[Value]
    results: list[Value | None] = field(default_factory=list)

    def loose_symbols(self) -> frozenset[str]:
        """Symbols of its types that no input fixes: a call could not tell their values."""
        taken = [d for v in self.taken for d in v.type.shape if isinstance(d, DimExpr)]
        fixed = {d.terms[0][0] for d in taken if len(d.terms) == 1 and d.terms[0][1] == 1}
        values = (*self.taken, *self.returned)
        return symbols_of(d for v in values for d in v.type.shape) - fixed


def piece_of(name: str, nodes: Sequence[Node], wanted: Iterable[Value]) -> Piece:
    """Nodes of one graph as a piece.

    Args:
        name: Of the new graph.
        nodes: At least one, in execution order.
        wanted: Values that others read; those the nodes make are returned.
    """
    made = {r for n in nodes for r in n.results}
    taken = list(dict.fromkeys(o for n in nodes for o in n.operands if o not in made))
    returned = list(dict.fromkeys(v for v in wanted if v in made))
    return Piece(name, list(nodes), taken, returned)


def extract(
    module: Module,
    piece: Piece,
    origin: Graph,
    rename: Callable[[str], str] = str,
    buffers: Mapping[Value, str] = MappingProxyType({}),
) -> None:
    """Add the graph of a piece to the module: copies of its nodes.

    Args:
        module: Owner of the graph.
        piece: Of the graph.
        origin: The graph. Inputs and outputs of a piece that are its own keep their roles, and
            updated caches their aliases.
        rename: Gives values their names in the piece; different names must stay different.
        buffers: Values in between that are versions of a cache, and the cache: they lie in its
            buffer.
    """
    roles = {i.value: i.role for i in origin.inputs}
    aliases = {o.value: o for o in origin.outputs if o.alias is not None}
    graph = module.graphs.setdefault(piece.name, Graph(piece.name))
    mapping: dict[Value, Value] = {}
    own = [v for v in piece.taken if v in roles or v in buffers]
    fixed = {v: rename(buffers.get(v, v.name)) for v in own}
    names = set(fixed.values())
    for index, value in enumerate(piece.taken):
        name = fixed.get(value) or unique(rename(value.name), names)
        names.add(name)
        copy = Value(TensorType(value.type.dtype, value.type.shape), name, None, index)
        role = Role.KV_CACHE if value in buffers else roles.get(value, Role.ACTIVATION)
        graph.inputs.append(Input(copy, role))
        mapping[value] = copy
    mapping = clone_nodes(module, piece.nodes, graph, mapping)
    for node in graph.nodes:
        for result in node.results:
            result.name = rename(result.name)
    held, labels = set(fixed.values()), set[str]()
    for value in piece.returned:
        alias = aliases.get(value)
        cache = alias.alias if alias else buffers.get(value)
        label = unique(rename(alias.name if alias else cache or value.name), labels)
        labels.add(label)
        role = alias.role if alias else Role.KV_CACHE if cache else Role.ACTIVATION
        buffer = rename(cache) if cache else None
        graph.outputs.append(
            Output(mapping[value], label, role, buffer if buffer in held else None)
        )


def unique(name: str, taken: set[str]) -> str:
    """A name that is not taken."""
    while name in taken:
        name += "_"
    return name
