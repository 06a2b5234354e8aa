"""Lowerings of rotary embedding, KV caches and attention."""

from __future__ import annotations

import numpy as np

from edgecc.backends.tensorrt.cache import Chain
from edgecc.backends.tensorrt.emitter import Emitter, Tensor, lowers
from edgecc.backends.tensorrt.shape import row_numbers
from edgecc.backends.tensorrt.weights import table
from edgecc.ir.core import Node, Value
from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes, SplitHeadsAttributes
from edgecc.ir.types import Dim, DType

MASKED = {DType.F32: -1e30, DType.BF16: -1e30, DType.F16: -3e4}
"""Added to scores of rows that are not to be seen: their weights underflow to 0."""


@lowers("rope")
def rope(e: Emitter, node: Node) -> None:
    """A rotary embedding layer in float32, with positions into the tables."""
    attrs = node.attrs
    assert isinstance(attrs, RopeAttributes)
    value, positions = node.operands
    cos, sin = (table(e, w) for w in node.weights)
    width = int(str(value.type.shape[2])) // attrs.heads
    x = e.cast(heads_first(e, e.value(value), value.type.shape, attrs.heads, width), DType.F32)
    rotated = 2 * int(cos.shape[1])
    layer = e.layer("rope", e.network.add_rotary_embedding(x, cos, sin, False, rotated))
    layer.set_input(3, e.value(positions))
    turned = e.cast(layer.get_output(0), value.type.dtype)
    e.result(node, e.reshape(e.transpose(turned, (0, 2, 1, 3)), value.type.shape))


@lowers("cache_update")
def cache_update(e: Emitter, node: Node) -> None:
    """A KV cache update layer; the runtime binds its output to the address of the cache.

    An update that another one follows is left to that: see `Chain`.
    """
    chain = Chain.of(node.result)
    chain.check(e)
    if not chain.is_inner:
        e.result(node, chain.write(e))


@lowers("attention")
def attention(e: Emitter, node: Node) -> None:
    """An attention layer over the whole cache with an explicit mask.

    The layer does not scale: queries are scaled before, in float32, and rounded again.
    """
    attrs = node.attrs
    assert isinstance(attrs, AttentionAttributes)
    q, k_cache, v_cache, _ = node.operands
    width = int(str(k_cache.type.shape[3]))
    query = e.cast(heads_first(e, e.value(q), q.type.shape, attrs.heads, width), DType.F32)
    scale = e.constant(np.full((1, 1, 1, 1), attrs.scale, dtype=np.float32))
    query = e.cast(e.binary("PROD", query, scale), q.type.dtype)
    layer = e.layer(
        "attention",
        e.network.add_attention_v2(
            query,
            Chain.of(k_cache).read(e),
            Chain.of(v_cache).read(e),
            e.trt.AttentionNormalizationOp.SOFTMAX,
            e.trt.CausalMaskKind.NONE,
        ),
    )
    layer.mask = _mask(e, node, attrs)
    layer.decomposable = True  # where no fused kernel takes the shape or type
    rows = e.transpose(layer.get_output(0), (0, 2, 1, 3))
    e.result(node, e.reshape(rows, node.result.type.shape))


def _mask(e: Emitter, node: Node, attrs: AttentionAttributes) -> Tensor:
    """What is added to the scores, `[b, 1, s, keys]`: 0 for rows a query sees, else a minimum.

    Added, because the builder (TensorRT-RTX 1.7.1) fails where several attention layers read one
    mask of truth values that it computes: "Graph contains more than one op named".
    """
    q, k_cache, _, length = node.operands
    chain = Chain.of(k_cache)
    batch, rows = length.type.shape[0], q.type.shape[1]
    dtype = q.type.dtype

    def make() -> Tensor:
        seen = e.reshape(e.value(length), (batch, 1, 1, 1))
        if attrs.causal:  # query i of s sees length - s + i + 1 rows
            later = e.reshape(_later(e, q), (1, 1, rows, 1))
            seen = e.binary("SUB", seen, later)
        else:  # as many rows as queries: the layer does not broadcast this axis
            zero = e.binary("SUB", row_numbers(e, q), row_numbers(e, q))
            seen = e.binary("SUM", seen, e.reshape(zero, (1, 1, rows, 1)))
        places = chain.places(e)
        visible = e.binary("LESS", places, seen)
        if attrs.window is not None:
            size = e.constant(np.full((1, 1, 1, 1), attrs.window + 1, dtype=np.int64))
            inside = e.binary("LESS", e.binary("SUB", seen, size), places)
            visible = e.binary("AND", visible, inside)
        zero, minimum = (
            e.constant(np.full((1, 1, 1, 1), value, dtype=dtype.numpy))
            for value in (0, MASKED[dtype])
        )
        return e.out("mask", e.network.add_select(visible, zero, minimum))

    key = ("mask", length, attrs.causal, attrs.window, chain.key(), str(rows), dtype)
    return e.once(key, make)


def _later(e: Emitter, q: Value) -> Tensor:
    """How many queries come after each one: i64 `[s]`."""
    one = e.constant(np.array([1], dtype=np.int64))
    last = e.binary("SUB", e.run_size(q, 1), one)
    return e.binary("SUB", last, row_numbers(e, q))


@lowers("split_heads")
def split_heads(e: Emitter, node: Node) -> None:
    """A gather of columns for each piece: known indices, whatever the sizes of the other axes."""
    attrs = node.attrs
    assert isinstance(attrs, SplitHeadsAttributes)
    (value,) = node.operands
    width = sum(attrs.sizes)
    first, pieces = 0, []
    for size in attrs.sizes:
        columns = np.arange(first, first + size) + width * np.arange(attrs.heads)[:, None]
        index = e.constant(columns.reshape(-1).astype(np.int64))
        layer = e.network.add_gather(e.value(value), index, value.type.rank - 1)
        pieces.append(e.out("gather", layer))
        first += size
    e.result(node, *pieces)


def heads_first(e: Emitter, x: Tensor, shape: tuple[Dim, ...], heads: int, width: int) -> Tensor:
    """`[b, s, heads * D]` to `[b, heads, s, D]`."""
    return e.transpose(e.reshape(x, (shape[0], shape[1], heads, width)), (0, 2, 1, 3))
