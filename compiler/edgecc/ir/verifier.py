"""Checks that a module obeys the rules of the IR.

Layers, cheapest first: structure (ownership, uses, order, single definition), types (the shape rule
of each op runs again and is compared with what is recorded), weights (symbols exist, aliases end,
derived weights match their recipe), and across graphs (roles, aliases of outputs, calls without
cycles, symbols with a range). All findings come at once. No weight bytes are read.

Named properties are further predicates that passes require and ensure: see `PROPERTIES`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod

import networkx as nx

from edgecc.errors import Diagnostic, InternalError, VerifyError
from edgecc.ir.analysis import call_graph
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.encodings import Component, Encoding, IntShape
from edgecc.ir.ops import TypeRuleError
from edgecc.ir.ops.base import Scope
from edgecc.ir.recipes import RECIPES
from edgecc.ir.types import symbols_of
from edgecc.ir.weights import Alias, Derived, Inline, Stored, Unbound, Weight, WeightTable
from edgecc.roles import Role


def verify(module: Module) -> list[Diagnostic]:
    """All rule violations of a module; empty when it is well-formed."""
    findings = list(_weights(module))
    if findings:
        return findings  # shape rules read weights: no use in going on
    findings += _calls(module)
    if findings:
        return findings
    scope = module.scope()
    for graph in module.graphs.values():
        findings += _structure(graph)
        findings += _types(module, graph, scope)
        findings += _interface(module, graph)
    return findings


def verify_or_raise(module: Module, context: str = "") -> None:
    """Raise everything `verify` finds.

    Args:
        module: Module to check.
        context: What has just happened to the module, for the message.

    Raises:
        VerifyError: The module is not well-formed.
    """
    findings = verify(module)
    if findings:
        notes = (context,) if context else ()
        raise VerifyError(*[f.with_note(*notes) for f in findings])


def _where(graph: Graph, node: Node | None = None) -> str:
    if node is None:
        return f"graph @{graph.name}"
    origin = f" ({node.location})" if node.location.origin else ""
    return f"graph @{graph.name}, {node!r}{origin}"


def _structure(graph: Graph) -> Iterator[Diagnostic]:
    defined: dict[Value, None] = {}
    for item in graph.inputs:
        if item.value.producer is not None:
            yield Diagnostic(
                "ir/input-producer", f"input %{item.name} has a producer", _where(graph)
            )
        defined[item.value] = None
    for node in graph.nodes:
        yield from _operand_findings(graph, node, defined)
        for result in node.results:
            if result in defined or result.producer is not node:
                yield Diagnostic(
                    "ir/double-definition", f"%{result.name} is defined twice", _where(graph, node)
                )
            defined[result] = None
    yield from _stale_uses(graph, defined)
    for output in graph.outputs:
        if output.value not in defined:
            yield Diagnostic(
                "ir/undefined-output", f"output {output.name} is not defined", _where(graph)
            )


def _operand_findings(
    graph: Graph, node: Node, defined: Mapping[Value, None]
) -> Iterator[Diagnostic]:
    for index, value in enumerate(node.operands):
        if value not in defined:
            message = f"%{value.name} is not defined before its use"
            yield Diagnostic("ir/use-before-def", message, _where(graph, node))
        if (node, index) not in value.uses:
            message = f"%{value.name} does not know this use"
            yield Diagnostic("ir/lost-use", message, _where(graph, node))


def _stale_uses(graph: Graph, defined: Mapping[Value, None]) -> Iterator[Diagnostic]:
    nodes = set(graph.nodes)
    for value in defined:
        for user, index in value.uses:
            known = user in nodes and index < len(user.operands)
            if not known or user.operands[index] is not value:
                message = f"%{value.name} lists a use that is not there"
                yield Diagnostic("ir/stale-use", message, _where(graph))


def _types(module: Module, graph: Graph, scope: Scope) -> Iterator[Diagnostic]:
    """Runs shape rules again, but not for nodes that fitted before and see the same now."""
    table = module.weights
    for node in graph.nodes:
        operands = tuple(v.type for v in node.operands)
        weights = tuple(table[table.resolve(w)] for w in node.weights)
        recorded = tuple(r.type for r in node.results)
        seen = (node.op, operands, weights, node.attrs, recorded)
        if node.checked == seen and node.op.name != "call":
            continue
        try:
            node.op.check_counts(len(operands), len(weights))
            node.op.check_attributes(node.attrs)
            types = node.op.infer(operands, weights, node.attrs, scope)
        except TypeRuleError as error:
            yield Diagnostic("ir/type-rule", f"{node.op.name}: {error}", _where(graph, node))
            continue
        if types != recorded:
            yield Diagnostic(
                "ir/recorded-type",
                f"results are {', '.join(map(str, types))}, recorded as "
                f"{', '.join(map(str, recorded))}",
                _where(graph, node),
            )
            continue
        node.checked = seen


def _made_from(table: WeightTable, weight: Weight) -> object:
    """The entries whose change could make a weight wrong, itself first; None if one is missing."""
    source = weight.source
    names: tuple[str, ...] = (source.symbol,) if isinstance(source, Alias) else ()
    if isinstance(source, Derived):
        names = source.inputs
    try:
        return (weight, *(table[table.resolve(name)] for name in names))
    except InternalError:
        return None


def _weight(module: Module, symbol: str, weight: Weight) -> Iterator[Diagnostic]:
    table = module.weights
    try:
        end = table[table.resolve(symbol)]
    except InternalError as error:
        yield replace(error.diagnostics[0], where=f"weight @{symbol}")
        return
    if isinstance(weight.source, Alias) and (weight.shape, weight.encoding) != (
        end.shape,
        end.encoding,
    ):
        yield Diagnostic(
            "ir/alias-type",
            f"alias is {weight.encoding} {weight.shape}, its target {end.encoding} {end.shape}",
            f"weight @{symbol}",
        )
    if isinstance(weight.source, Derived):
        yield from _derived(module, symbol, weight.source)
    yield from _parts(symbol, weight)


def _weights(module: Module) -> Iterator[Diagnostic]:
    """Checks every weight, but not those that were right before and are made from the same now."""
    table = module.weights
    for symbol, weight in table.items():
        seen = _made_from(table, weight)
        if seen is not None and table.checked.get(symbol) == seen:
            continue
        findings = list(_weight(module, symbol, weight))
        if findings:
            yield from findings
        else:
            table.checked[symbol] = seen
    for graph in module.graphs.values():
        for node in graph.nodes:
            for name in node.weights:
                if name not in table:
                    yield Diagnostic("ir/unknown-weight", f"no weight @{name}", _where(graph, node))


@functools.lru_cache(maxsize=4096)
def _components(encoding: Encoding, shape: IntShape) -> Mapping[str, Component]:
    """Layers repeat their shapes, and verifying repeats layers."""
    return encoding.components(shape)


def _parts(symbol: str, weight: Weight) -> Iterator[Diagnostic]:
    """Whether the encoding holds the shape, and bytes of its own are those of all components."""
    source, where = weight.source, f"weight @{symbol}"
    if any(d < 0 for d in weight.shape):
        yield Diagnostic("ir/encoding-shape", f"negative dimension in {weight.shape}", where)
        return
    try:
        components = _components(weight.encoding, weight.shape)
    except ValueError as error:
        yield Diagnostic("ir/encoding-shape", str(error), where)
        return
    if isinstance(source, Stored):
        found = [p.component for p in source.parts]
    elif isinstance(source, Inline):
        found = [name for name, _ in source.parts]
    else:
        return
    if sorted(found) != sorted(components):
        yield Diagnostic(
            "ir/weight-parts",
            f"{weight.encoding} needs {', '.join(components)}, found {', '.join(found)}",
            where,
        )
    elif isinstance(source, Inline):
        for name, data in source.parts:
            component = components[name]
            size = prod(component.shape) * component.dtype.numpy.itemsize
            if len(data) != size:
                yield Diagnostic(
                    "ir/weight-parts", f"{name} has {len(data)} bytes, expected {size}", where
                )


def _derived(module: Module, symbol: str, source: Derived) -> Iterator[Diagnostic]:
    table, where = module.weights, f"weight @{symbol}"
    if source.recipe not in RECIPES:
        yield Diagnostic("ir/unknown-recipe", f"unknown recipe {source.recipe}", where)
        return
    missing = [i for i in source.inputs if i not in table]
    if missing:
        yield Diagnostic("ir/unknown-weight", f"derived from unknown weights {missing}", where)
        return
    try:
        inputs = [table[table.resolve(i)] for i in source.inputs]
        result = RECIPES[source.recipe].check(inputs, dict(source.params))
        circular = any(symbol in table.dependencies(i) for i in source.inputs)
    except (ValueError, InternalError) as error:
        yield Diagnostic("ir/recipe", f"{source}: {error}", where)
        return
    if circular:
        yield Diagnostic("ir/weight-cycle", f"{source} is made from @{symbol} itself", where)
    if result != (table[symbol].shape, table[symbol].encoding):
        yield Diagnostic("ir/recipe-type", f"{source} gives {result[1]} {result[0]}", where)


def _calls(module: Module) -> Iterator[Diagnostic]:
    edges = call_graph(module)
    if not nx.is_directed_acyclic_graph(edges):
        cycle = [a for a, _ in nx.find_cycle(edges)]
        yield Diagnostic("ir/recursive-call", f"graphs call each other: {' -> '.join(cycle)}")


def _interface(module: Module, graph: Graph) -> Iterator[Diagnostic]:
    names = [i.name for i in graph.inputs]
    outs = [o.name for o in graph.outputs]
    for kind, seen in (("input", names), ("output", outs)):
        for name in (n for n, count in Counter(seen).items() if count > 1):
            yield Diagnostic("ir/duplicate-name", f"two {kind}s are called {name}", _where(graph))
    types = {i.name: i.value.type for i in graph.inputs}
    overwritten = [o.alias for o in graph.outputs if o.alias is not None]
    for name in (n for n, count in Counter(overwritten).items() if count > 1):
        yield Diagnostic("ir/output-alias", f"two outputs overwrite input {name}", _where(graph))
    for output in graph.outputs:
        if output.alias is not None and types.get(output.alias) != output.value.type:
            yield Diagnostic(
                "ir/output-alias",
                f"output {output.name}: {output.value.type} cannot overwrite input "
                f"{output.alias}: {types.get(output.alias)}",
                _where(graph),
            )
    known = set(module.symbols)
    for item in graph.inputs:
        for symbol in sorted(symbols_of(item.value.type.shape) - known):
            yield Diagnostic(
                "ir/unknown-symbol", f"symbol {symbol} of %{item.name} has no range", _where(graph)
            )


def _heads_bound(module: Module) -> Iterator[Diagnostic]:
    for symbol, weight in module.weights.items():
        if isinstance(weight.source, Unbound):
            yield Diagnostic(
                "bind/unbound-weight",
                f"weight @{symbol} ({weight.source.role}) is bound to nothing",
                f"weight @{symbol}",
                notes=tuple(f"looked for {place}" for place in weight.source.looked_for),
                help="run bind-shared-weights on a module that has the target as well",
            )


def _markov_unrolled(module: Module) -> Iterator[Diagnostic]:
    for graph in module.graphs.values():
        for node in graph.nodes:
            if node.op.name == "markov_chain":
                yield Diagnostic(
                    "ir/markov-loop",
                    "the Markov chain is still one op",
                    _where(graph, node),
                    help="run unroll-markov",
                )


def _states_replayed(module: Module) -> Iterator[Diagnostic]:
    for graph in module.graphs.values():
        for item in graph.by_role(Role.STATE):
            for node in item.value.users():
                if node.op.name not in ("logged_delta_net", "call"):
                    yield Diagnostic(
                        "ir/state-without-log",
                        f"nothing can take back what {node.op.name} does to state %{item.name}",
                        _where(graph, node),
                        help="run add-state-replay; with --explain it says why a layer is left out",
                    )


PROPERTIES: Mapping[str, Callable[[Module], Iterator[Diagnostic]]] = {
    "heads-bound": _heads_bound,
    "markov-unrolled": _markov_unrolled,
    "states-replayed": _states_replayed,
}
"""Named predicates passes require and ensure: no finding means the property holds."""


def check_property(module: Module, name: str) -> list[Diagnostic]:
    """Findings that keep a named property from holding.

    Raises:
        InternalError: No such property.
    """
    if name not in PROPERTIES:
        raise InternalError("ir/unknown-property", f"unknown property {name}")
    return list(PROPERTIES[name](module))
