"""Entry graphs as straight-line programs of model calls, for the manifest."""

from __future__ import annotations

from typing import Any

from edgecc.backends.onnx.emitter import output_names
from edgecc.ir.core import Graph, Module
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.printer import value_names


def program(module: Module, entry: Graph) -> list[dict[str, Any]]:
    """Steps of an entry, each `{"graph", "inputs", "outputs"}`.

    `inputs` and `outputs` map the model's names to values, which are named within the entry; its
    own inputs keep their names. A step that updates a cache which a later step updates again also
    has `updates`: outputs by name, and the inputs in whose buffers they lie. An entry without calls
    is one step that runs its own model.
    """
    names = value_names(entry)
    returned = {o.value for o in entry.outputs}
    if not list(entry.callees()):
        return [
            {
                "graph": entry.name,
                "inputs": {i.name: names[i.value] for i in entry.inputs},
                "outputs": dict(
                    zip(output_names(entry), (names[o.value] for o in entry.outputs), strict=True)
                ),
            }
        ]
    steps = []
    for node in entry.nodes:
        attrs = node.attrs
        assert isinstance(attrs, CallAttributes)
        callee = module.graphs[attrs.callee]
        pairs = zip(callee.inputs, node.operands, strict=True)
        results = list(zip(output_names(callee), node.results, callee.outputs, strict=True))
        updates = {n: o.alias for n, v, o in results if o.alias and v not in returned}
        steps.append(
            {
                "graph": callee.name,
                "inputs": {i.name: names[v] for i, v in pairs},
                "outputs": {name: names[v] for name, v, _ in results},
                **({"updates": updates} if updates else {}),
            }
        )
    return steps


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
