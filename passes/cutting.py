"""Graphs cut at some of their layers: what runs before each of them, and what runs after the last.

Values that are versions of one cache (the input, and what updates make of it) lie in one buffer, in
every piece: each piece takes the version of the piece before and overwrites it. Pieces that compute
the same, such as the steps of a draft that runs one layer again and again, become one graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from edgecc.ir.analysis import ancestors, descendants, live_nodes
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.passes.outlining import Piece, extract, piece_of, unique
from edgecc.roles import Role

Layer = tuple[Node, ...]
"""A linear layer, after the op that quantizes its input if no other layer reads that."""

Called = tuple[str, list[Value | None]]
"""A graph and the values its call gives, in order; None for those that nobody wants."""


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
        free = unique(name, set(module.graphs))
        pieces.append(piece_of(free, nodes, wanted) if nodes else None)
    return pieces


def extract_all(module: Module, graph: Graph, pieces: Sequence[Piece]) -> dict[Piece, Called]:
    """Add the graphs of the pieces of a graph to the module, equal ones once.

    Returns:
        What is called for each piece.
    """
    versions = _versions(graph, pieces)
    made: dict[Piece, Called] = {}
    for piece in pieces:
        found = (
            _reuse(module, piece, other, versions) for other in made if made[other][0] == other.name
        )
        results = next((f for f in found if f is not None), None)
        if results is None:
            extract(module, piece, graph, versions=versions)
            results = piece.name, list(piece.returned)
        made[piece] = results
    return made


def _versions(graph: Graph, pieces: Sequence[Piece]) -> dict[Value, str]:
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


def _reuse(
    module: Module, piece: Piece, other: Piece, versions: Mapping[Value, str]
) -> Called | None:
    """A call of the graph of another piece, if that computes all that this one does."""
    same = len(piece.nodes) == len(other.nodes) and len(piece.taken) == len(other.taken)
    if not same:
        return None
    mapping: dict[Value, Value] = {}
    for ours, theirs in zip(piece.taken, other.taken, strict=True):
        if ours.type != theirs.type or versions.get(ours) != versions.get(theirs):
            return None
        if ours is not theirs and None in (ours.producer, theirs.producer) and ours not in versions:
            return None
        mapping[ours] = theirs
    for node, twin in zip(piece.nodes, other.nodes, strict=True):
        if _key(module, node) != _key(module, twin):
            return None
        if [mapping[o] for o in node.operands] != list(twin.operands):
            return None
        mapping.update(zip(node.results, twin.results, strict=True))
    if any(mapping[v] not in other.returned for v in piece.returned):
        return None
    inverse = {mapping[v]: v for v in piece.returned}
    return other.name, [inverse.get(v) for v in other.returned]


def _key(module: Module, node: Node) -> tuple[object, ...]:
    weights = tuple(map(module.weights.resolve, node.weights))
    return node.op.name, node.attrs, weights, tuple(r.type for r in node.results)
