"""Graphs cut at some of their layers: what runs before each of them, and what runs after the last.

Values that are versions of one cache (the input, and what updates make of it) lie in one buffer, in
every piece: each piece takes the version of the piece before and overwrites it. Pieces that compute
the same, such as the steps of a draft that runs one layer again and again, become one graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgecc.ir.analysis import ancestors, descendants, live_nodes
from edgecc.ir.core import Graph, Input, Module, Node, Output, Value
from edgecc.ir.rewriter import clone_nodes
from edgecc.ir.types import DimExpr, TensorType, symbols_of
from edgecc.roles import Role

Layer = tuple[Node, ...]
"""A linear layer, after the op that quantizes its input if no other layer reads that."""


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


def cut(module: Module, graph: Graph, layers: Sequence[Layer]) -> list[Piece | None]:
    """The pieces before each layer and the one after the last; None for those without nodes.

    Args:
        module: For names that are free.
        graph: The graph.
        layers: Some of its layers, in order.
    """
    live, outside = live_nodes(graph), {n for layer in layers for n in layer}
    outputs = [o.value for o in graph.outputs]
    parts: list[list[Node]] = []
    done: set[Node] = set()
    for index, layer in enumerate(layers):
        after = descendants(graph, [other[-1] for other in layers[index:]])
        early = [v for v in outputs if v.producer not in after]
        needed = ancestors(graph, [*layer[0].operands, *early])
        parts.append([n for n in graph.nodes if n in needed and n not in done | outside])
        done.update(parts[-1])
    # What only the tail reads moves there, so that no weight ends up in both engines.
    parts.append([n for n in graph.nodes if n in live and n not in done | outside])
    names = [f"{graph.name}.body", *(f"{graph.name}.step{i}" for i in range(1, len(layers)))]
    pieces = []
    for index, (name, nodes) in enumerate(zip([*names, f"{graph.name}.tail"], parts, strict=True)):
        later = [o for part in parts[index + 1 :] for n in part for o in n.operands]
        wanted = [*outputs, *(o for layer in layers for o in layer[0].operands), *later]
        pieces.append(_piece(unique(name, set(module.graphs)), nodes, wanted))
    return pieces


def extract(module: Module, graph: Graph, pieces: Sequence[Piece | None]) -> None:
    """Add the graphs of the pieces of a graph to the module; equal ones once."""
    present = [p for p in pieces if p is not None]
    buffers = _buffers(graph, present)
    made: list[Piece] = []
    for piece in present:
        for other in made:
            if _reuse(module, piece, other, buffers):
                break
        else:
            piece.results = list(piece.returned)
            _add(module, piece, graph, buffers)
            made.append(piece)


def _piece(name: str, nodes: list[Node], wanted: list[Value]) -> Piece | None:
    made = {r for n in nodes for r in n.results}
    taken = list(dict.fromkeys(o for n in nodes for o in n.operands if o not in made))
    returned = list(dict.fromkeys(v for v in wanted if v in made))
    return Piece(name, nodes, taken, returned) if nodes else None


def _buffers(graph: Graph, pieces: Sequence[Piece]) -> dict[Value, str]:
    """Versions of caches that may lie in the buffer of the input, by the name of that.

    A version that a later piece reads after another one has overwritten it needs a buffer of its
    own: then no version between the first and the last lies in that of the input.
    """
    found = {i.value: i.name for i in graph.inputs if i.role is Role.KV_CACHE}
    place = {n: index for index, piece in enumerate(pieces) for n in piece.nodes}
    kept: set[str] = set()
    for node in graph.nodes:
        if node.op.name != "cache_update" or node.operands[0] not in found:
            continue
        before = node.operands[0]
        found[node.result] = found[before]
        last = max((place.get(user, -1) for user in before.users()), default=-1)
        if last > place.get(node, -1):
            kept.add(found[before])
    return {value: name for value, name in found.items() if name not in kept}


def _reuse(module: Module, piece: Piece, other: Piece, buffers: Mapping[Value, str]) -> bool:
    """Let a piece use the graph of another one, if it computes a part of what that does."""
    same = len(piece.nodes) == len(other.nodes) and len(piece.taken) == len(other.taken)
    if not same:
        return False
    mapping: dict[Value, Value] = {}
    for ours, theirs in zip(piece.taken, other.taken, strict=True):
        if ours.type != theirs.type or buffers.get(ours) != buffers.get(theirs):
            return False
        if ours is not theirs and None in (ours.producer, theirs.producer) and ours not in buffers:
            return False
        mapping[ours] = theirs
    for node, twin in zip(piece.nodes, other.nodes, strict=True):
        if _key(module, node) != _key(module, twin):
            return False
        if [mapping[o] for o in node.operands] != list(twin.operands):
            return False
        mapping.update(zip(node.results, twin.results, strict=True))
    if any(mapping[v] not in other.returned for v in piece.returned):
        return False
    inverse = {mapping[v]: v for v in piece.returned}
    piece.name, piece.results = other.name, [inverse.get(v) for v in other.returned]
    return True


def _key(module: Module, node: Node) -> tuple[object, ...]:
    weights = tuple(map(module.weights.resolve, node.weights))
    return node.op.name, node.attrs, weights, tuple(r.type for r in node.results)


def _add(module: Module, piece: Piece, origin: Graph, buffers: Mapping[Value, str]) -> None:
    """Add the graph of a piece to the module: copies of its nodes."""
    inputs = {i.value: i.role for i in origin.inputs}
    aliases = {o.value: o for o in origin.outputs if o.alias is not None}
    graph = module.graphs.setdefault(piece.name, Graph(piece.name))
    mapping: dict[Value, Value] = {}
    fixed = {v: buffers.get(v, v.name) for v in piece.taken if v in buffers or v in inputs}
    names = set(fixed.values())
    for index, value in enumerate(piece.taken):
        name = fixed.get(value) or unique(value.name, names)
        names.add(name)
        role = Role.KV_CACHE if value in buffers else inputs.get(value, Role.ACTIVATION)
        copy = Value(TensorType(value.type.dtype, value.type.shape), name, None, index)
        graph.inputs.append(Input(copy, role))
        mapping[value] = copy
    mapping = clone_nodes(module, piece.nodes, graph, mapping)
    held = set(fixed.values())
    labels: set[str] = set()
    for value in piece.returned:
        alias = aliases.get(value)
        buffer = alias.alias if alias else buffers.get(value)
        label = unique(alias.name if alias else buffer or value.name, labels)
        labels.add(label)
        role = alias.role if alias else Role.KV_CACHE if buffer else Role.ACTIVATION
        graph.outputs.append(
            Output(mapping[value], label, role, buffer if buffer in held else None)
        )


def unique(name: str, taken: set[str]) -> str:
    """A name that is not taken."""
    while name in taken:
        name += "_"
    return name
