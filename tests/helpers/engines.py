"""Networks of TensorRT engines without building them: what they take as inputs and as constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgecc.backends.base import Array
from edgecc.backends.mapped_weights import WeightFile
from edgecc.backends.stored_weights import StoredWeights, places
from edgecc.backends.tensorrt import lower as registers_lowerings
from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.emitter import Emitter
from edgecc.backends.tensorrt.operands import Operand
from edgecc.backends.tensorrt.policy import WeightPlan, plan_weights
from edgecc.backends.tensorrt.profiles import fixed_sizes
from edgecc.devices import get_device
from edgecc.driver import lift
from edgecc.ir.core import Module
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager

Bytes = tuple[str, tuple[int, ...], bytes]
"""Type, shape and content of an array in a network."""


def lowered_pair(target: Path, draft: Path | None, device: str, **options: Any) -> Module:
    """A pair after the default passes of a device."""
    record = get_device(device)
    module = lift(target, draft)
    PassManager(default_pipeline(record, **options)).run(module, PassContext(record))
    return module


class Recorder(Emitter):
    """An emitter that keeps what it makes constants of."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.constants: dict[Operand, Bytes] = {}

    def _constant(self, operand: Operand) -> Any:
        array = np.ascontiguousarray(operand.array(self._read(operand.symbol)))
        self.constants[operand] = (operand.dtype.value, operand.shape, array.tobytes())
        return super()._constant(operand)


def emitted(trt: Any, module: Module, device: str, plan: WeightPlan) -> dict[str, Recorder]:
    """The network of each graph, filled and not built."""
    session = Session(trt, get_device(device))
    found = {}
    for graph in module.graphs.values():
        if not list(graph.callees()):
            sizes = fixed_sizes(module, graph)
            network = session.network(graph.name)
            bound = frozenset(plan.bound)
            found[graph.name] = Recorder(trt, network, module, graph, sizes, bound)
            found[graph.name].lower()
            found[graph.name].session = session  # type: ignore[attr-defined]
    return found


class Written:
    """The weight file of a module, and what its manifest says about bound inputs."""

    def __init__(self, trt: Any, module: Module, device: str, weights: str, folder: Path) -> None:
        self.plan = plan_weights(module, weights)
        self.networks = emitted(trt, module, device, self.plan)
        tensors = self.plan.tensors(module)
        contents = StoredWeights()
        contents.add(module, tensors)
        folder.mkdir(exist_ok=True)
        self.file = contents.write(folder, lambda *_: None)
        self.artifact: dict[str, Any] = {
            "engines": {
                name: {"bound": registers_lowerings.bound_inputs(e)}
                for name, e in self.networks.items()
            },
            "tensors": places(tensors, self.file),
        }

    def open(self) -> WeightFile:
        """The file, mapped."""
        return WeightFile(self.file.path, self.artifact["tensors"])


def joined(blocks: Any) -> bytes:
    """The content of a buffer; offsets must leave no gap."""
    content = b""
    for offset, block in blocks:
        assert offset == len(content)
        data: Array = block
        assert data.dtype == np.uint8
        content += data.tobytes()
    return content
