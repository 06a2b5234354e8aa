"""Builds the engines of a legalized module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgecc.backends.base import Artifact, Progress
from edgecc.backends.onnx.emitter import output_names
from edgecc.backends.onnx.program import interface, program
from edgecc.backends.onnx.storage import SAFETENSORS_DTYPES
from edgecc.backends.storage import storage_errors
from edgecc.backends.tensorrt import (  # noqa: F401 (registers the lowerings)
    attention,
    constant,
    elementwise,
    matmul,
    norm,
    sampling,
    shape,
    vision,
)
from edgecc.backends.tensorrt.builder import Profile, Session
from edgecc.backends.tensorrt.emitter import Emitter
from edgecc.backends.tensorrt.library import load_library
from edgecc.backends.tensorrt.profiles import fixed_sizes, profiles
from edgecc.backends.tensorrt.weights import as_json
from edgecc.devices import Device
from edgecc.ir.core import Graph, Module
from edgecc.ir.weights import Derived

ENGINE_FOLDER = "engines"


def lower(module: Module, device: Device, directory: Path, progress: Progress) -> Artifact:
    """Write `engines/<device>-<graph>.plan` for each graph without calls.

    Weights are constants of the plans. A weight that two entries use is in the plan of one graph,
    which both call: `outline-shared` sees to that.

    Args:
        module: Legalized for the device.
        device: Names the builder's package and the GPUs.
        directory: Bundle being written.
        progress: Told about the builder's steps.

    Returns:
        The artifact: its manifest holds programs, engines with their profiles, and what precision
        each weight is stored in.

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
        plan, engines[graph.name] = build(session, module, graph, progress)
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
        "weights": "embed",
        "weight_file": None,
        "engines": engines,
        "programs": {e.name: program(module, e) for e in entries},
        "entries": {e.name: interface(e) for e in entries},
        "tensors": _tensors(module),
    }
    return Artifact(manifest, tuple(files))


def build(
    session: Session, module: Module, graph: Graph, progress: Progress
) -> tuple[bytes, dict[str, Any]]:
    """The plan of one graph, and what the manifest says about it.

    Raises:
        UnsupportedError: The builder refuses the network.
        LegalizeError: An op or encoding has no lowering.
    """
    sizes = fixed_sizes(module, graph)
    network = session.network(graph.name)
    emitter = Emitter(session.trt, network, module, graph, sizes)
    emitter.lower()
    made = profiles(module, graph, sizes)
    plan = session.build(emitter, made, progress)
    forms = as_json(emitter.forms)
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
        "profiles": [_profile(p) for p in made],
        "weights": forms,
        "weight_bytes": sum(f["bytes"] for f in forms.values()),
    }


def _port(name: str, dtype: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(sizes)}


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "shapes": {n: [list(s) for s in shapes] for n, shapes in profile.shapes.items()},
    }


def _tensors(module: Module) -> dict[str, Any]:
    """The weights the plans hold, by the symbol of what they are made of, and which plans do."""
    found: dict[str, Any] = {}
    for graph in module.graphs.values():
        for symbol in graph.used_weights():
            name = module.weights.resolve(symbol)
            source = module.weights[name].source
            if isinstance(source, Derived) and source.recipe in (
                "int8_codes",
                "dequantize",
                "narrow",
            ):
                name = module.weights.resolve(source.inputs[0])
            weight = module.weights[name]
            part = weight.encoding.components(weight.shape)["weight"].dtype
            made = {"dtype": SAFETENSORS_DTYPES[part], "shape": list(weight.shape), "engines": []}
            engines = found.setdefault(name, made)["engines"]
            if graph.name not in engines:
                engines.append(graph.name)
    return found
