"""Where a tensor or a node comes from, what touched it, and who uses it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edgecc.backends.bundle import Bundle
from edgecc.errors import InputError, did_you_mean
from edgecc.ir.core import Graph, Module, Node, Value
from edgecc.ir.parser import read_module
from edgecc.ir.printer import print_node, print_symbol, value_names
from edgecc.ir.weights import Alias, Derived, Unbound

_LOWERED = re.compile(r"ir/lowered(-\w+)?\.eir")


def explain(path: Path, name: str) -> str:
    """Explain a name of a bundle or of an IR file, as text of several lines.

    Args:
        path: A bundle directory, or a file of IR text.
        name: A weight (`@symbol`), or in IR text a value (`%x`, or `@graph/%x`); globs such as
            `*lm_head*` are allowed, and `@` and `%` may be left out.

    Raises:
        InputError: The path is neither, or holds nothing of that name; near names are listed.
    """
    if path.is_dir():
        return _explain_bundle(Bundle.open(path), name)
    if not path.exists():
        raise InputError(
            "explain/no-such-path",
            f"{path} does not exist",
            help="give the folder of a bundle, or a file of IR text",
        )
    return _explain_text([path], name)


def _explain_text(paths: list[Path], name: str) -> str:
    """Explain a name by the first IR text that has it."""
    known: list[str] = []
    for path in paths:
        module = read_module(path)
        found = [*_weights(module, name), *_values(module, name)]
        if found:
            return "\n\n".join(found)
        known += [*module.weights, *(n for g in module.graphs.values() for n in _names(g))]
    raise _unknown(name, str(paths[0]), known)


def _unknown(name: str, where: str, known: list[str]) -> InputError:
    bare = name.lstrip("@%").rpartition("/%")[2]
    near = did_you_mean(bare, known)
    help = near.partition("? valid")[0] + "?" if near.startswith("did you") else ""
    if not help:
        help = "edgecc inspect --weights lists weights" if "*" in name else "try a glob: '*x*'"
    return InputError("explain/unknown-name", f"nothing is called {name!r}", where=where, help=help)


def _matches(text: str, pattern: str) -> bool:
    return text == pattern or fnmatch.fnmatchcase(text, pattern)


# --- bundles ------------------------------------------------------------------------------------


def _explain_bundle(bundle: Bundle, name: str) -> str:
    weights: dict[str, Any] = bundle.manifest["weights"]
    pattern = name.removeprefix("@")
    found = [s for s in weights if _matches(s, pattern)]
    if not found:  # aliases, values, and what was fused into other weights are in the IR only
        names = [n for n in bundle.manifest["files"] if _LOWERED.fullmatch(n)]
        texts = [bundle.file(n) for n in (*names, "ir/lifted.eir")]
        bare = pattern.rpartition("/%")[2].removeprefix("%")
        decided = [f"  decided  {d}" for d in bundle.manifest["decisions"] if bare in d]
        return "\n".join([_explain_text(texts, name), *decided])
    decisions = bundle.manifest["decisions"]
    return "\n\n".join(_bundle_weight(s, weights[s], decisions) for s in found)


def _bundle_weight(symbol: str, weight: dict[str, Any], decisions: list[str]) -> str:
    shape = " x ".join(map(str, weight["shape"]))
    lines = [
        f"weight {print_symbol(symbol)}: {weight['encoding']}, {shape}, {weight['bytes']:,} bytes",
        f"  role     {weight.get('role', 'weight')}",
        f"  from     {weight['origin']}",
        f"  in       {weight['file'] or 'the engines'}",
        f"  used by  {', '.join(weight['users']) or 'nothing'}",
    ]
    lines += [f"  decided  {d}" for d in decisions if symbol in d]
    return "\n".join(lines)


# --- IR text ------------------------------------------------------------------------------------


def _weights(module: Module, name: str) -> Iterator[str]:
    if name.startswith("%") or "/%" in name:
        return
    pattern = name.removeprefix("@")
    for symbol in module.weights:
        if _matches(symbol, pattern):
            yield _weight(module, symbol)


def _weight(module: Module, symbol: str) -> str:
    weight = module.weights[symbol]
    shape = " x ".join(map(str, weight.shape))
    lines = [f"weight {print_symbol(symbol)}: {weight.encoding}, {shape}, {weight.nbytes:,} bytes"]
    lines += _sources(module, symbol, 1)
    lines += _made_into(module, symbol)
    names = {g: value_names(graph) for g, graph in module.graphs.items()}
    table, resolved = module.weights, module.weights.resolve(symbol)
    for graph_name, graph in module.graphs.items():
        for node in graph.nodes:
            if resolved in map(table.resolve, node.weights):
                lines.append(f"  used in @{graph_name}: {print_node(node, names[graph_name])}")
    lines += [f"  decided: {d}" for d in module.decisions if symbol in d]
    return "\n".join(lines)


def _made_into(module: Module, symbol: str) -> list[str]:
    """Weights made directly from this one."""
    lines = []
    for other, weight in module.weights.items():
        source = weight.source
        if isinstance(source, Alias) and source.symbol == symbol:
            lines.append(f"  also called {print_symbol(other)}")
        elif isinstance(source, Derived) and symbol in source.inputs:
            lines.append(f"  goes into {print_symbol(other)} ({source.recipe})")
    return lines


def _sources(module: Module, symbol: str, depth: int) -> list[str]:
    """The chain from a weight to the stored tensors it is made from, indented by depth."""
    source = module.weights[symbol].source
    pad = "  " * depth
    if isinstance(source, Alias):
        line = f"{pad}is another name of {print_symbol(source.symbol)}"
        return [line, *_sources(module, source.symbol, depth + 1)]
    if isinstance(source, Derived):
        count = len(source.inputs)
        noun = "weight" if count == 1 else "weights"
        lines = [f"{pad}is made by {source.recipe} from {count} {noun}"]
        for item in source.inputs:
            lines.append(f"{pad}  {print_symbol(item)}: {module.weights[item].encoding}")
            lines += _sources(module, item, depth + 2)
        return lines
    if isinstance(source, Unbound):
        return [f"{pad}is unbound: waits for a {source.role}"]
    return [f"{pad}is stored in {source}"]


def _names(graph: Graph) -> list[str]:
    return list(value_names(graph).values())


def _values(module: Module, name: str) -> Iterator[str]:
    if name.startswith("@") and "/%" not in name:
        return
    graph_part, slash, value_part = name.rpartition("/%")
    pattern = value_part.removeprefix("%")
    for graph_name, graph in module.graphs.items():
        if slash and not _matches(graph_name, graph_part.removeprefix("@")):
            continue
        names = value_names(graph)
        for value, printed in names.items():
            if _matches(printed, pattern):
                yield _value(graph, value, names)


def _value(graph: Graph, value: Value, names: dict[Value, str]) -> str:
    lines = [f"value %{names[value]}: {value.type} in @{graph.name}"]
    producer = value.producer
    if producer is None:
        role = next(i.role.value for i in graph.inputs if i.value is value)
        lines.append(f"  is an input: {role}")
    else:
        lines.append(f"  made by  {print_node(producer, names)}")
        lines += _history(producer)
        for operand in producer.operands:
            made = "an input" if operand.producer is None else operand.producer.op.name
            lines.append(f"  reads    %{names[operand]}: {operand.type}, made by {made}")
    lines += [f"  used in  {print_node(user, names)}" for user in value.users()]
    lines += [f"  returned as {o.name} ({o.role.value})" for o in graph.outputs if o.value is value]
    return "\n".join(lines)


def _history(node: Node) -> list[str]:
    lines = [f"  from     {node.location.origin}"] if node.location.origin else []
    if node.location.passes:
        lines.append(f"  passes   {', '.join(node.location.passes)}")
    return lines
