"""Builds the engines of a legalized module."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgecc.backends.base import Artifact, Progress
from edgecc.backends.cache import CacheKey
from edgecc.backends.onnx.emitter import output_names, sequences
from edgecc.backends.onnx.program import interface, program
from edgecc.backends.storage import storage_errors
from edgecc.backends.stored_weights import WEIGHT_FILE, places, tensor_name
from edgecc.backends.tensorrt import (  # noqa: F401 (registers the lowerings)
    attention,
    constant,
    elementwise,
    matmul,
    norm,
    quantization,
    replay,
    sampling,
    shape,
    state,
    vision,
)
from edgecc.backends.tensorrt.builder import Profile, Session
from edgecc.backends.tensorrt.emitter import Emitter, WeightUse
from edgecc.backends.tensorrt.engines import ENGINE_FOLDER, Engines, Facts, Job
from edgecc.backends.tensorrt.estimate import estimate
from edgecc.backends.tensorrt.keys import engine_key
from edgecc.backends.tensorrt.keys import ranges as profile_ranges
from edgecc.backends.tensorrt.library import load_library, uncollected
from edgecc.backends.tensorrt.names import PlanNames, network_digest
from edgecc.backends.tensorrt.operands import Operand, graph_operands
from edgecc.backends.tensorrt.policy import WeightPlan
from edgecc.backends.tensorrt.profiles import fixed_sizes, profiles, verify_rows
from edgecc.backends.weight_file import WrittenFile
from edgecc.devices import Device
from edgecc.ir.core import Graph, Module, Output
from edgecc.ir.ops.quantization import FakeQuantizeAttributes
from edgecc.roles import Role


def jobs(module: Module, device: Device, weights: WeightPlan) -> list[Job]:
    """One engine for each graph without calls, and what making it takes.

    Args:
        module: Legalized for the device.
        device: Names the builder's package and the GPUs.
        weights: Which weights are inputs.

    Raises:
        LegalizeError: An encoding has no form in TensorRT.
    """
    leaves = (g for g in module.graphs.values() if not list(g.callees()))
    return [_job(module, device, graph, weights) for graph in leaves]


def _job(module: Module, device: Device, graph: Graph, weights: WeightPlan) -> Job:
    sizes = fixed_sizes(module, graph)
    ranges = profiles(module, graph, sizes)
    taken = list(graph_operands(module, graph))
    bound = frozenset(weights.bound)
    names = PlanNames(module, graph)
    inputs = list(dict.fromkeys(names.input(o) for o in taken if o in bound))
    held = [o for o in dict.fromkeys(taken) if o not in bound]
    known = [w for n in graph.nodes if n.op.name == "constant" for w in n.weights]

    def key() -> CacheKey | None:
        library = load_library(device.library)
        symbols = [*(o.symbol for o in held), *known]
        return engine_key(library, device, module, graph, sizes, ranges, symbols, inputs)

    def make(path: Path, report: Progress) -> Facts:
        session = Session(load_library(device.library), device)
        return build(session, module, graph, weights.bound, path, report)

    file = f"{ENGINE_FOLDER}/{device.name}-{graph.name}.plan"
    expected = estimate(graph, device.name, len(ranges), held)
    return Job(file, key, make, expected, _network(module, graph, sizes, ranges, held, inputs))


def _network(
    module: Module,
    graph: Graph,
    sizes: Mapping[str, int],
    profiles: Sequence[Profile],
    held: Sequence[Operand],
    inputs: Sequence[str],
) -> str:
    """What two graphs of one module have in common if one engine serves both."""
    known = [w for n in graph.nodes if n.op.name == "constant" for w in n.weights]
    constants = [*(o.symbol for o in held), *map(module.weights.resolve, known)]
    digest = network_digest(module, graph, sizes)
    return json.dumps([digest, profile_ranges(profiles), list(inputs), constants])


def lower(
    module: Module,
    device: Device,
    weights: WeightPlan,
    file: WrittenFile | None,
    engines: Engines,
) -> Artifact:
    """Write `engines/<device>-<graph>.plan` for each graph without calls.

    Args:
        module: Legalized for the device.
        device: Names the builder's package and the GPUs.
        weights: Which weights are inputs.
        file: The weight file with the tensors those are made of; None if there are none.
        engines: Has looked for the jobs.

    Returns:
        The artifact: its manifest holds programs, engines with their profiles, what precision each
        weight has, and how bound inputs are made of the tensors of the weight file.

    Raises:
        UnsupportedError: The package is not installed, or the builder refuses the network.
        LegalizeError: An op or encoding has no lowering.
        ResourceError: The disk refused, or memory ran out.
        BackendError: The builder crashed.
    """
    library = load_library(device.library)
    made = {n: _own(module, n, facts) for n, facts in engines.build().items()}
    entries = module.entries()
    manifest = {
        "backend": device.backend,
        "library": device.library,
        "library_version": str(library.__version__),
        "compute_capabilities": list(device.compute_capabilities),
        "compute_type": device.compute_type,
        "activations": _activations(module),
        "min_rows": verify_rows(module),
        "max_batch_size": sequences(module),
        "weights": weights.policy.value,
        "weight_file": WEIGHT_FILE if file else None,
        "engines": made,
        "programs": {e.name: program(module, e) for e in entries},
        "entries": {e.name: interface(e) for e in entries},
        "tensors": places(weights.tensors(module), file) if file else {},
    }
    files = tuple(dict.fromkeys(facts["file"] for facts in made.values()))
    return Artifact(manifest, files, weights.held(module), tuple(engines.made))


def _activations(module: Module) -> list[str]:
    """Encodings that what layers read is rounded to."""
    nodes = (n for g in module.graphs.values() for n in g.nodes)
    found = {n.attrs.encoding for n in nodes if isinstance(n.attrs, FakeQuantizeAttributes)}
    return sorted(found)


def build(
    session: Session,
    module: Module,
    graph: Graph,
    bound: Sequence[Operand],
    path: Path,
    progress: Progress,
) -> Facts:
    """Write the plan of one graph.

    Args:
        session: The builder.
        module: Owner of the graph.
        graph: Without calls.
        bound: Arrays of weights that are inputs.
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
    made = profiles(module, graph, sizes)
    with uncollected():
        network = session.network(PlanNames(module, graph).graph)
        emitter = Emitter(session.trt, network, module, graph, sizes, frozenset(bound))
        emitter.lower()
        plan = session.build(emitter, made, progress)
    with storage_errors(path), path.open("wb") as file:
        file.write(plan)
    uses = {emitter.names.weight(symbol): _use(use) for symbol, use in emitter.weights.items()}
    return {
        "bytes": plan.nbytes,
        "inputs": [
            _port(i.name, i.value.type.dtype.value, emitter.shape(i.value)) for i in graph.inputs
        ],
        "outputs": [
            {
                **_port(name, o.value.type.dtype.value, emitter.shape(o.value)),
                "alias": alias(o),
            }
            for name, o in zip(output_names(graph), graph.outputs, strict=True)
        ],
        "bound": bound_inputs(emitter),
        "profiles": [_profile(p) for p in made],
        "weights": uses,
        "weight_bytes": sum(use["bytes"] for use in uses.values()),
        "bound_bytes": sum(o.nbytes for o in emitter.inputs.values()),
    }


def _own(module: Module, name: str, facts: Facts) -> Facts:
    """What a plan says about itself, with the weights of one graph that it serves.

    The cache does not know them, and graphs of other layers have the same plan.
    """
    graph = module.graphs[name]
    names, origin = PlanNames(module, graph), module.weights.origin
    operands = {names.input(o): o for o in graph_operands(module, graph)}
    weights = {names.weights.get(n, n): use for n, use in facts["weights"].items()}
    return {
        **facts,
        "bound": [{**item, "tensors": _tensors(operands[item["name"]])} for item in facts["bound"]],
        "weights": {s: {**use, "origin": origin(s)} for s, use in weights.items()},
    }


def _tensors(operand: Operand) -> dict[str, str]:
    return {c: tensor_name(operand.symbol, c) for c in operand.components}


def _port(name: str, dtype: str, sizes: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(sizes)}


def alias(output: Output) -> str | None:
    """The input at whose address an engine expects an output.

    The library updates caches in place and nothing else: a state is read by several kernels, in an
    order that does not know where its update is written.
    """
    return output.alias if output.role is Role.KV_CACHE else None


def bound_inputs(emitter: Emitter) -> list[dict[str, Any]]:
    """Inputs of a network that the runtime fills from the weight file: see `bound_weights`."""
    return [
        {
            **_port(name, operand.dtype.value, operand.shape),
            "form": operand.form,
            "tensors": _tensors(operand),
            **({"block": list(operand.block)} if operand.block else {}),
        }
        for name, operand in emitter.inputs.items()
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
