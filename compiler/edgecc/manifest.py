"""Describes a compiled module as the manifest of its bundle."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

import edgecc
from edgecc.backends.base import Artifact, Holding
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.hub_layout import origin_of
from edgecc.ir.analysis import call_graph
from edgecc.ir.core import Json, Module
from edgecc.ir.weights import Derived, WeightTable
from edgecc.passes.bind_shared_weights import ROLES, embedding_of, head_of


@dataclass(frozen=True, slots=True)
class DeviceBundle:
    """What a bundle has for one device.

    Attributes:
        device: Its name.
        module: After its passes.
        artifact: What its backend wrote.
    """

    device: str
    module: Module
    artifact: Artifact


def describe(
    parts: Sequence[DeviceBundle],
    checkpoints: Mapping[str, Checkpoint],
    *,
    pipeline: str | Mapping[str, str],
    decisions: Sequence[str],
    options: Mapping[str, Json],
) -> dict[str, Any]:
    """The manifest without `format`, `version` and `files`, which the writer adds.

    Holds no times and no absolute paths: the same inputs give the same bytes.

    Args:
        parts: Of each device. `entries` are those of the first; each artifact has its own as well.
        checkpoints: By role.
        pipeline: The passes as text; by device if there are several.
        decisions: What was chosen.
        options: What was asked for.
    """
    first = parts[0]
    metadata = first.module.metadata
    entries = {
        name: {
            "inputs": interface["inputs"],
            "outputs": [{k: v for k, v in o.items() if k != "value"} for o in interface["outputs"]],
        }
        for name, interface in first.artifact.manifest["entries"].items()
    }
    weights = _weights(parts)
    return {
        "producer": f"edgecc {edgecc.__version__}",
        "target": metadata["target"],
        "draft": metadata.get("draft"),
        **({"vision": vision} if (vision := metadata.get("vision")) else {}),
        "limits": metadata["limits"],
        "entries": entries,
        "artifacts": {part.device: dict(part.artifact.manifest) for part in parts},
        "weights": weights,
        "shared": _shared(weights, parts),
        "provenance": {
            "target": _provenance(checkpoints["target"]),
            "draft": _provenance(checkpoints["draft"]) if "draft" in checkpoints else None,
            "pipeline": pipeline if isinstance(pipeline, str) else dict(pipeline),
            "options": dict(options),
        },
        "decisions": list(decisions),
    }


def _provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    origin = origin_of(checkpoint.path)
    return {
        "name": checkpoint.name,
        **({"repository": origin.repository, "commit": origin.commit} if origin else {}),
        "files": checkpoint.file_digests(),
    }


def _weights(parts: Sequence[DeviceBundle]) -> dict[str, dict[str, Any]]:
    """Stored weights by symbol, of all devices."""
    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        for symbol, weight in _device_weights(part.module, part.artifact.weights).items():
            known = found.setdefault(symbol, weight)
            known["file"] = known["file"] or weight["file"]
            known["users"] = sorted({*known["users"], *weight["users"]})
    return found


def _device_weights(module: Module, held: Mapping[str, Holding]) -> dict[str, dict[str, Any]]:
    """Encoding, bytes, origin, role, and the entries that use them."""
    table = module.weights
    users: dict[str, set[str]] = {}
    calls = call_graph(module)
    for entry in module.entries():
        for name in {entry.name, *nx.descendants(calls, entry.name)}:
            for symbol in module.graphs[name].used_weights():
                for stored in _stored(table, symbol, held):
                    users.setdefault(stored, set()).add(entry.name)
    roles = _roles(module, held)
    return {
        symbol: {
            "encoding": str(weight.encoding),
            "shape": list(weight.shape),
            "bytes": weight.nbytes,
            "file": held[symbol].file,
            "origin": table.origin(symbol),
            "users": sorted(users.get(symbol, ())),
            "role": roles.get(symbol, "weight"),
        }
        for symbol, weight in table.items()
        if symbol in held
    }


def _stored(table: WeightTable, symbol: str, tensors: Collection[str]) -> Iterator[str]:
    """The weights of the file a symbol is read from: itself, or what it is made of when loaded.

    A copy, or rows put together at compile time, has bytes of its own in the file and does not use
    those it was made from.
    """
    symbol = table.resolve(symbol)
    source = table[symbol].source
    if symbol in tensors:
        yield symbol
    elif isinstance(source, Derived):
        for name in source.inputs:
            yield from _stored(table, name, tensors)


def _roles(module: Module, tensors: Collection[str]) -> dict[str, str]:
    """Stored weights that are the head or the embedding, wherever passes have moved their users."""
    table = module.weights
    roles: dict[str, str] = {}
    for graph in module.graphs.values():
        heads = list(graph.used_weights()) if graph.name == "lm_head" else [head_of(graph)]
        named = [(s, "lm_head") for s in heads] + [(embedding_of(graph), "embed_tokens")]
        for symbol, role in named:
            for stored in _stored(table, symbol, tensors) if symbol else ():
                roles[stored] = role
    # A draft's own head and embedding: its graph has no input or output that tells them.
    for symbol in table:
        role = symbol.removesuffix(".weight").rpartition(".")[2].partition("-")[0]
        if role in ROLES:
            for stored in _stored(table, symbol, tensors):
                roles.setdefault(stored, role)
    return roles


def _shared(
    weights: Mapping[str, Mapping[str, Any]], parts: Sequence[DeviceBundle]
) -> list[dict[str, Any]]:
    """Weights that several entries use and each device has once; a plan has copies of its own."""
    copied = {s for part in parts for s, h in part.artifact.weights.items() if h.copies > 1}
    return [
        {"symbol": s, "role": w["role"], "users": w["users"], "bytes": w["bytes"]}
        for s, w in weights.items()
        if len(w["users"]) > 1 and s not in copied
    ]
