"""Copies of modules: to look back after a pass, or to try something out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import networkx as nx

from edgecc.ir.analysis import call_graph
from edgecc.ir.builder import Builder
from edgecc.ir.core import Graph, Input, Module, Output, Value
from edgecc.ir.recipes import RECIPES
from edgecc.ir.rewriter import clone_nodes
from edgecc.ir.types import TensorType
from edgecc.ir.weights import Alias, Derived, Weight, WeightTable
from edgecc.roles import Role

CACHE_AXIS = 2
"""Axis of a `[b, kv_heads, capacity, head_dim]` cache that is its capacity."""


def clone_module(module: Module) -> Module:
    """A module that shares nothing mutable with the original but the readers of its checkpoints."""
    made = _frame(module, module.weights.copy())
    for name, graph in module.graphs.items():
        made.graphs[name] = _clone_graph(made, graph)
    return made


def _frame(module: Module, weights: WeightTable) -> Module:
    """Everything of a module but its graphs."""
    return Module(
        module.name,
        weights=weights,
        symbols=dict(module.symbols),
        metadata=copy.deepcopy(module.metadata),
        decisions=list(module.decisions),
        checkpoints=dict(module.checkpoints),
    )


def _clone_graph(module: Module, graph: Graph) -> Graph:
    made = Graph(graph.name)
    values: dict[Value, Value] = {}
    for item in graph.inputs:
        old = item.value
        values[old] = Value(old.type, old.name, None, old.index)
        made.inputs.append(Input(values[old], item.role))
    values = clone_nodes(module, graph.nodes, made, values)
    made.outputs = [Output(values[o.value], o.name, o.role, o.alias) for o in graph.outputs]
    return made


def with_smaller_caches(module: Module, rows: int) -> Module:
    """A copy whose caches and rotary tables have `rows` rows less.

    What is written and read in the rows that stay does not depend on how many follow, so values are
    those of the original wherever sequences are short enough.

    Raises:
        InternalError: Some node needs the original capacity.
        ValueError: A cache or table has no more than `rows` rows.
    """
    made = _frame(module, _smaller_tables(module.weights, rows))
    made.graphs = {name: Graph(name) for name in module.graphs}
    for name in reversed(list(nx.topological_sort(call_graph(module)))):  # callees first
        _rebuild(made, module.graphs[name], rows)
    return made


def cache_rows(module: Module) -> Iterator[int]:
    """Capacities of all caches of a module."""
    for graph in module.graphs.values():
        for item in graph.by_role(Role.KV_CACHE):
            if item.value.type.rank > CACHE_AXIS:
                capacity = item.value.type.shape[CACHE_AXIS]
                if isinstance(capacity, int):
                    yield capacity


def _rebuild(module: Module, graph: Graph, rows: int) -> None:
    builder = Builder(module, module.graphs[graph.name])
    values: dict[Value, Value] = {}
    for item in graph.inputs:
        made = _smaller(item, rows)
        values[item.value] = builder.input(item.name, made.dtype, made.shape, item.role)
    for node in graph.nodes:
        builder.location = node.location
        operands = [values[o] for o in node.operands]
        names = [r.name for r in node.results]
        made_node = builder.node(node.op.name, operands, node.weights, node.attrs, names)
        values.update(zip(node.results, made_node.results, strict=True))
    for output in graph.outputs:
        builder.output(values[output.value], output.name, output.role, output.alias)


def _smaller(item: Input, rows: int) -> TensorType:
    found = item.value.type
    if item.role is not Role.KV_CACHE or found.rank <= CACHE_AXIS:
        return found
    shape = list(found.shape)
    shape[CACHE_AXIS] = shape[CACHE_AXIS] - rows
    return TensorType(found.dtype, tuple(shape))


def _smaller_tables(weights: WeightTable, rows: int) -> WeightTable:
    """The table with shorter rotary tables, and what is derived from them to match."""
    made = weights.copy()
    changed: set[str] = set()
    waiting = [s for s, w in made.items() if isinstance(w.source, Derived | Alias)]
    while waiting:
        left = [s for s in waiting if not _shorten(made, s, rows, changed)]
        if len(left) == len(waiting):
            return made
        waiting = left
    return made


def _shorten(table: WeightTable, symbol: str, rows: int, changed: set[str]) -> bool:
    """Adapt one weight to what it is made from; False if it is fine, or it is not its turn yet."""
    weight = table[symbol]
    source = weight.source
    if isinstance(source, Alias):
        if source.symbol not in changed:
            return False
        weight = replace(weight, shape=table[source.symbol].shape)
    elif isinstance(source, Derived):
        if source.recipe == "rope_table":
            params = dict(source.params)
            source = replace(
                source,
                params=tuple(sorted({**params, "length": int(params["length"]) - rows}.items())),
            )
        elif not changed.intersection(source.inputs):
            return False
        inputs = [table[table.resolve(i)] for i in source.inputs]
        shape, encoding = RECIPES[source.recipe].check(inputs, dict(source.params))
        weight = Weight(shape, encoding, source)
    table.rebind(symbol, weight)
    changed.add(symbol)
    return True
