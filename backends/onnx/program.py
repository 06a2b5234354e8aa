"""Entry graphs as straight-line programs of model calls, for the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgecc.backends.interface import slot_name
from edgecc.backends.onnx.emitter import by_slot, output_names, sequences
from edgecc.devices import Dialect
from edgecc.ir.core import Graph, Module, Value
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.printer import value_names


def program(module: Module, entry: Graph, dialect: Dialect | None = None) -> list[dict[str, Any]]:
    """Steps of an entry, each `{"graph", "inputs", "outputs"}`.

    `inputs` and `outputs` map the model's names to values, which are named within the entry; its
    own inputs keep their names. A step that updates a cache which a later step updates again also
    has `updates`: the value, and the one in whose buffer it lies. An entry without calls is one
    step that runs its own model. What a model has once for each slot has the slot in both names.

    Args:
        module: Owner of the entry.
        entry: The graph.
        dialect: Of the models; None for engines that are no models.
    """
    names = value_names(entry)
    returned = {o.value for o in entry.outputs}
    if not list(entry.callees()):
        return [_step(module, entry, dialect, names, [i.value for i in entry.inputs], None)]
    steps = []
    for node in entry.nodes:
        attrs = node.attrs
        assert isinstance(attrs, CallAttributes)
        callee = module.graphs[attrs.callee]
        step = _step(module, callee, dialect, names, node.operands, node.results)
        given = {i.name: names[v] for i, v in zip(callee.inputs, node.operands, strict=True)}
        results = zip(callee.outputs, node.results, strict=True)
        updates = {names[v]: given[o.alias] for o, v in results if o.alias and v not in returned}
        steps.append({**step, "updates": updates} if updates else step)
    return steps


def _step(
    module: Module,
    graph: Graph,
    dialect: Dialect | None,
    names: Mapping[Value, str],
    operands: Sequence[Value],
    results: Sequence[Value] | None,
) -> dict[str, Any]:
    """A run of a graph's model: with values of the entry, which are its own where None."""
    apart = by_slot(module, graph, dialect) if dialect is not None else frozenset()
    slots = range(sequences(module))

    def bound(own: Iterable[tuple[str, Value]], values: Iterable[Value]) -> dict[str, str]:
        found: dict[str, str] = {}
        for (name, inner), outer in zip(own, values, strict=True):
            if inner in apart:
                found.update((slot_name(name, i), slot_name(names[outer], i)) for i in slots)
            else:
                found[name] = names[outer]
        return found

    made = [o.value for o in graph.outputs]
    return {
        "graph": graph.name,
        "inputs": bound(((i.name, i.value) for i in graph.inputs), operands),
        "outputs": bound(
            zip(output_names(graph), made, strict=True), made if results is None else results
        ),
    }


def interface(entry: Graph) -> dict[str, list[dict[str, Any]]]:
    """Inputs and outputs of an entry for the manifest: name, role, dtype, shape, alias, value."""
    names = value_names(entry)
    return {
        "inputs": [
            {
                "name": i.name,
                "role": i.role.value,
                "dtype": i.value.type.dtype.value,
                "shape": [d if isinstance(d, int) else str(d) for d in i.value.type.shape],
            }
            for i in entry.inputs
        ],
        "outputs": [
            {
                "name": o.name,
                "role": o.role.value,
                "dtype": o.value.type.dtype.value,
                "shape": [d if isinstance(d, int) else str(d) for d in o.value.type.shape],
                "alias": o.alias,
                "value": names[o.value],
            }
            for o in entry.outputs
        ],
    }
