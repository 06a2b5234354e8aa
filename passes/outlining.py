"""Pieces of graphs that become graphs of their own: what outlining passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgecc.ir.core import Graph, Input, Module, Node, Output, Value
from edgecc.ir.rewriter import clone_nodes
from edgecc.ir.types import DimExpr, TensorType, symbols_of
from edgecc.roles import Role


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Nodes that become a graph, the values they read and the values others want from them."""

    name: str
    nodes: list[Node]
    taken: list[Value]
    returned: list[Value]

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
    versions: Mapping[Value, str] | None = None,
) -> None:
    """Add the graph of a piece to the module: copies of its nodes.

    Args:
        module: Owner of the graph.
        piece: Of the graph.
        origin: The graph. Inputs and outputs of a piece that are its own keep their roles, and
            updated caches their aliases.
        rename: Gives values their names in the piece; different names must stay different.
        versions: Values between updates of a cache that lie in its buffer, by the name of that: a
            piece takes them as a cache, and returns them as its update.
    """
    versions = versions or {}
    roles = {i.value: i.role for i in origin.inputs} | dict.fromkeys(versions, Role.KV_CACHE)
    aliases = {o.value: (o.name, o.role, o.alias) for o in origin.outputs if o.alias is not None}
    for value, name in versions.items():
        aliases.setdefault(value, (name, Role.KV_CACHE, name))
    graph = module.graphs.setdefault(piece.name, Graph(piece.name))
    mapping: dict[Value, Value] = {}
    given = {v: versions.get(v, v.name) for v in piece.taken if v in roles}
    buffers = {name: rename(name) for name in given.values()}
    names = set(buffers.values())
    for index, value in enumerate(piece.taken):
        name = buffers[given[value]] if value in given else unique(rename(value.name), names)
        names.add(name)
        copy = Value(TensorType(value.type.dtype, value.type.shape), name, None, index)
        graph.inputs.append(Input(copy, roles.get(value, Role.ACTIVATION)))
        mapping[value] = copy
    mapping = clone_nodes(module, piece.nodes, graph, mapping)
    for node in graph.nodes:
        for result in node.results:
            result.name = rename(result.name)
    labels: set[str] = set()
    for value in piece.returned:
        name, role, alias = aliases.get(value, (value.name, Role.ACTIVATION, None))
        label = unique(rename(name), labels)
        labels.add(label)
        buffer = buffers.get(alias) if alias else None
        graph.outputs.append(Output(mapping[value], label, role, buffer))


def unique(name: str, taken: set[str]) -> str:
    """A name that is not taken."""
    while name in taken:
        name += "_"
    return name
