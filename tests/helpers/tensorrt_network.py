"""Evaluates a TensorRT network layer by layer with NumPy.

What a builder gets is read back from the library's own network, so an attribute that a setter has
dropped is missed here as well. Each layer follows its description in NVIDIA's reference of
operators; values are float32, rounded to the type of the tensor wherever a layer stores one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
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

Array: TypeAlias = NDArray[Any]

_ROUNDED = {"BF16": ml_dtypes.bfloat16, "HALF": np.float16, "FP8": ml_dtypes.float8_e4m3fn}
_FOUR_BITS = {"FP4": ml_dtypes.float4_e2m1fn, "INT4": ml_dtypes.int4}
_INTEGERS = {"INT64": np.int64, "INT32": np.int32, "INT8": np.int8, "BOOL": np.bool_}


class NetworkEvaluator:
    """Evaluates the outputs of one network.

    Args:
        library: The module `tensorrt_rtx`.
        emitter: What filled the network; it owns the constants, in the order of their layers.
    """

    def __init__(self, library: Any, emitter: Any) -> None:
        self.network = emitter.network
        self._producers: dict[str, tuple[str, Any]] = {}
        self._constants: dict[str, Array] = {}
        arrays = iter(emitter.arrays)
        for index in range(self.network.num_layers):
            layer = self.network.get_layer(index)
            kind = layer.type.name
            layer.__class__ = getattr(library, _CLASSES[kind])
            for number in range(layer.num_outputs):
                self._producers[layer.get_output(number).name] = (kind, layer)
            if kind == "CONSTANT":
                self._constants[layer.name] = next(arrays)
        assert next(arrays, None) is None

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Every output of the network by name."""
        given = (self.network.get_input(i) for i in range(self.network.num_inputs))
        values = {t.name: _stored(np.asarray(inputs[t.name]), t.dtype.name) for t in given}
        outputs = [self.network.get_output(i).name for i in range(self.network.num_outputs)]
        for name in outputs:
            self._compute(name, values)
        return {name: values[name] for name in outputs}

    def _compute(self, wanted: str, values: dict[str, Array]) -> None:
        """Fill in a tensor and all it is made from; layers are in no order."""
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
            for number, result in enumerate(self._layer(kind, layer, known)):
                tensor = layer.get_output(number)
                stored = _stored(result, tensor.dtype.name)
                expected = tuple(tensor.shape)
                fits = [w in (-1, g) for w, g in zip(expected, stored.shape, strict=True)]
                assert all(fits), f"{layer.name}: {stored.shape} for {expected}"
                values[tensor.name] = stored

    def _layer(self, kind: str, layer: Any, x: list[Any]) -> Sequence[Array]:
        return [self._constant(layer)] if kind == "CONSTANT" else _LAYERS[kind](layer, x)

    def _constant(self, layer: Any) -> Array:
        array, shape = self._constants[layer.name], tuple(layer.shape)
        four_bits = _FOUR_BITS.get(layer.get_output(0).dtype.name)
        if four_bits is not None:  # two in a byte, the first in the low half
            pairs = array.reshape(-1).view(np.uint8)
            codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(shape)
            if four_bits is ml_dtypes.int4:
                return ((codes.astype(np.int8) ^ 8) - 8).astype(np.float32)
            return codes.astype(np.uint8).view(four_bits).astype(np.float32)
        if layer.get_output(0).dtype.name == "FP8":
            array = array.view(ml_dtypes.float8_e4m3fn)
        return array.reshape(shape)


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


def _stored(array: Array, dtype: str) -> Array:
    """What is left of values in a tensor of a type: integers, or float32 after rounding."""
    if dtype in _INTEGERS:
        return np.asarray(array).astype(_INTEGERS[dtype])
    wide = np.asarray(array).astype(np.float32)
    if dtype in _FOUR_BITS:
        return wide.astype(_FOUR_BITS[dtype]).astype(np.float32)
    return wide.astype(_ROUNDED[dtype]).astype(np.float32) if dtype in _ROUNDED else wide


def _elementwise(layer: Any, x: list[Array]) -> list[Array]:
    functions = {
        "SUM": np.add,
        "SUB": np.subtract,
        "PROD": np.multiply,
        "DIV": np.divide,
        "MAX": np.maximum,
        "MIN": np.minimum,
        "LESS": np.less,
        "EQUAL": np.equal,
        "AND": np.logical_and,
        "FLOOR_DIV": np.floor_divide,
    }
    a, b = x
    assert a.ndim == b.ndim, f"{layer.name}: ranks differ"
    assert a.dtype == b.dtype, f"{layer.name}: types differ"
    return [functions[layer.op.name](a, b)]


def _unary(layer: Any, x: list[Array]) -> list[Array]:
    functions = {
        "EXP": np.exp,
        "LOG": np.log,
        "SQRT": np.sqrt,
        "NEG": np.negative,
        "ABS": np.abs,
        "NOT": np.logical_not,
    }
    return [functions[layer.op.name](x[0])]


def _activation(layer: Any, x: list[Array]) -> list[Array]:
    assert layer.type.name == "SIGMOID"
    wide = x[0].astype(np.float64)
    return [0.5 + 0.5 * np.tanh(wide / 2)]


def _matmul(layer: Any, x: list[Array]) -> list[Array]:
    turned = [
        a.swapaxes(-1, -2) if op.name == "TRANSPOSE" else a
        for a, op in zip(x, (layer.op0, layer.op1), strict=True)
    ]
    assert x[0].ndim == x[1].ndim, f"{layer.name}: ranks differ"
    return [turned[0] @ turned[1]]


def _shuffle(layer: Any, x: list[Array]) -> list[Array]:
    array = x[0].transpose(tuple(layer.first_transpose)[: x[0].ndim])
    if layer.reshape_dims is None:
        return [array]
    sizes = [array.shape[i] if d == 0 else d for i, d in enumerate(layer.reshape_dims)]
    return [array.reshape(sizes)]


def _slice(layer: Any, x: list[Any]) -> list[Array]:
    array, start, size = x[0], layer.start, layer.shape
    start = tuple(x[1]) if len(x) > 1 and x[1] is not None else tuple(start)
    size = tuple(x[2]) if len(x) > 2 and x[2] is not None else tuple(size)
    assert set(layer.stride) == {1}
    for first, count, whole in zip(start, size, array.shape, strict=True):
        assert 0 <= first <= whole - count, f"{layer.name}: out of bounds"
    return [array[tuple(slice(f, f + c) for f, c in zip(start, size, strict=True))]]


def _gather(layer: Any, x: list[Array]) -> list[Array]:
    assert layer.mode.name == "DEFAULT"
    data, index = x
    assert index.min(initial=0) >= 0, f"{layer.name}: out of bounds"
    if layer.num_elementwise_dims == 0:
        return [np.take(data, index, axis=layer.axis)]
    assert (layer.num_elementwise_dims, layer.axis) == (1, 1)
    return [np.stack([np.take(d, i, axis=0) for d, i in zip(data, index, strict=True)])]


def _reduce(layer: Any, x: list[Array]) -> list[Array]:
    axes = tuple(i for i in range(x[0].ndim) if layer.axes >> i & 1)
    function = {"AVG": np.mean, "SUM": np.sum}[layer.op.name]
    return [function(x[0], axis=axes, keepdims=layer.keep_dims)]


def _topk(layer: Any, x: list[Array]) -> list[Array]:
    assert (layer.op.name, layer.k) == ("MAX", 1)
    axis = int(math.log2(layer.axes))
    index = np.expand_dims(np.argmax(x[0], axis=axis), axis)
    return [np.take_along_axis(x[0], index, axis), index]


def _fill(layer: Any, x: list[Array]) -> list[Array]:
    assert layer.operation.name == "LINSPACE"
    size, start, step = (int(v.item()) for v in x)
    return [start + step * np.arange(size)]


def _dequantize(layer: Any, x: list[Array]) -> list[Array]:
    """Codes times scales; a scale for all, or one for each block along the last axis."""
    codes, scale = x[0].astype(np.float32), x[1]
    if scale.ndim:
        blocks = [c // s for c, s in zip(codes.shape, scale.shape, strict=True)]
        assert [b * s for b, s in zip(blocks, scale.shape, strict=True)] == list(codes.shape)
        for axis, times in enumerate(blocks):
            scale = scale.repeat(times, axis=axis)
    return [codes * scale]


def _quantize(layer: Any, x: list[Array]) -> list[Array]:
    array, scale = x
    assert scale.ndim == 0
    return [np.clip(array / scale, -448, 448)]


def _dynamic_quantize(layer: Any, x: list[Array]) -> list[Array]:
    """E2M1 codes, and E4M3 scales of blocks whose largest value becomes 6."""
    array, scale = x
    moved = np.moveaxis(array, layer.axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, layer.block_size)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    inner = np.where(largest == 0, 1, np.clip(largest / (6 * scale), 2.0**-9, 448))
    inner = inner.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = (blocks / (inner * scale)).reshape(moved.shape)
    return [np.moveaxis(codes, -1, layer.axis), np.moveaxis(inner[..., 0], -1, layer.axis)]


def _kv_cache_update(layer: Any, x: list[Array]) -> list[Array]:
    cache, new, index = x[0].copy(), x[1], x[2]
    assert layer.cache_mode.name == "LINEAR"
    for i, start in enumerate(index):
        cache[i, :, start : start + new.shape[2]] = new[i]
    return [cache]


def _rotary_embedding(layer: Any, x: list[Array]) -> list[Array]:
    """Halves of the first dims are turned, the others stay."""
    assert not layer.interleaved
    rows, (cos, sin) = x[0].copy(), (t[x[3]][:, None] for t in x[1:3])  # [b, 1, s, half]
    half = layer.rotary_embedding_dim // 2
    first, second = x[0][..., :half], x[0][..., half : 2 * half]
    rows[..., :half] = first * cos - second * sin
    rows[..., half : 2 * half] = second * cos + first * sin
    return [rows]


def _attention(layer: Any, x: list[Array]) -> list[Array]:
    """Softmax of the products plus the mask; a key head serves several query heads."""
    attention = layer.attention
    assert attention.mask is not None
    assert attention.norm_op.name == "SOFTMAX"
    query, key, value, mask = x
    repeat = query.shape[1] // key.shape[1]
    key, value = (t.repeat(repeat, axis=1) for t in (key, value))
    scores = query @ key.swapaxes(-1, -2) + mask
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return [weights / weights.sum(axis=-1, keepdims=True) @ value]


_LAYERS: Mapping[str, Any] = {
    "ELEMENTWISE": _elementwise,
    "UNARY": _unary,
    "ACTIVATION": _activation,
    "MATRIX_MULTIPLY": _matmul,
    "SHUFFLE": _shuffle,
    "SLICE": _slice,
    "CONCATENATION": lambda layer, x: [np.concatenate(x, axis=layer.axis)],
    "GATHER": _gather,
    "REDUCE": _reduce,
    "TOPK": _topk,
    "FILL": _fill,
    "SELECT": lambda layer, x: [np.where(*x)],
    "SHAPE": lambda layer, x: [np.array(x[0].shape, dtype=np.int64)],
    "CAST": lambda layer, x: x,
    "IDENTITY": lambda layer, x: x,
    "DEQUANTIZE": _dequantize,
    "QUANTIZE": _quantize,
    "DYNAMIC_QUANTIZE": _dynamic_quantize,
    "KV_CACHE_UPDATE": _kv_cache_update,
    "ROTARY_EMBEDDING": _rotary_embedding,
    "ATTENTION_INPUT": _attention,
    "ATTENTION_OUTPUT": lambda layer, x: x,
}

_CLASSES: Mapping[str, str] = {
    "CONSTANT": "IConstantLayer",
    "ELEMENTWISE": "IElementWiseLayer",
    "UNARY": "IUnaryLayer",
    "ACTIVATION": "IActivationLayer",
    "MATRIX_MULTIPLY": "IMatrixMultiplyLayer",
    "SHUFFLE": "IShuffleLayer",
    "SLICE": "ISliceLayer",
    "CONCATENATION": "IConcatenationLayer",
    "GATHER": "IGatherLayer",
    "REDUCE": "IReduceLayer",
    "TOPK": "ITopKLayer",
    "FILL": "IFillLayer",
    "SELECT": "ISelectLayer",
    "SHAPE": "IShapeLayer",
    "CAST": "ICastLayer",
    "IDENTITY": "IIdentityLayer",
    "DEQUANTIZE": "IDequantizeLayer",
    "QUANTIZE": "IQuantizeLayer",
    "DYNAMIC_QUANTIZE": "IDynamicQuantizeLayer",
    "KV_CACHE_UPDATE": "IKVCacheUpdateLayer",
    "ROTARY_EMBEDDING": "IRotaryEmbeddingLayer",
    "ATTENTION_INPUT": "IAttentionInputLayer",
    "ATTENTION_OUTPUT": "IAttentionOutputLayer",
}
"""Class of each kind of layer: a network gives its layers back without their attributes."""
