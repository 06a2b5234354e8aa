"""Evaluates a TensorRT network layer by layer with NumPy.

What a builder gets is read back from the library's own network, so an attribute that a setter has
dropped is missed here as well. Values are float32, rounded to the type of the tensor wherever a
layer stores one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.backends.onnx.emitter import output_names
from edgecc.backends.tensorrt import lower  # noqa: F401 (registers the lowerings)
from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.emitter import Emitter
from edgecc.backends.tensorrt.profiles import fixed_sizes
from edgecc.devices import get_device
from edgecc.ir import Graph, Interpreter, Module
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.lifted import Lifted
from helpers.tensorrt_layers import CLASSES, LAYERS, constant, stored

Array: TypeAlias = NDArray[Any]


class NetworkEvaluator:
    """Evaluates the outputs of one network.

    Args:
        library: The module `tensorrt_rtx`.
        emitter: What filled the network; it owns the constants, in the order of their layers.

    Attributes:
        network: The library's network.
        kinds: How many layers there are of each kind.
    """

    def __init__(self, library: Any, emitter: Any) -> None:
        self.network = emitter.network
        self.kinds: Counter[str] = Counter()
        self._producers: dict[str, tuple[str, Any]] = {}
        self._constants: dict[str, Array] = {}
        self._fixed: dict[str, Array] = {}
        arrays = iter(emitter.arrays)
        for index in range(self.network.num_layers):
            layer = self.network.get_layer(index)
            kind = layer.type.name
            self.kinds[kind] += 1
            layer.__class__ = getattr(library, CLASSES[kind])
            for number in range(layer.num_outputs):
                self._producers[layer.get_output(number).name] = (kind, layer)
            if kind == "CONSTANT":
                self._constants[layer.name] = next(arrays)
        assert next(arrays, None) is None

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Every output of the network by name."""
        given = (self.network.get_input(i) for i in range(self.network.num_inputs))
        values = dict(self._fixed)
        values |= {t.name: stored(np.asarray(inputs[t.name]), t.dtype.name) for t in given}
        outputs = [self.network.get_output(i).name for i in range(self.network.num_outputs)]
        for name in outputs:
            self._compute(name, values)
        return {name: values[name] for name in outputs}

    def _compute(self, wanted: str, values: dict[str, Array]) -> None:
        """Fill in a tensor and all it is made from; layers are in no order.

        What is made of constants alone, such as widened weights, stays for later runs.
        """
        waiting = [wanted]
        while waiting:
            name = waiting[-1]
            if name in values:
                waiting.pop()
                continue
            kind, layer = self._producers[name]
            operands = [layer.get_input(i) for i in range(layer.num_inputs)]
            missing = [t.name for t in operands if t is not None and t.name not in values]
            if missing:
                waiting += missing
                continue
            known = [None if t is None else values[t.name] for t in operands]
            fixed = all(t is None or t.name in self._fixed for t in operands)
            for number, result in enumerate(self._layer(kind, layer, known)):
                tensor = layer.get_output(number)
                found = stored(result, tensor.dtype.name)
                expected = tuple(tensor.shape)
                fits = [w in (-1, g) for w, g in zip(expected, found.shape, strict=True)]
                assert all(fits), f"{layer.name}: {found.shape} for {expected}"
                values[tensor.name] = found
                if fixed:
                    self._fixed[tensor.name] = found

    def _layer(self, kind: str, layer: Any, x: list[Any]) -> Sequence[Array]:
        return [self._constant(layer)] if kind == "CONSTANT" else LAYERS[kind](layer, x)

    def _constant(self, layer: Any) -> Array:
        dtype = layer.get_output(0).dtype.name
        return constant(self._constants[layer.name], dtype, tuple(layer.shape))


class NetworkInterpreter(Interpreter):
    """Evaluates every graph without calls by the network that is made of it.

    Args:
        library: The module `tensorrt_rtx`.
        module: Legalized for the device.
        device: Name of the device.
    """

    def __init__(self, library: Any, module: Module, device: str) -> None:
        super().__init__(module)
        self._library, self._session = library, Session(library, get_device(device))
        self._networks: dict[str, NetworkEvaluator] = {}

    def network(self, graph: Graph) -> NetworkEvaluator:
        """The network of a graph, made once."""
        if graph.name not in self._networks:
            sizes = fixed_sizes(self.module, graph)
            network = self._session.network(graph.name)
            emitter = Emitter(self._library, network, self.module, graph, sizes)
            emitter.lower()
            self._networks[graph.name] = NetworkEvaluator(self._library, emitter)
        return self._networks[graph.name]

    def _evaluate(self, graph: Graph, inputs: Sequence[Array]) -> tuple[Array, ...]:
        if list(graph.callees()):
            return super()._evaluate(graph, inputs)
        names = (i.name for i in graph.inputs)
        found = self.network(graph).run(dict(zip(names, inputs, strict=True)))
        return tuple(found[name] for name in output_names(graph))


class NetworkPair(Lifted):
    """A target, or a pair, lowered for a GPU and evaluated by its networks.

    Args:
        library: The module `tensorrt_rtx`.
        device: Name of the device.
        target: Folder of the target.
        draft: Folder of the draft.
        options: Fields of `LiftOptions`.
    """

    def __init__(
        self, library: Any, device: str, target: Path, draft: Path | None, **options: Any
    ) -> None:
        self._library, self._device = library, device
        super().__init__(target, draft, **options)

    def prepare(self, dtype: type[np.floating[Any]]) -> Interpreter:
        """The default pipeline, optional outputs kept, no rounding of activations."""
        record = get_device(self._device)
        passes = default_pipeline(record, keep_draft_logits=True, activations="16bit")
        PassManager(passes).run(self.module, PassContext(record))
        return NetworkInterpreter(self._library, self.module, self._device)
