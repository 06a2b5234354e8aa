"""Lowered pairs opened on a simulated GPU: what a bundle has, without building engines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from edgecc.backends.onnx.emitter import output_names, sequences
from edgecc.backends.onnx.program import interface, program
from edgecc.backends.runtime import Generator, ModelInfo
from edgecc.backends.tensorrt.engine import TrtEngine, open_engine
from edgecc.backends.tensorrt.lower import alias
from edgecc.backends.tensorrt.profiles import fixed_sizes, profiles, verify_rows
from edgecc.devices import get_device
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import Module
from edgecc.ir.core import Graph
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.engines import Written
from helpers.lowering import Files
from helpers.simulated_cuda import SimulatedCuda
from helpers.simulated_tensorrt import Simulation

DEVICE = "sm120"


def lowered(
    target: Path,
    draft: Path | None,
    *,
    max_model_len: int = 64,
    chunk: int = 16,
    max_batch_size: int = 1,
    method: str = "auto",
    components: str = "text",
) -> Module:
    """A target, alone or with its draft, after the passes of the device.

    Activations have 16 bits: scales of random weights are not calibrated.
    """
    device = get_device(DEVICE)
    options = LiftOptions(
        max_model_len=max_model_len,
        prefill_chunk=chunk,
        max_batch_size=max_batch_size,
        spec_method=method,
        pads_rounds=True,
        components=components,
    )
    module = lift(target, draft, options)
    PassManager(default_pipeline(device, activations="16bit")).run(module, PassContext(device))
    return module


def artifact_of(module: Module, version: str) -> dict[str, Any]:
    """The manifest's part that `lower` would write."""
    graphs = [g for g in module.graphs.values() if not list(g.callees())]
    return {
        "backend": "tensorrt",
        "library": "tensorrt_rtx",
        "library_version": version,
        "compute_capabilities": [120],
        "compute_type": "bf16",
        "min_rows": verify_rows(module),
        "max_batch_size": sequences(module),
        "weights": "embed",
        "weight_file": None,
        "tensors": {},
        "engines": {g.name: _engine(module, g) for g in graphs},
        "programs": {e.name: program(module, e) for e in module.entries()},
        "entries": {e.name: interface(e) for e in module.entries()},
    }


def _engine(module: Module, graph: Graph) -> dict[str, Any]:
    sizes = fixed_sizes(module, graph)

    def tensor(name: str, value: Any) -> dict[str, Any]:
        dims = [d if isinstance(d, int) else d.substitute(sizes) for d in value.type.shape]
        shape = [d if isinstance(d, int) else -1 for d in dims]
        return {"name": name, "dtype": value.type.dtype.value, "shape": shape}

    names = output_names(graph)
    return {
        "file": f"{graph.name}.plan",
        "key": None,
        "bytes": 0,
        "weight_bytes": 0,
        "bound": [],
        "bound_bytes": 0,
        "weights": {},
        "inputs": [tensor(i.name, i.value) for i in graph.inputs],
        "outputs": [
            {**tensor(n, o.value), "alias": alias(o)}
            for n, o in zip(names, graph.outputs, strict=True)
        ],
        "profiles": [
            {"name": p.name, "shapes": {n: [list(s) for s in v] for n, v in p.shapes.items()}}
            for p in profiles(module, graph, sizes)
        ],
    }


class SimulatedBundle:
    """A lowered module on a simulated GPU.

    Args:
        folder: For the files that stand for plans.
        trt: The real module `tensorrt_rtx`.
        cuda_runtime: The real module `cuda.bindings.runtime`.
        module: After the passes.
        weights: Policy for weights that are inputs; None leaves all of them inside of plans.
        options: Of `Simulation`.
    """

    def __init__(
        self,
        folder: Path,
        trt: Any,
        cuda_runtime: Any,
        module: Module,
        *,
        weights: str | None = None,
        **options: Any,
    ) -> None:
        self.module = module
        self.cuda = SimulatedCuda(cuda_runtime)
        self.artifact = artifact_of(module, trt.__version__)
        engines = self.artifact["engines"]
        self.simulation = Simulation(trt, self.cuda, module, engines, **options)
        self.files = Files(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if weights is not None:
            self._bind(trt, folder, weights)
        for name, engine in engines.items():
            (folder / engine["file"]).write_text(f"plan:{name}")

    def _bind(self, trt: Any, folder: Path, policy: str) -> None:
        """Take weights out of the plans, as the compiler does."""
        written = Written(trt, self.module, DEVICE, policy, folder)
        self.artifact["weight_file"] = str(written.file.path.relative_to(folder))
        self.artifact["tensors"] = written.artifact["tensors"]
        for name, network in written.networks.items():
            self.artifact["engines"][name]["bound"] = written.artifact["engines"][name]["bound"]
            self.simulation.weights[name] = {
                item: np.ascontiguousarray(operand.array(network._read(operand.symbol))).tobytes()
                for item, operand in network.inputs.items()
            }

    def open(
        self, artifact: Mapping[str, Any] | None = None, progress: Callable[..., None] | None = None
    ) -> TrtEngine:
        """What a bundle's engine opens to."""
        where = "edgecc.backends.tensorrt.engine"
        with (
            patch(f"{where}.load_library", lambda name: self.simulation),
            patch(f"{where}.load_runtime", lambda: self.cuda),
        ):
            return open_engine(self.files, artifact or self.artifact, progress=progress)

    def generator(self) -> Generator:
        """The runtime over it."""
        entries = self.artifact["entries"]
        metadata = {"draft": None, "entries": entries, **self.module.metadata}
        return Generator(self.open(), ModelInfo.from_manifest(metadata))


def write_bundle(
    folder: Path, cpu: Path, module: Module, artifact: Mapping[str, Any], rows: Mapping[str, bytes]
) -> Path:
    """A bundle for the simulated GPU, made from the CPU bundle of the same pair.

    Args:
        folder: Where the files that stand for plans are; becomes the bundle.
        cpu: The CPU bundle.
        module: As lowered for the device.
        artifact: See `artifact_of`.
        rows: Further files, by name.
    """
    manifest = json.loads((cpu / "bundle.json").read_text())
    kept = [n for n in manifest["files"] if n.startswith(("tokenizer/", "golden"))]
    for name in kept:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((cpu / name).read_bytes())
    for name, data in rows.items():
        (folder / name).write_bytes(data)
    plans = [e["file"] for e in artifact["engines"].values()]
    manifest["files"] = {
        name: {
            "bytes": (folder / name).stat().st_size,
            "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest(),
        }
        for name in sorted((*kept, *plans, *rows))
    }
    manifest["artifacts"] = {DEVICE: dict(artifact)}
    manifest["weights"], manifest["shared"] = {}, []
    for entry in module.entries():
        ports = interface(entry)
        for output in ports["outputs"]:
            del output["value"]
        manifest["entries"][entry.name] = ports
    (folder / "bundle.json").write_text(json.dumps(manifest))
    return folder
