"""Graph analyses as networkx views, computed on demand.

Vertices are nodes (and graph inputs as their `Value`); an edge runs from producer to user. Nothing
is cached: the views are cheap beside a compile, and a stale one would be a silent bug.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import networkx as nx

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.types import DType, TensorType

Vertex: TypeAlias = Node | Value

_COMMON = Value(TensorType(DType.BOOL, ()), "common user or producer", None, 0)
"""A vertex of no graph, to walk from several at once."""


def dataflow(graph: Graph) -> nx.DiGraph[Vertex]:
    """Producers to users, vertices in execution order."""
    view: nx.DiGraph[Vertex] = nx.DiGraph()
    view.add_nodes_from(i.value for i in graph.inputs)
    view.add_nodes_from(graph.nodes)
    for node in graph.nodes:
        for value in node.operands:
            view.add_edge(value.producer or value, node)
    return view


def topological_order(graph: Graph) -> list[Node]:
    """Nodes in an order that puts producers first, ties broken by the present order."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    view = dataflow(graph)
    order = nx.lexicographical_topological_sort(
        view, key=lambda v: position.get(v, -1) if isinstance(v, Node) else -1
    )
    return [v for v in order if isinstance(v, Node)]


def live_nodes(graph: Graph) -> set[Node]:
    """Nodes some output depends on."""
    return ancestors(graph, [o.value for o in graph.outputs])


def ancestors(graph: Graph, values: Iterable[Value]) -> set[Node]:
    """Nodes the values are computed from, their producers included."""
    view = dataflow(graph)
    # One walk from a common user of all values, however many there are.
    view.add_edges_from((v.producer, _COMMON) for v in values if v.producer is not None)
    found = nx.ancestors(view, _COMMON) if _COMMON in view else set()
    return {v for v in found if isinstance(v, Node)}


def descendants(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Nodes that depend on any of the given ones, those included."""
    view = dataflow(graph)
    view.add_edges_from((_COMMON, n) for n in nodes)
    found = nx.descendants(view, _COMMON) if _COMMON in view else set()
    return {v for v in found if isinstance(v, Node)}


def is_convex(graph: Graph, nodes: set[Node]) -> bool:
    """Whether no path leaves the set and comes back, so that it can become one node."""
    outside = descendants(graph, nodes) - nodes
    return not any(
        o.producer in outside for n in nodes for o in n.operands if o.producer is not None
    )


def dominators(graph: Graph) -> dict[Node, Vertex | None]:
    """Immediate dominator of each node: what every path from the inputs to it runs through.

    None where only the graph's entry itself dominates.
    """
    view: nx.DiGraph[object] = nx.DiGraph()
    view.add_edges_from(dataflow(graph).edges)
    view.add_nodes_from(graph.nodes)
    entry = object()
    view.add_node(entry)
    view.add_edges_from((entry, v) for v in list(view) if view.in_degree(v) == 0)
    idom = nx.immediate_dominators(view, entry)
    return {n: None if idom[n] is entry else idom[n] for n in graph.nodes}


def call_graph(module: Module) -> nx.DiGraph[str]:
    """Callers to callees."""
    view: nx.DiGraph[str] = nx.DiGraph()
    view.add_nodes_from(module.graphs)
    view.add_edges_from((name, c) for name, g in module.graphs.items() for c in g.callees())
    return view
