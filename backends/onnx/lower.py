"""Writes the ONNX models of a legalized module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from edgecc.backends.base import Artifact, Holding
from edgecc.backends.onnx import (  # noqa: F401 (registers the lowerings)
    attention,
    constant,
    elementwise,
    matmul,
    norm,
    sampling,
    shape,
    state,
    vision,
)
from edgecc.backends.onnx.emitter import Emitter, sequences
from edgecc.backends.onnx.program import interface, program
from edgecc.backends.onnx.storage import Storage
from edgecc.backends.stored_weights import WEIGHT_FILE, StoredTensor, places
from edgecc.backends.weight_file import WrittenFile
from edgecc.devices import Device, Dialect
from edgecc.errors import BackendError, UnsupportedError
from edgecc.ir.core import Graph, Module


def stored_tensors(module: Module, device: Device) -> list[StoredTensor]:
    """The tensors of the weight file that the models are going to refer to.

    Raises:
        UnsupportedError: The device takes no ONNX.
        LegalizeError: A weight has no initializer.
    """
    _dialect(device)
    return Storage(module, WEIGHT_FILE).collect(_leaves(module))


def lower(module: Module, device: Device, directory: Path, file: WrittenFile) -> Artifact:
    """Write `<device>-<graph>.onnx` for each graph without calls.

    Models lie beside the folder of the weight file, because ONNX external data must not leave the
    folder of its model.

    Args:
        module: Legalized for the device.
        device: Its dialect decides the operators.
        directory: Bundle being written.
        file: The weight file, with the tensors of `stored_tensors`.

    Returns:
        The artifact: its manifest holds programs, models and tensors.

    Raises:
        UnsupportedError: The device takes no ONNX.
        LegalizeError: An op has no lowering.
        BackendError: A model did not pass the ONNX checker.
    """
    dialect = _dialect(device)
    storage = Storage(module, WEIGHT_FILE, offsets=file.offsets)
    tensors = storage.collect(_leaves(module))
    models: dict[str, Any] = {}
    files = []
    for graph in _leaves(module):
        emitter = Emitter(module, graph, dialect, storage)
        path = directory / f"{device.name}-{graph.name}.onnx"
        path.write_bytes(emitter.lower().SerializeToString(deterministic=True))
        _check(path, graph.name)
        expand = [e.as_json() for e in emitter.expansions.values()]
        models[graph.name] = {"file": path.name, "expand": expand}
        files.append(path.name)
    entries = module.entries()
    manifest = {
        "backend": device.backend,
        "dialect": dialect.value,
        "min_rows": device.min_rows,
        "max_batch_size": sequences(module),
        "weight_file": WEIGHT_FILE,
        "models": models,
        "programs": {e.name: program(module, e, dialect) for e in entries},
        "entries": {e.name: interface(e) for e in entries},
        "tensors": places(tensors, file),
    }
    held = {t.symbol: Holding(WEIGHT_FILE) for t in tensors}
    return Artifact(manifest, tuple(files), held)


def _leaves(module: Module) -> list[Graph]:
    return [g for g in module.graphs.values() if not list(g.callees())]


def _dialect(device: Device) -> Dialect:
    if device.dialect is None:
        raise UnsupportedError(
            "onnx/no-dialect", f"device {device.name} takes engines of {device.library}, not ONNX"
        )
    return device.dialect


def _check(path: Path, graph: str) -> None:
    try:
        onnx.checker.check_model(str(path), full_check=False)
    except onnx.checker.ValidationError as error:
        raise BackendError(
            "onnx/checker", f"the model of @{graph} is not valid ONNX: {error}", where=path.name
        ) from error
