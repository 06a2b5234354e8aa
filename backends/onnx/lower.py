"""Writes the ONNX models and the weight file of a legalized module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from edgecc.backends.base import Artifact, Progress
from edgecc.backends.onnx import (  # noqa: F401 (registers the lowerings)
    attention,
    constant,
    elementwise,
    matmul,
    norm,
    sampling,
    shape,
    vision,
)
from edgecc.backends.onnx.emitter import Emitter
from edgecc.backends.onnx.program import interface, program
from edgecc.backends.onnx.storage import Storage
from edgecc.backends.weight_file import WeightFileWriter, WrittenFile
from edgecc.devices import Device
from edgecc.errors import BackendError, UnsupportedError
from edgecc.ir.core import Module

WEIGHT_FILE = "weights/weights.safetensors"


def lower(
    module: Module, device: Device, directory: Path, progress: Progress
) -> tuple[Artifact, WrittenFile]:
    """Write `<device>-<graph>.onnx` for each graph without calls, and the weight file.

    Weights are streamed row block by row block; peak memory does not depend on their number. Models
    lie beside the folder of the weight file, because ONNX external data must not leave the folder
    of its model.

    Args:
        module: Legalized for the device.
        device: Its dialect decides the operators.
        directory: Bundle being written.
        progress: Told about bytes written.

    Returns:
        The artifact (its manifest holds programs, models and tensors) and the weight file.

    Raises:
        UnsupportedError: The device takes no ONNX.
        LegalizeError: An op has no lowering.
        BackendError: A model did not pass the ONNX checker.
        ResourceError: The disk refused.
    """
    if device.dialect is None:
        raise UnsupportedError(
            "onnx/no-dialect", f"device {device.name} takes engines of {device.library}, not ONNX"
        )
    leaves = [g for g in module.graphs.values() if not list(g.callees())]
    storage = Storage(module, WEIGHT_FILE)
    specs = storage.collect(leaves)
    (directory / WEIGHT_FILE).parent.mkdir(exist_ok=True)
    models: dict[str, Any] = {}
    files = []
    with WeightFileWriter(directory / WEIGHT_FILE, specs) as file:
        storage.offsets = file.offsets
        _write_weights(module, storage, file, progress)
    written = file.finish()
    for graph in leaves:
        emitter = Emitter(module, graph, device.dialect, storage)
        path = directory / f"{device.name}-{graph.name}.onnx"
        path.write_bytes(emitter.lower().SerializeToString(deterministic=True))
        _check(path, graph.name)
        expand = [e.as_json() for e in emitter.expansions.values()]
        models[graph.name] = {"file": path.name, "expand": expand}
        files.append(path.name)
    entries = module.entries()
    manifest = {
        "backend": device.backend,
        "dialect": device.dialect.value,
        "min_rows": device.min_rows,
        "weight_file": WEIGHT_FILE,
        "models": models,
        "programs": {e.name: program(module, e) for e in entries},
        "entries": {e.name: interface(e) for e in entries},
        "tensors": {
            t.name: {"dtype": t.dtype, "shape": list(t.shape), "offset": storage.offsets[t.name][0]}
            for t in storage.tensors.values()
        },
    }
    return Artifact(manifest, tuple(files)), written


def _write_weights(
    module: Module, storage: Storage, file: WeightFileWriter, progress: Progress
) -> None:
    total = sum(length for _, length in storage.offsets.values())
    done = 0
    progress("weights", 0, total)
    for tensor in storage.tensors.values():
        weight = module.weights[tensor.symbol]
        by_rows = weight.encoding.components(weight.shape)[tensor.component].rows
        for _, _, parts in module.weights.row_blocks(tensor.symbol):
            block = parts[tensor.component]
            file.write(tensor.name, block)
            done += block.nbytes
            progress("weights", done, total)
            if not by_rows:
                break


def _check(path: Path, graph: str) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        raise BackendError(
            "onnx/checker", f"the model of @{graph} is not valid ONNX: {error}", where=path.name
        ) from error
