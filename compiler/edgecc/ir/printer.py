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
from collections.abc import Collection

from edgecc.ir.attributes import print_literal, quote
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.ops import Attributes
from edgecc.ir.weights import Alias, Derived, Stored, Unbound, Weight

FORMAT_VERSION = 1

_SYMBOL = re.compile(r"[A-Za-z0-9_.+/-]+")
_PRINTABLE = re.compile(r"[^A-Za-z0-9_.]")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_NUMBERED = re.compile(r"(?:_[0-9]+)+$")


def print_module(
    module: Module, *, locations: bool = False, hashes: bool | Collection[str] = True
) -> str:
    """The module as IR text.

    Args:
        module: Module to print.
        locations: Also print where each node came from.
        hashes: Print content hashes of weights, as far as they are known: of all, none, or some.
    """
    hashed = module.weights.keys() if hashes is True else hashes or ()
    lines = [f"edgecc.module v{FORMAT_VERSION} {quote(module.name)}", ""]
    lines += [f"symbol {name}: {bounds}" for name, bounds in module.symbols.items()]
    lines += [
        f"metadata {print_name(k)} = {json.dumps(v, sort_keys=True)}"
        for k, v in module.metadata.items()
    ]
    lines += [f"checkpoint {quote(r)} = {quote(p)}" for r, p in module.checkpoints.items()]
    lines += [f"decision {quote(d)}" for d in module.decisions]
    lines.append("")
    lines += [
        f"weight {print_symbol(s)} : {_weight(module, s, s in hashed)}" for s in module.weights
    ]
    for graph in module.graphs.values():
        lines += ["", *_graph(graph, locations)]
    return "\n".join(lines) + "\n"


def print_graph(graph: Graph, *, locations: bool = False) -> str:
    """One graph of a module as text, without the weights and symbols it refers to."""
    return "\n".join(_graph(graph, locations)) + "\n"


def print_node(node: Node, names: dict[Value, str] | None = None, location: bool = False) -> str:
    """One node as a statement."""
    names = names or {}
    label = {v: names.get(v, v.name) for v in (*node.results, *node.operands)}
    arguments = [print_value(label[o]) for o in node.operands] + [
        print_symbol(w) for w in node.weights
    ]
    text = ", ".join(print_value(label[r]) for r in node.results)
    text += f" = {node.op.name}({', '.join(arguments)})"
    text += print_attributes(node.attrs)
    text += " : " + ", ".join(str(r.type) for r in node.results)
    if location and str(node.location):
        text += f"  loc({quote(str(node.location))})"
    return text


def print_attributes(attrs: Attributes) -> str:
    """` {name = value, ...}` with defaults left out, or nothing."""
    fields = []
    for f in dataclasses.fields(attrs):
        value = getattr(attrs, f.name)
        if value != f.default:
            fields.append(f"{f.name} = {print_literal(value)}")
    return " {" + ", ".join(fields) + "}" if fields else ""


def _graph(graph: Graph, locations: bool) -> list[str]:
    names = value_names(graph)
    inputs = [f"  {print_value(i.name)}: {i.value.type} {i.role.value}" for i in graph.inputs]
    body = [f"  {print_node(n, names, locations)}" for n in graph.nodes]
    outputs = []
    for o in graph.outputs:
        alias = "" if o.alias is None else f" alias {print_value(o.alias)}"
        value = print_value(names[o.value])
        outputs.append(f"    {print_name(o.name)} = {value} {o.role.value}{alias}")
    return [
        f"graph {print_symbol(graph.name)}(",
        ",\n".join(inputs),
        ") {",
        *body,
        "  return",
        ",\n".join(outputs),
        "}",
    ]


def value_names(graph: Graph) -> dict[Value, str]:
    """Unique names of all values of a graph, in order of definition.

    Inputs keep their names, which bind them; other names are hints, made unique by a number.
    """
    names = {i.value: i.value.name for i in graph.inputs}
    taken = set(names.values())
    counters: dict[str, int] = {}
    for value in (r for n in graph.nodes for r in n.results):
        base = name_hint(_PRINTABLE.sub("_", value.name)) or "v"
        name = base
        while name in taken:
            counters[base] = counters.get(base, 0) + 1
            name = f"{base}_{counters[base]}"
        taken.add(name)
        names[value] = name
    return names


def name_hint(name: str) -> str:
    """A name without the number that made it unique: what parsing keeps and printing numbers."""
    return _NUMBERED.sub("", name)


def print_value(name: str) -> str:
    """`%name`, quoted when it has characters beyond letters, digits, `_` and `.`."""
    return f"%{name}" if name and not _PRINTABLE.search(name) else f"%{quote(name)}"


def print_name(name: str) -> str:
    """A name as it is, or quoted when it is not a word."""
    return name if _NAME.fullmatch(name) else quote(name)


def print_symbol(symbol: str) -> str:
    """`@symbol`, quoted when it has characters beyond letters, digits and `_.+/-`."""
    return f"@{symbol}" if _SYMBOL.fullmatch(symbol) else f"@{quote(symbol)}"


def _weight(module: Module, symbol: str, hashed: bool) -> str:
    weight = module.weights[symbol]
    text = f"{weight.encoding} {print_literal(weight.shape)} = {_source(weight)}"
    digest = module.weights.known_digest(symbol) if hashed else None
    return f"{text} hash {quote(digest)}" if digest else text


def _source(weight: Weight) -> str:
    source = weight.source
    if isinstance(source, Stored):
        parts = ", ".join(f"{p.component}: {quote(p.file + '#' + p.key)}" for p in source.parts)
        return f"stored {quote(source.checkpoint)} {{{parts}}}"
    if isinstance(source, Derived):
        arguments = [print_symbol(i) for i in source.inputs]
        arguments += [f"{k} = {print_literal(v)}" for k, v in source.params]
        return f"derived {source.recipe}({', '.join(arguments)})"
    if isinstance(source, Alias):
        return f"alias {print_symbol(source.symbol)}"
    if isinstance(source, Unbound):
        places = f" {print_literal(source.looked_for)}" if source.looked_for else ""
        return f"unbound {quote(source.role)}{places}"
    return "inline {" + ", ".join(f"{n}: 0x{d.hex()}" for n, d in source.parts) + "}"
