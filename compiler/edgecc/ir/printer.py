"""Module to text. One uniform statement for every op; printing reads no weight bytes.

```
%q = linear(%x, @target.layers.0.q_proj.weight) : f32[b, t, 512]  loc("target/...: q_proj.weight")
```
Attributes print in declaration order and defaults are left out. Value names are made unique per
graph in order of definition, so the same module always prints the same text.
"""

from __future__ import annotations

import dataclasses
import json
import re

from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops import Attributes
from edgecc.ir.weights import Alias, Derived, Inline, Stored, Unbound, Weight

FORMAT_VERSION = 1


def print_module(module: Module, *, locations: bool = False) -> str:
    """The module as IR text.

    Args:
        module: Module to print.
        locations: Also print where each node came from.
    """
    lines = [f"edgecc.module v{FORMAT_VERSION} {_quote(module.name)}", ""]
    lines += [f"symbol {name}: {bounds}" for name, bounds in module.symbols.items()]
    lines += [f"metadata {k} = {json.dumps(v, sort_keys=True)}" for k, v in module.metadata.items()]
    lines.append("")
    lines += [f"weight @{symbol} : {_weight(w)}" for symbol, w in module.weights.items()]
    for graph in module.graphs.values():
        lines += ["", *_graph(graph, locations)]
    return "\n".join(lines) + "\n"


def print_node(node: Node, names: dict[Value, str] | None = None, location: bool = False) -> str:
    """One node as a statement."""
    names = names or {}
    label = {v: names.get(v, v.name) for v in (*node.results, *node.operands)}
    arguments = [f"%{label[o]}" for o in node.operands] + [f"@{w}" for w in node.weights]
    text = ", ".join(f"%{label[r]}" for r in node.results)
    text += f" = {node.op.name}({', '.join(arguments)})"
    text += print_attributes(node.attrs)
    text += " : " + ", ".join(str(r.type) for r in node.results)
    if location and str(node.location):
        text += f"  loc({_quote(str(node.location))})"
    return text


def print_attributes(attrs: Attributes) -> str:
    """` {name = value, ...}` with defaults left out, or nothing."""
    fields = []
    for f in dataclasses.fields(attrs):
        value = getattr(attrs, f.name)
        if value != f.default:
            fields.append(f"{f.name} = {_literal(value)}")
    return " {" + ", ".join(fields) + "}" if fields else ""


def _graph(graph: Graph, locations: bool) -> list[str]:
    names = value_names(graph)
    inputs = [f"  %{names[i.value]}: {i.value.type} {i.role.value}" for i in graph.inputs]
    body = [f"  {print_node(n, names, locations)}" for n in graph.nodes]
    outputs = []
    for o in graph.outputs:
        alias = f" alias %{o.alias}" if o.alias else ""
        outputs.append(f"    {o.name} = %{names[o.value]} {o.role.value}{alias}")
    return [
        f"graph @{graph.name}(",
        ",\n".join(inputs),
        ") {",
        *body,
        "  return",
        ",\n".join(outputs),
        "}",
    ]


def value_names(graph: Graph) -> dict[Value, str]:
    """Unique printable names of all values of a graph, in order of definition."""
    taken: set[str] = set()
    names: dict[Value, str] = {}
    counters: dict[str, int] = {}
    values = [i.value for i in graph.inputs] + [r for n in graph.nodes for r in n.results]
    for value in values:
        base = re.sub(r"[^A-Za-z0-9_.]", "_", value.name) or "v"
        name = base
        while name in taken:
            counters[base] = counters.get(base, 0) + 1
            name = f"{base}_{counters[base]}"
        taken.add(name)
        names[value] = name
    return names


def _weight(weight: Weight) -> str:
    shape = "[" + ", ".join(map(str, weight.shape)) + "]"
    return f"{weight.encoding} {shape} = {_source(weight)}"


def _source(weight: Weight) -> str:
    source = weight.source
    if isinstance(source, Stored):
        parts = ", ".join(f"{p.component}: {_quote(p.file + '#' + p.key)}" for p in source.parts)
        return f"stored {_quote(source.checkpoint)} {{{parts}}}"
    if isinstance(source, Derived):
        return f"derived {source}"
    if isinstance(source, Alias):
        return f"alias @{source.symbol}"
    if isinstance(source, Unbound):
        return f"unbound {_quote(source.role)}"
    assert isinstance(source, Inline)
    return "inline {" + ", ".join(f"{n}: 0x{d.hex()}" for n, d in source.parts) + "}"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quote(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_literal(v) for v in value) + "]"
    return repr(value)


def _quote(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
