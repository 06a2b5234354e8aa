"""Ways to make a module smaller. Each gives a new module, which may be invalid, or None."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import networkx as nx
import numpy as np

from edgecc.ir.analysis import call_graph
from edgecc.ir.builder import Builder
from edgecc.ir.clone import clone_module
from edgecc.ir.core import Graph, Input, Module, Node, Output, Value
from edgecc.ir.ops import Attributes
from edgecc.ir.random_weights import random_parts
from edgecc.ir.recipes import RECIPES
from edgecc.ir.rewriter import clone_nodes
from edgecc.ir.types import Dim, SymbolRange, TensorType
from edgecc.ir.weights import Alias, Derived, Inline, Unbound, Weight
from edgecc.roles import Role

_NO_SIZES = frozenset({"axis", "heads", "kv_heads", "groups", "steps"})
"""Integer attributes that count something else than elements."""

_NEAR = 8
"""Attributes less than this below a size belong to it."""


def without_graph(module: Module, name: str) -> Module:
    """One graph less."""
    made = clone_module(module)
    del made.graphs[name]
    return made


def without_outputs(module: Module, graph: str, start: int, stop: int) -> Module:
    """Some outputs of a graph less."""
    made = clone_module(module)
    del made.graphs[graph].outputs[start:stop]
    return made


def earlier(module: Module, graph: str, output: int, operand: int) -> Module | None:
    """An output returns what its value is computed from instead."""
    found = module.graphs[graph].outputs[output].value.producer
    if found is None or operand >= len(found.operands):
        return None
    made = clone_module(module)
    changed = made.graphs[graph].outputs[output]
    assert changed.value.producer is not None
    changed.value = changed.value.producer.operands[operand]
    changed.alias, changed.role = None, Role.ACTIVATION
    return made


def without_inputs(module: Module, graph: str, start: int, stop: int) -> Module | None:
    """Some inputs of a graph less: those that nobody reads."""
    found = module.graphs[graph]
    returned = {o.value for o in found.outputs}
    unread = [
        i.name for i in found.inputs[start:stop] if not i.value.uses and i.value not in returned
    ]
    if not unread:
        return None
    made = clone_module(module)
    kept = [i for i in made.graphs[graph].inputs if i.name not in unread]
    for index, item in enumerate(kept):
        item.value.index = index
    made.graphs[graph].inputs = kept
    for output in made.graphs[graph].outputs:
        if output.alias in unread:
            output.alias = None
    return made


def without_nodes(module: Module, graph: str, start: int, stop: int) -> Module:
    """Some nodes of a graph less: results that are read elsewhere become inputs."""
    removed = set(module.graphs[graph].nodes[start:stop])
    return _with_graph(module, graph, lambda node, made: node not in removed)


def bypassed(module: Module, graph: str, index: int) -> Module | None:
    """One node less: an operand of the same type takes the place of its result."""
    node = module.graphs[graph].nodes[index]
    if len(node.results) != 1:
        return None
    same = [o for o in node.operands if o.type == node.result.type]
    if not same:
        return None

    def keep(other: Node, values: dict[Value, Value]) -> bool:
        if other is node:
            values[node.result] = values[same[0]]
        return other is not node

    return _with_graph(module, graph, keep)


def _with_graph(
    module: Module, name: str, keep: Callable[[Node, dict[Value, Value]], bool]
) -> Module:
    """A copy in which one graph has only some of its nodes; what they miss become inputs."""
    made = clone_module(module)
    old, new = module.graphs[name], Graph(name)
    values: dict[Value, Value] = {}
    for item in old.inputs:
        values[item.value] = _add_input(new, item.value, item.name, item.role)
    for node in old.nodes:
        if keep(node, values):
            for operand in node.operands:
                _provide(new, operand, values)
            values = clone_nodes(made, [node], new, values)
    for output in old.outputs:
        _provide(new, output.value, values)
        new.outputs.append(Output(values[output.value], output.name, output.role, output.alias))
    made.graphs[name] = new
    return made


def _provide(graph: Graph, value: Value, values: dict[Value, Value]) -> None:
    if value not in values:
        taken = {i.name for i in graph.inputs}
        names = [value.name, *(f"{value.name}.{i}" for i in range(len(taken) + 1))]
        name = next(n for n in names if n not in taken)
        values[value] = _add_input(graph, value, name, Role.ACTIVATION)


def _add_input(graph: Graph, value: Value, name: str, role: Role) -> Value:
    made = Value(value.type, name, None, len(graph.inputs))
    graph.inputs.append(Input(made, role))
    return made


def without_weights(module: Module, symbols: Collection[str]) -> Module:
    """Some weights less."""
    made = clone_module(module)
    for symbol in symbols:
        made.weights.remove(symbol)
    return made


def unused_weights(module: Module) -> list[str]:
    """Weights that no node reads and no read weight is made from."""
    table = module.weights
    used = {
        name
        for graph in module.graphs.values()
        for symbol in graph.used_weights()
        for name in table.dependencies(symbol)
    }
    return [s for s in table if s not in used]


def inlined(module: Module, symbols: Collection[str]) -> Module | None:
    """Random bytes in the module itself instead of what some weights are or are made from."""
    chosen = [s for s in symbols if not isinstance(module.weights[s].source, Inline | Unbound)]
    if not chosen:
        return None
    made = clone_module(module)
    for symbol in chosen:
        made.weights.rebind(symbol, random_weight(symbol, module.weights[symbol]))
    return made


def random_weight(symbol: str, like: Weight) -> Weight:
    """An inline weight with the shape and encoding of another, fixed by symbol and shape."""
    seed = hashlib.sha256(f"{symbol} {like.shape} {like.encoding}".encode()).digest()
    rng = np.random.default_rng(np.frombuffer(seed, np.uint32))
    parts = random_parts(rng, like.shape, like.encoding)
    names = like.encoding.components(like.shape)
    return replace(like, source=Inline(tuple((n, parts[n].tobytes()) for n in names)))


def without_facts(module: Module) -> list[Module]:
    """Copies without metadata, without decisions, without checkpoints and symbols nobody needs."""
    tried = []
    for name in ("metadata", "decisions", "checkpoints", "symbols"):
        if getattr(module, name):
            made = clone_module(module)
            getattr(made, name).clear()
            tried.append(made)
    for field in ("metadata", "symbols"):
        if len(getattr(module, field)) > 1:
            for key in getattr(module, field):
                made = clone_module(module)
                del getattr(made, field)[key]
                tried.append(made)
    for symbol, bounds in module.symbols.items():
        if bounds.high > bounds.low:
            made = clone_module(module)
            made.symbols[symbol] = SymbolRange(bounds.low, bounds.low)
            tried.append(made)
    return tried


def dimensions(module: Module) -> list[int]:
    """All sizes of axes that are numbers, largest first."""
    found = {
        d
        for g in module.graphs.values()
        for v in (*(i.value for i in g.inputs), *(r for n in g.nodes for r in n.results))
        for d in v.type.shape
        if isinstance(d, int)
    }
    found |= {d for w in module.weights.values() for d in w.shape}
    return sorted(found, reverse=True)


def resized(module: Module, sizes: Mapping[int, int]) -> Module:
    """A copy in which axes of some sizes have others; attributes that name sizes follow.

    Weights of other shapes get random bytes; derived ones stay so where their recipe still fits.

    Raises:
        EdgeccError: The ops do not take the new sizes.
        ValueError: An encoding does not.
    """
    made = clone_module(module)
    for symbol, weight in module.weights.items():
        shape = tuple(sizes.get(d, d) for d in weight.shape)
        if shape != weight.shape:
            smaller = replace(weight, shape=shape)
            keeps = isinstance(weight.source, Alias | Unbound) or _follows(made, smaller)
            made.weights.rebind(symbol, smaller if keeps else random_weight(symbol, smaller))
    made.graphs = {name: Graph(name) for name in module.graphs}
    for name in reversed(list(nx.topological_sort(call_graph(module)))):  # callees first
        _rebuild(made, name, module.graphs[name], sizes)
    return made


def _follows(module: Module, weight: Weight) -> bool:
    """Whether a derived weight is what its recipe makes of the inputs as they are now."""
    source, table = weight.source, module.weights
    if not isinstance(source, Derived):
        return False
    inputs = [table[table.resolve(i)] for i in source.inputs]
    try:
        made = RECIPES[source.recipe].check(inputs, dict(source.params))
    except ValueError:
        return False
    return made == (weight.shape, weight.encoding)


def _rebuild(module: Module, name: str, graph: Graph, sizes: Mapping[int, int]) -> None:
    builder = Builder(module, module.graphs[name])
    values: dict[Value, Value] = {}
    for item in graph.inputs:
        found: TensorType = item.value.type
        shape: list[Dim] = [sizes.get(d, d) if isinstance(d, int) else d for d in found.shape]
        values[item.value] = builder.input(item.name, found.dtype, shape, item.role)
    for node in graph.nodes:
        operands = [values[o] for o in node.operands]
        attrs = _resized_attributes(node.attrs, sizes)
        names = [r.name for r in node.results]
        made = builder.node(node.op.name, operands, node.weights, attrs, names)
        made.location = node.location
        values.update(zip(node.results, made.results, strict=True))
    for output in graph.outputs:
        builder.output(values[output.value], output.name, output.role, output.alias)


def _resized_attributes(attrs: Attributes, sizes: Mapping[int, int]) -> Attributes:
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(attrs):
        value = getattr(attrs, field.name)
        if field.name in _NO_SIZES or isinstance(value, bool):
            continue
        if isinstance(value, int):
            changed[field.name] = _resized_value(value, sizes)
        elif isinstance(value, tuple):
            changed[field.name] = tuple(
                _resized_value(v, sizes) if isinstance(v, int) else v for v in value
            )
    return replace(attrs, **changed) if changed else attrs


def _resized_value(value: int, sizes: Mapping[int, int]) -> int:
    """The new size; what is a little below a size (tokens of a padded vocabulary) stays below."""
    near = min((s for s in sizes if value <= s < value + _NEAR), default=value)
    return (
        max(sizes.get(near, near) - (near - value), 1) if value > _NEAR else sizes.get(value, value)
    )
