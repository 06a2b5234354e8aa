"""Layers of TensorRT networks, evaluated with NumPy.

Each follows its description in NVIDIA's reference of operators; an attribute with another value
than the lowerings set fails. Operands are integers or float32; what a layer gives is rounded by
`stored` to the type of its tensor. Products are summed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]

_ROUNDED: Mapping[str, Any] = {
    "BF16": ml_dtypes.bfloat16,
    "HALF": np.float16,
    "FP8": ml_dtypes.float8_e4m3fn,
    "FP4": ml_dtypes.float4_e2m1fn,
}
_INTEGERS: Mapping[str, Any] = {
    "INT64": np.int64,
    "INT32": np.int32,
    "INT8": np.int8,
    "INT4": np.int8,
    "BOOL": np.bool_,
}


def stored(array: Array, dtype: str) -> Array:
    """What is left of values in a tensor of a type: integers, or float32 after rounding."""
    if dtype in _INTEGERS:
        return np.asarray(array).astype(_INTEGERS[dtype])
    wide = np.asarray(array).astype(np.float32)
    return wide.astype(_ROUNDED[dtype]).astype(np.float32) if dtype in _ROUNDED else wide


def constant(array: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    """Elements of a constant; two 4-bit ones lie in a byte, the first in the low half."""
    if dtype in ("FP4", "INT4"):
        pairs = array.reshape(-1).view(np.uint8)
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(shape)
        if dtype == "INT4":
            return (codes.astype(np.int8) ^ 8) - 8
        return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    if dtype == "FP8":
        array = array.view(ml_dtypes.float8_e4m3fn)
    return array.reshape(shape)


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
    wide = x[0].astype(np.float64)
    functions = {
        "SIGMOID": lambda: 0.5 + 0.5 * np.tanh(wide / 2),
        "TANH": lambda: np.tanh(wide),
        "GELU_ERF": lambda: 0.5 * wide * (1 + _erf(wide * math.sqrt(0.5))),
        "GELU_TANH": lambda: 0.5 * wide * (1 + np.tanh(_GELU * (wide + 0.044715 * wide**3))),
    }
    return [functions[layer.type.name]()]


_GELU = math.sqrt(2 / math.pi)
_erf = np.vectorize(math.erf, otypes=[np.float64])


def _matmul(layer: Any, x: list[Array]) -> list[Array]:
    turned = [
        a.swapaxes(-1, -2) if op.name == "TRANSPOSE" else a
        for a, op in zip(x, (layer.op0, layer.op1), strict=True)
    ]
    assert x[0].ndim == x[1].ndim, f"{layer.name}: ranks differ"
    assert layer.get_input(0).dtype == layer.get_input(1).dtype, f"{layer.name}: types differ"
    return [turned[0].astype(np.float64) @ turned[1].astype(np.float64)]


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
    """Quotients by the scale of all, as far as E4M3 goes."""
    values, scale = x
    assert layer.get_output(0).dtype.name == "FP8"
    assert scale.ndim == 0
    return [np.clip(values.astype(np.float64) / scale, -448, 448)]


def _dynamic_quantize(layer: Any, x: list[Array]) -> list[Array]:
    """Codes of E2M1, and for each block along an axis an E4M3 scale in units of the given one."""
    values, scale = (a.astype(np.float64) for a in x)
    moved = np.moveaxis(values, layer.axis, -1)
    blocks = moved.reshape(*moved.shape[:-1], -1, layer.block_size)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    inner = np.where(largest == 0, 1, np.clip(largest / (6 * scale), 2.0**-9, 448))
    inner = inner.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    codes = (blocks / (inner * scale)).reshape(moved.shape)
    return [np.moveaxis(codes, -1, layer.axis), np.moveaxis(inner[..., 0], -1, layer.axis)]


def _kv_cache_update(layer: Any, x: list[Array]) -> list[Array]:
    cache, new, index = x[0].copy(), x[1], x[2]
    assert layer.cache_mode.name == "LINEAR"
    for i, start in enumerate(index):
        cache[i, :, start : start + new.shape[2]] = new[i]
    return [cache]


def _rotary_embedding(layer: Any, x: list[Array]) -> list[Array]:
    """Halves of the first dims are turned, the others stay.

    Cosines and sines are those of all positions, or of the rows if no positions are given.
    """
    assert not layer.interleaved
    positions = x[3] if len(x) > 3 else None
    tables = x[1:3] if positions is None else (t[positions] for t in x[1:3])
    rows, (cos, sin) = x[0].copy(), (t[:, None] for t in tables)  # [b, 1, s, half]
    half = layer.rotary_embedding_dim // 2
    first, second = x[0][..., :half], x[0][..., half : 2 * half]
    rows[..., :half] = first * cos - second * sin
    rows[..., half : 2 * half] = second * cos + first * sin
    return [rows]


def _attention(layer: Any, x: list[Array]) -> list[Array]:
    """Softmax of the products plus the mask, if any; a key head serves several query heads."""
    attention = layer.attention
    assert attention.norm_op.name == "SOFTMAX"
    query, key, value = x[:3]
    assert (attention.mask is None) == (len(x) == 3 or x[3] is None)
    mask = 0 if attention.mask is None else x[3]
    repeat = query.shape[1] // key.shape[1]
    key, value = (t.repeat(repeat, axis=1) for t in (key, value))
    scores = query @ key.swapaxes(-1, -2) + mask
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return [weights / weights.sum(axis=-1, keepdims=True) @ value]


LAYERS: Mapping[str, Any] = {
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

"""What each kind of layer gives, by the name of the library's `LayerType`."""

CLASSES: Mapping[str, str] = {
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
