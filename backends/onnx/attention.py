"""Lowerings of rotary embedding, KV caches and attention."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, numpy_helper

from edgecc.backends.onnx.emitter import CONTRIB, Emitter, lowers
from edgecc.backends.onnx.slots import attend_by_slot
from edgecc.devices import Dialect
from edgecc.ir.core import Node
from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes, SplitHeadsAttributes


@lowers("rope")
def rope(e: Emitter, node: Node) -> None:
    """`RotaryEmbedding-23` on `[b, s, heads * D]` with position ids."""
    attrs = node.attrs
    assert isinstance(attrs, RopeAttributes)
    x, positions = e.operands(node)
    tables = [e.weight(w) for w in node.weights]
    table = e.module.weights[e.module.weights.resolve(node.weights[0])]
    head_dim = int(str(node.result.type.shape[2])) // attrs.heads
    rotated = 2 * table.shape[1]
    e.result(
        node,
        "RotaryEmbedding",
        [x, *tables, positions],
        num_heads=attrs.heads,
        rotary_embedding_dim=0 if rotated == head_dim else rotated,
    )


@lowers("split_heads")
def split_heads(e: Emitter, node: Node) -> None:
    """`Split` of the head axis, between reshapes."""
    attrs = node.attrs
    assert isinstance(attrs, SplitHeadsAttributes)
    (x,) = e.operands(node)
    keep = [0] * (node.operands[0].type.rank - 1)
    (heads,) = e.op("Reshape", [x, e.ints(*keep, attrs.heads, sum(attrs.sizes))])
    pieces = e.op("Split", [heads, e.ints(*attrs.sizes)], len(attrs.sizes), axis=-1)
    for piece, size, result in zip(pieces, attrs.sizes, node.results, strict=True):
        e.op("Reshape", [piece, e.ints(*keep, attrs.heads * size)], [e.name(result)])


@lowers("cached_attention", Dialect.ORT_CONTRIB)
def cached_attention(e: Emitter, node: Node) -> None:
    """`GroupQueryAttention`: rotates, writes the caches in place, attends to the valid rows only.

    The kernel wants as many query rows as key rows: queries of a block draft belong to the last of
    the new rows, so zero rows go in front of them and the outputs there are cut off.
    """
    attrs = node.attrs
    assert isinstance(attrs, AttentionAttributes)
    q, k, v, k_cache, v_cache, start = node.operands
    new_rows = k.type.shape[1]
    padded = q.type.shape[1] != new_rows
    query = _pad_front(e, node) if padded else e.name(q)

    def total() -> str:
        return e.op("Add", [e.name(start), e.size(k, 1)])[0]

    length = e.once(("total", e.name(start), str(new_rows)), total)
    seqlens = e.once(
        ("seqlens", length),
        lambda: e.op("Cast", [e.op("Sub", [length, e.ints(1)])[0]], to=TensorProto.INT32)[0],
    )
    # The kernel takes the largest total of the batch as a scalar.
    total32 = e.once(
        ("total32", length),
        lambda: e.op("Cast", [e.op("ReduceMax", [length], keepdims=0)[0]], to=TensorProto.INT32)[0],
    )
    tables = [e.weight(w) for w in node.weights]
    result = e.name(node.results[0])
    if padded:
        result = f"{result}/all_rows"

    def kernel(
        rows: Sequence[str],
        caches: Sequence[str],
        lengths: tuple[str, str],
        outputs: Sequence[str],
    ) -> None:
        e.op(
            "GroupQueryAttention",
            [*rows, *caches, *lengths, *tables],
            outputs,
            domain=CONTRIB,
            num_heads=attrs.heads,
            kv_num_heads=attrs.kv_heads,
            scale=attrs.scale,
            do_rotary=1 if tables else 0,
            **({} if attrs.causal else {"causal": 0}),
            **({} if attrs.window is None else {"local_window_size": attrs.window}),
        )

    new = [query, e.name(k), e.name(v)]
    if e.slots > 1:
        attend_by_slot(e, node, new, (seqlens, total32), result, kernel)
    else:
        updated = [e.name(r) for r in node.results[1:]]
        kernel(new, [e.name(k_cache), e.name(v_cache)], (seqlens, total32), [result, *updated])
    if padded:
        rows = e.size(q, 1)
        start_row = e.once(("neg", rows), lambda: e.op("Neg", [rows])[0])
        end = e.ints(np.iinfo(np.int64).max)
        e.op("Slice", [result, start_row, end, e.ints(1)], [e.name(node.results[0])])


def _pad_front(e: Emitter, node: Node) -> str:
    """Zero rows in front of the queries, as many as there are context rows."""
    q, k = node.operands[0], node.operands[1]
    width = int(str(q.type.shape[2]))
    batch = e.size(k, 0)

    def zeros() -> str:
        (missing,) = e.op("Sub", [e.size(k, 1), e.size(q, 1)])
        (shape,) = e.op("Concat", [batch, missing, e.ints(width)], axis=0)
        fill = numpy_helper.from_array(np.zeros(1, dtype=np.float32))
        return e.op("ConstantOfShape", [shape], value=fill)[0]

    block = e.once(("zeros", str(k.type.shape[1]), str(q.type.shape[1]), width), zeros)
    return e.op("Concat", [block, e.name(q)], axis=1)[0]


@lowers("cache_update")
def cache_update(e: Emitter, node: Node) -> None:
    """`TensorScatter-24` along the row axis."""
    cache, new, start = node.operands
    kv_heads, head_dim = cache.type.shape[1], cache.type.shape[3]
    rows = _split_heads(e, e.name(new), int(str(kv_heads)), int(str(head_dim)))
    e.result(node, "TensorScatter", [e.name(cache), rows, e.name(start)], axis=2, mode="linear")


@lowers("attention")
def attention(e: Emitter, node: Node) -> None:
    """`Attention-24` with `nonpad_kv_seqlen`: the causal diagonal ends at the last valid row.

    A window is a mask: the operator has an attribute for it from opset 25 on.
    """
    attrs = node.attrs
    assert isinstance(attrs, AttentionAttributes)
    q, k_cache, v_cache, length = node.operands
    head_dim = int(str(k_cache.type.shape[3]))
    query = _split_heads(e, e.name(q), attrs.heads, head_dim)
    mask = "" if attrs.window is None else _window_mask(e, node, attrs.window)
    (out,) = e.op(
        "Attention",
        [query, e.name(k_cache), e.name(v_cache), mask, "", "", e.name(length)],
        is_causal=int(attrs.causal),
        scale=attrs.scale,
    )
    (rows,) = e.op("Transpose", [out], perm=[0, 2, 1, 3])
    e.result(node, "Reshape", [rows, e.ints(0, 0, -1)])


def _window_mask(e: Emitter, node: Node, window: int) -> str:
    """Which rows lie in the window of each query or behind it, bool `[b, 1, s, capacity]`.

    Row j does for the query of row i if `j > i - window`. Layers of one window share the mask.
    """
    q, k_cache, _, length = node.operands
    capacity = int(str(k_cache.type.shape[2]))

    def make() -> str:
        rows = e.size(q, 1)
        (first,) = e.op("Sub", [e.op("Sub", [e.name(length), rows])[0], e.ints(window)])
        (count,) = e.op("Squeeze", [rows])
        zero, one = (e.constant(np.array(v, dtype=np.int64)) for v in (0, 1))
        (steps,) = e.op("Range", [zero, count, one])
        (before,) = e.op("Add", [e.op("Unsqueeze", [first, e.ints(1)])[0], steps])
        (before,) = e.op("Unsqueeze", [before, e.ints(1, 3)])
        return e.op("Greater", [e.constant(np.arange(capacity, dtype=np.int64)), before])[0]

    key = ("window", e.name(length), str(q.type.shape[1]), window, capacity)
    return e.once(key, make)


def _split_heads(e: Emitter, x: str, heads: int, head_dim: int) -> str:
    """`[b, s, heads * D]` to `[b, heads, s, D]`."""
    (split,) = e.op("Reshape", [x, e.ints(0, 0, heads, head_dim)])
    return e.op("Transpose", [split], perm=[0, 2, 1, 3])[0]
