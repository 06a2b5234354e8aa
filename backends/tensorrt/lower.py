"""Builds the engines of a legalized module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgecc.backends.base import Artifact, Progress
from edgecc.backends.onnx.emitter import output_names
from edgecc.backends.onnx.program import interface, program
from edgecc.backends.storage import storage_errors
from edgecc.backends.stored_weights import WEIGHT_FILE, places, tensor_name
from edgecc.backends.tensorrt import (  # noqa: F401 (registers the lowerings)
    attention,
    constant,
    elementwise,
    matmul,
    norm,
    sampling,
    shape,
)
from edgecc.backends.tensorrt.builder import Profile, Session
from edgecc.backends.tensorrt.emitter import Emitter, WeightUse
from edgecc.backends.tensorrt.library import load_library, uncollected
from edgecc.backends.tensorrt.operands import Operand
from edgecc.backends.tensorrt.policy import WeightPlan
from edgecc.backends.tensorrt.profiles import fixed_sizes, profiles, verify_rows
from edgecc.backends.weight_file import WrittenFile
from edgecc.devices import Device
from edgecc.ir.core import Graph, Module

ENGINE_FOLDER = "engines"


def lower(
    module: Module,
    device: Device,
    directory: Path,
    weights: WeightPlan,
    file: WrittenFile | None,
    progress: Progress,
) -> Artifact:
    """Write `engines/<device>-<graph>.plan` for each graph without calls.

    Args:
        module: Legalized for the device.
        device: Names the builder's package and the GPUs.
        directory: Bundle being written.
        weights: Which weights are inputs.
        file: The weight file with the tensors those are made of; None if there are none.
        progress: Told about the builder's steps.

    Returns:
        The artifact: its manifest holds programs, engines with their profiles, what precision each
        weight has, and how bound inputs are made of the tensors of the weight file.

    Raises:
        UnsupportedError: The package is not installed, or the builder refuses the network.
        LegalizeError: An op or encoding has no lowering.
        ResourceError: The disk refused.
    """
    library = load_library(device.library)
    session = Session(library, device)
    engines: dict[str, Any] = {}
    files = []
    with storage_errors(directory):
        (directory / ENGINE_FOLDER).mkdir(exist_ok=True)
    for graph in module.graphs.values():
        if list(graph.callees()):
            continue
        relative = f"{ENGINE_FOLDER}/{device.name}-{graph.name}.plan"
        plan, engines[graph.name] = build(session, module, graph, weights.bound, progress)
        engines[graph.name] = {"file": relative, "bytes": len(plan), **engines[graph.name]}
        with storage_errors(directory / relative):
            (directory / relative).write_bytes(plan)
        files.append(relative)
    entries = module.entries()
    manifest = {
        "backend": device.backend,
        "library": device.library,
        "library_version": str(library.__version__),
        "compute_capabilities": list(device.compute_capabilities),
        "compute_type": device.compute_type,
        "min_rows": verify_rows(module),
        "weights": weights.policy.value,
        "weight_file": WEIGHT_FILE if file else None,
        "engines": engines,
        "programs": {e.name: program(module, e) for e in entries},
        "entries": {e.name: interface(e) for e in entries},
        "tensors": places(weights.tensors(module), file) if file else {},
    }
    return Artifact(manifest, tuple(files), weights.held(module))


def build(
    session: Session,
    module: Module,
    graph: Graph,
    bound: Sequence[Operand],
    progress: Progress,
) -> tuple[bytes, dict[str, Any]]:
    """The plan of one graph, and what the manifest says about it.

    Args:
        session: The builder.
        module: Owner of the graph.
        graph: Without calls.
        bound: Arrays of weights that are inputs.
        progress: Told about the builder's steps.

    Raises:
        UnsupportedError: The builder refuses the network.
        LegalizeError: An op or encoding has no lowering.
    """
    sizes = fixed_sizes(module, graph)
    made = profiles(module, graph, sizes)
    with uncollected():
        network = session.network(graph.name)
        emitter = Emitter(session.trt, network, module, graph, sizes, frozenset(bound))
        emitter.lower()
        plan = session.build(emitter, made, progress)
    uses = {symbol: _use(use) for symbol, use in emitter.weights.items()}
    return plan, {
        "inputs": [
            _port(i.name, i.value.type.dtype.value, emitter.shape(i.value)) for i in graph.inputs
        ],
        "outputs": [
            {
                **_port(name, o.value.type.dtype.value, emitter.shape(o.value)),
                "alias": o.alias,
            }
            for name, o in zip(output_names(graph), graph.outputs, strict=True)
        ],
        "bound": bound_inputs(emitter),
        "profiles": [_profile(p) for p in made],
        "weights": uses,
        "weight_bytes": sum(use["bytes"] for use in uses.values()),
        "bound_bytes": sum(o.nbytes for o in emitter.inputs.values()),
    }


def _port(name: str, dtype: str, sizes: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(sizes)}


def bound_inputs(emitter: Emitter) -> list[dict[str, Any]]:
    """Inputs of a network that the runtime fills from the weight file: see `bound_weights`."""
    return [
        {
            **_port(operand.name, operand.dtype.value, operand.shape),
            "form": operand.form,
            "tensors": {c: tensor_name(operand.symbol, c) for c in operand.components},
            **({"block": list(operand.block)} if operand.block else {}),
        }
        for operand in emitter.inputs.values()
    ]


def _use(use: WeightUse) -> dict[str, Any]:
    return {
        "precision": use.precision,
        "bytes": sum(o.nbytes for o in use.constant),
        "bound_bytes": sum(o.nbytes for o in use.bound),
    }


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "shapes": {n: [list(s) for s in shapes] for n, shapes in profile.shapes.items()},
    }
