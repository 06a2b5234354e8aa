"""Builds the engines of a legalized module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from edgecc.backends.base import Artifact, Progress
from edgecc.backends.cache import ArtifactCache
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
)
from edgecc.backends.tensorrt.builder import Profile, Session
from edgecc.backends.tensorrt.emitter import Emitter
from edgecc.backends.tensorrt.engines import Engines, Facts, Job
from edgecc.backends.tensorrt.estimate import Estimate, estimate
from edgecc.backends.tensorrt.keys import engine_key
from edgecc.backends.tensorrt.library import load_library
from edgecc.backends.tensorrt.profiles import fixed_sizes, profiles
from edgecc.backends.tensorrt.weights import as_json
from edgecc.devices import Device
from edgecc.ir.core import Graph, Module
from edgecc.ir.weights import Derived

ENGINE_FOLDER = "engines"


def lower(
    module: Module,
    device: Device,
    directory: Path,
    progress: Progress,
    before_build: Callable[[Sequence[Estimate]], None],
    cache: ArtifactCache | None = None,
) -> Artifact:
    """Write `engines/<device>-<graph>.plan` for each graph without calls.

    Weights are constants of the plans. A weight that two entries use is in the plan of one graph,
    which both call: `outline-shared` sees to that.

    Args:
        module: Legalized for the device.
        device: Names the builder's package and the GPUs.
        directory: Bundle being written.
        progress: Told about each engine.
        before_build: Called once, with the estimates of the engines that the cache does not have:
            the last chance to check the graphs.
        cache: Where engines are taken from and kept; None builds all of them.

    Returns:
        The artifact: its manifest holds programs, engines with their profiles, and what precision
        each weight is stored in.

    Raises:
        UnsupportedError: The package is not installed, or the builder refuses the network.
        LegalizeError: An op or encoding has no lowering.
        ResourceError: The disk refused, or memory ran out.
        BackendError: The builder crashed.
    """
    library = load_library(device.library)
    with storage_errors(directory):
        (directory / ENGINE_FOLDER).mkdir(exist_ok=True)
    leaves = [g for g in module.graphs.values() if not list(g.callees())]
    made = Engines(directory, cache or ArtifactCache(None), progress)
    engines = made.make([_job(library, device, module, g) for g in leaves], before_build)
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
    return Artifact(manifest, tuple(e["file"] for e in engines.values()), tuple(made.made))


def estimates(module: Module) -> list[Estimate]:
    """What building each engine would take, without a cache."""
    found = []
    for graph in module.graphs.values():
        if not list(graph.callees()):
            ranges = profiles(module, graph, fixed_sizes(module, graph))
            found.append(estimate(module, graph, len(ranges), list(graph.used_weights())))
    return found


def _job(library: Any, device: Device, module: Module, graph: Graph) -> Job:
    """What it takes to make the engine of one graph."""
    sizes = fixed_sizes(module, graph)
    ranges = profiles(module, graph, sizes)
    weights = list(graph.used_weights())
    return Job(
        f"{ENGINE_FOLDER}/{device.name}-{graph.name}.plan",
        lambda: engine_key(library, device, module, graph, sizes, ranges, weights),
        lambda path, report: build(Session(library, device), module, graph, path, report),
        estimate(module, graph, len(ranges), weights),
    )


def build(session: Session, module: Module, graph: Graph, path: Path, progress: Progress) -> Facts:
    """Write the plan of one graph.

    Args:
        session: The builder.
        module: Owner of the graph.
        graph: Without calls.
        path: The new file.
        progress: Told about the builder's phases.

    Returns:
        What the manifest says about the engine.

    Raises:
        UnsupportedError: The builder refuses the network.
        LegalizeError: An op or encoding has no lowering.
        ResourceError: The disk refused, or memory ran out.
    """
    sizes = fixed_sizes(module, graph)
    network = session.network(graph.name)
    emitter = Emitter(session.trt, network, module, graph, sizes)
    emitter.lower()
    made = profiles(module, graph, sizes)
    plan = session.build(emitter, made, progress)
    with storage_errors(path), path.open("wb") as file:
        file.write(plan)
    forms = as_json(emitter.forms)
    return {
        "bytes": plan.nbytes,
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
