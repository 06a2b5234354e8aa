"""A TensorRT network evaluated with NumPy, layer by layer, from what the library says it holds.

For networks of linear layers: what the builder is handed is read back from the network and not from
our own data, so a wrong axis, scale or factor shows, though nothing can run a plan here. Semantics
are those of the library's documentation, the numbers those of the formats: each value is rounded to
the type of its tensor, products are summed in float64.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgecc.backends.tensorrt.builder import Session
from edgecc.backends.tensorrt.emitter import Emitter
from edgecc.backends.tensorrt.profiles import fixed_sizes
from edgecc.devices import get_device
from edgecc.ir import Module

Array: TypeAlias = NDArray[Any]

_NUMPY = {
    "FLOAT": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "HALF": np.float16,
    "FP8": ml_dtypes.float8_e4m3fn,
    "FP4": ml_dtypes.float4_e2m1fn,
    "INT4": ml_dtypes.int4,
    "INT8": np.int8,
    "INT64": np.int64,
}


class Network:
    """The network of one graph, not built.

    Args:
        trt: The library.
        module: Has the graph `main`.
        device: What it is lowered for.
    """

    def __init__(self, trt: Any, module: Module, device: str) -> None:
        graph = module.graphs["main"]
        session = Session(trt, get_device(device))
        self.trt = trt
        self.network = session.network("main")
        emitter = Emitter(trt, self.network, module, graph, fixed_sizes(module, graph))
        emitter.lower()
        self.arrays = emitter.arrays
        self._keep = session, emitter

    def layers(self, kind: str) -> list[Any]:
        """Layers of one kind, as their class."""
        found = (self.network.get_layer(i) for i in range(self.network.num_layers))
        return [self._as_class(layer) for layer in found if layer.type.name == kind]

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, float64."""
        values: dict[str, Array] = {}
        for i in range(self.network.num_inputs):
            tensor = self.network.get_input(i)
            values[tensor.name] = _rounded(inputs[tensor.name], tensor)
        constants = iter(self.arrays)
        for i in range(self.network.num_layers):
            layer = self._as_class(self.network.get_layer(i))
            kind = layer.type.name
            tensors = [layer.get_output(j) for j in range(layer.num_outputs)]
            if kind == "CONSTANT":
                results = [_elements(next(constants), tensors[0])]
            else:
                operands = [values[layer.get_input(j).name] for j in range(layer.num_inputs)]
                results = getattr(self, f"_{kind.lower()}")(layer, operands)
            for tensor, result in zip(tensors, results, strict=True):
                values[tensor.name] = _rounded(result, tensor)
        outputs = [self.network.get_output(i) for i in range(self.network.num_outputs)]
        return {tensor.name: values[tensor.name] for tensor in outputs}

    def _as_class(self, layer: Any) -> Any:
        names = {
            "DEQUANTIZE": "IDequantizeLayer",
            "QUANTIZE": "IQuantizeLayer",
            "DYNAMIC_QUANTIZE": "IDynamicQuantizeLayer",
            "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
            "ELEMENTWISE": "IElementWiseLayer",
            "SHUFFLE": "IShuffleLayer",
            "CAST": "ICastLayer",
            "CONSTANT": "IConstantLayer",
        }
        layer.__class__ = getattr(self.trt, names[layer.type.name])
        return layer

    def _cast(self, layer: Any, operands: Sequence[Array]) -> list[Array]:
        return [operands[0]]

    def _shuffle(self, layer: Any, operands: Sequence[Array]) -> list[Array]:
        (x,) = operands
        turned = x.transpose(tuple(layer.first_transpose)[: x.ndim])
        return [turned.reshape(tuple(layer.get_output(0).shape))]

    def _elementwise(self, layer: Any, operands: Sequence[Array]) -> list[Array]:
        ops = {"PROD": np.multiply, "SUM": np.add, "DIV": np.divide}
        assert operands[0].ndim == operands[1].ndim
        return [ops[layer.op.name](*operands)]

    def _matrix_multiply(self, layer: Any, operands: Sequence[Array]) -> list[Array]:
        turned = [
            np.swapaxes(o, -1, -2) if turn.name == "TRANSPOSE" else o
            for o, turn in zip(operands, (layer.op0, layer.op1), strict=True)
        ]
        assert layer.get_input(0).dtype == layer.get_input(1).dtype
        return [turned[0] @ turned[1]]

    def _dequantize(self, layer: Any, operands: Sequence[Array]) -> list[Array]:
        x, scale = operands
        for axis, (size, count) in enumerate(zip(x.shape, scale.shape, strict=False)):
            if scale.ndim:
                scale = scale.repeat(size // count, axis=axis)
        return [x * scale]

    def _quantize(self, layer: Any, operands: Sequence[Array]) -> list[Array]:
        x, scale = operands
        return [np.clip(x / scale, -448, 448)]

    def _dynamic_quantize(self, layer: Any, operands: Sequence[Array]) -> list[Array]:
        x, scale = operands
        moved = np.moveaxis(x, layer.axis, -1)
        blocks = moved.reshape(*moved.shape[:-1], -1, layer.block_size)
        largest = np.abs(blocks).max(axis=-1, keepdims=True)
        inner = np.where(largest == 0, 1, np.clip(largest / (6 * scale), 2.0**-9, 448))
        inner = inner.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        codes = (blocks / (inner * scale)).reshape(moved.shape)
        return [np.moveaxis(codes, -1, layer.axis), np.moveaxis(inner[..., 0], -1, layer.axis)]


def _elements(array: Array, tensor: Any) -> Array:
    """Elements of a constant; two 4-bit ones lie in a byte, the first in the low half."""
    shape, dtype = tuple(tensor.shape), _NUMPY[tensor.dtype.name]
    if tensor.dtype.name in ("FP4", "INT4"):
        flat = array.reshape(-1).view(np.uint8)
        nibbles = np.stack([flat & 15, flat >> 4], axis=-1).reshape(-1)
        if dtype is ml_dtypes.int4:
            nibbles = ((nibbles.astype(np.int8) ^ 8) - 8).astype(np.int8)
            return nibbles.reshape(shape).astype(np.float64)
        return nibbles.view(dtype).reshape(shape).astype(np.float64)
    return array.view(dtype).reshape(shape).astype(np.float64)


def _rounded(values: Array, tensor: Any) -> Array:
    dtype = _NUMPY[tensor.dtype.name]
    return np.asarray(values, np.float32).astype(dtype).astype(np.float64)


def products(plan: bytes) -> list[tuple[str, str, str]]:
    """Element types of the products a plan was built with: of both sides, and of the result.

    From the builder's own description inside the plan; empty if a version has none.
    """
    text = plan.decode("latin1")
    types = dict(re.findall(r'tensor=\{[^\n]*?name="([^"]+)"[^\n]*? type=(\w+) \}', text))
    layer = r'fully_connected=\{ name="[^"]*" output=\{([^}]*)\} input=\{([^}]*)\}'
    found = []
    for out, operands in re.findall(layer, text):
        names = [*re.findall(r'"([^"]*)"', operands)[:2], *re.findall(r'"([^"]*)"', out)[:1]]
        found.append(tuple(types.get(n, "?") for n in names))
    return found
