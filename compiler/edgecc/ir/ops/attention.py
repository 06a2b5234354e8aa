"""Attention over fixed-capacity KV caches, and rotary position embedding.

Activations are `[b, s, heads * head_dim]`, caches `[b, kv_heads, capacity, head_dim]`. Query head h
reads KV head `h // (heads / kv_heads)`. A cache is a graph input and its update a graph output that
aliases it; rows at or beyond the valid length are garbage and never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgecc.errors import RequestError
from edgecc.ir.encodings import Array
from edgecc.ir.ops.base import (
    Attributes,
    EvalContext,
    Op,
    Scope,
    WeightView,
    check_indices,
    require,
    require_equal,
    require_float,
    require_type,
)
from edgecc.ir.types import Dim, DType, TensorType
from edgecc.ir.weights import Weight


@dataclass(frozen=True, slots=True)
class RopeAttributes(Attributes):
    """`heads`: how many heads the last axis of x has."""

    heads: int


@dataclass(frozen=True, slots=True)
class AttentionAttributes(Attributes):
    """Head counts, `scale` of the scores, and which rows a query sees.

    With `causal`, those up to its own; of them with a `window` only the last `window` ones, its own
    included. Without, all valid rows.
    """

    heads: int
    kv_heads: int
    scale: float
    causal: bool = True
    window: int | None = None


@dataclass(frozen=True, slots=True)
class SplitHeadsAttributes(Attributes):
    """`heads`: how many the last axis has. `sizes`: widths of the pieces of each head."""

    heads: int
    sizes: tuple[int, ...]


def rotate(x: Array, cos: Array, sin: Array, heads: int) -> Array:
    """Rotary embedding, halves rotated (NeoX form).

    Args:
        x: `[b, s, heads * D]`.
        cos: `[b, s, R/2]` for the position of each row; R <= D dims are rotated, the rest pass.
        sin: Like cos.
        heads: Number of heads.

    Returns:
        `[b, s, heads * D]`: with the first R dims as halves x1, x2,
        `[x1 cos - x2 sin, x2 cos + x1 sin, rest]`.
    """
    split = x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)
    half = cos.shape[-1]
    x1, x2, rest = split[..., :half], split[..., half : 2 * half], split[..., 2 * half :]
    c, s = cos[:, :, None, :], sin[:, :, None, :]
    return np.concatenate([x1 * c - x2 * s, x2 * c + x1 * s, rest], axis=-1).reshape(x.shape)


def check_start(start: Array, rows: int, capacity: int) -> None:
    """Check that `rows` new rows from each `start` on fit into a cache.

    Raises:
        RequestError: They do not.
    """
    for first in start.tolist():
        last = first + rows
        if first < 0 or last > capacity:
            raise RequestError(
                "run/cache-overflow", f"rows {first}..{last} exceed the cache capacity {capacity}"
            )


def check_length(length: Array, queries: int, capacity: int) -> None:
    """Check that each number of valid rows holds the queries and is held by the cache.

    Raises:
        RequestError: One does not.
    """
    for total in length.tolist():
        if not queries <= total <= capacity:
            raise RequestError(
                "run/cache-length",
                f"{total} valid rows: expected at least the {queries} new ones and at most the "
                f"cache capacity {capacity}",
            )


def write_rows(cache: Array, new: Array, start: Array) -> Array:
    """A copy of the cache with rows of each sequence written from its `start` on.

    Raises:
        RequestError: The rows do not fit into the capacity.
    """
    b, kv_heads, capacity, head_dim = cache.shape
    rows = new.reshape(b, new.shape[1], kv_heads, head_dim).transpose(0, 2, 1, 3)
    check_start(start, rows.shape[2], capacity)
    out = cache.copy()
    for i, first in enumerate(start.tolist()):
        out[i, :, first : first + rows.shape[2]] = rows[i]
    return out


def attend(
    q: Array, k_cache: Array, v_cache: Array, length: Array, attrs: AttentionAttributes
) -> Array:
    """Softmax attention of the last `s` valid rows over all valid rows, one query row at a time.

    Raises:
        RequestError: There are fewer than `s` valid rows, or more than the caches hold.
    """
    b, s, width = q.shape
    check_length(length, s, k_cache.shape[2])
    group = attrs.heads // attrs.kv_heads
    queries = q.reshape(b, s, attrs.kv_heads, group, width // attrs.heads)
    out = np.empty_like(queries, shape=(b, s, attrs.kv_heads, group, v_cache.shape[-1]))
    for i in range(b):
        total = int(length[i])
        for j in range(s):
            seen = total - s + j + 1 if attrs.causal else total
            first = 0 if attrs.window is None else max(seen - attrs.window, 0)
            keys, values = k_cache[i, :, first:seen], v_cache[i, :, first:seen]
            scores = np.einsum("hgd,hnd->hgn", queries[i, j], keys) * q.dtype.type(attrs.scale)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[i, j] = np.einsum("hgn,hnd->hgd", weights, values)
    return out.reshape(b, s, attrs.heads * v_cache.shape[-1])


def look_up(tables: Sequence[WeightView], positions: Array) -> tuple[Array, Array]:
    """Cosines and sines `[..., R/2]` at i64 positions `[...]`.

    Raises:
        RequestError: The tables have no such position.
    """
    check_indices("rotary tables", positions, tables[0].weight.shape[0])
    return tables[0].dense()[positions], tables[1].dense()[positions]


def _check_attention(
    q: TensorType,
    k_cache: TensorType,
    v_cache: TensorType,
    length: TensorType,
    attrs: AttentionAttributes,
) -> TensorType:
    """What both attention ops need; the type of the attention output."""
    require_float("q", q)
    require_type("q", q, k_cache.dtype, rank=3)
    require_type("length", length, DType.I64, rank=1)
    require(
        attrs.heads > 0 and attrs.kv_heads > 0 and attrs.heads % attrs.kv_heads == 0,
        f"heads / kv_heads is not whole: {attrs.heads} / {attrs.kv_heads}",
    )
    require(
        attrs.window is None or (attrs.causal and attrs.window > 0),
        f"a window must be positive and causal, got {attrs}",
    )
    for what, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require_type(what, cache, k_cache.dtype, rank=4)
        require_equal(f"batch of {what}", cache.shape[0], q.shape[0])
        require_equal(f"heads of {what}", cache.shape[1], attrs.kv_heads)
    require_equal("capacity of v_cache", v_cache.shape[2], k_cache.shape[2])
    require_equal("batch of length", length.shape[0], q.shape[0])
    require_equal("width of q", q.shape[2], k_cache.shape[3] * attrs.heads)
    return TensorType(q.dtype, (*q.shape[:2], v_cache.shape[3] * attrs.heads))


def check_tables(weights: Sequence[Weight], head_dim: Dim) -> None:
    """Check that rotary tables fit heads of this width."""
    cos, sin = weights
    require_equal("rank of cos", len(cos.shape), 2)
    require_equal("shape of sin", sin.shape, cos.shape)
    require(
        isinstance(head_dim, int) and 2 * cos.shape[1] <= head_dim,
        f"tables rotate {2 * cos.shape[1]} dims of a head of {head_dim}",
    )


class Rope(Op[RopeAttributes]):
    """Rotary position embedding, halves rotated: x `[b, s, heads * D]`, positions i64 `[b, s]`.

    The tables `cos` and `sin` are f32 `[positions, R/2]`; R <= D dims are rotated (partial rotary).
    """

    name = "rope"
    attributes = RopeAttributes
    operands = ("x", "positions")
    weights = ("cos", "sin")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: RopeAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of x."""
        x, positions = operands
        require_float("x", x)
        require_type("x", x, rank=3)
        require_type("positions", positions, DType.I64, rank=2)
        require_equal("axes of positions", positions.shape, x.shape[:2])
        width = x.shape[2]
        require(
            isinstance(width, int) and attrs.heads > 0 and width % attrs.heads == 0,
            f"the last axis of {x} must divide into {attrs.heads} heads",
        )
        check_tables(weights, int(str(width)) // attrs.heads)
        return (x,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: RopeAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Look up, then `rotate`."""
        x, positions = operands
        return (rotate(x, *look_up(weights, positions), attrs.heads),)


class CacheUpdate(Op[Attributes]):
    """Writes new rows into a cache.

    cache `[b, kv_heads, C, D]`, new `[b, s, kv_heads * D]`, start i64 `[b]`.
    Row i of sequence j goes to `start[j] + i`; other rows keep their values.
    """

    name = "cache_update"
    operands = ("cache", "new", "start")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of the cache."""
        cache, new, start = operands
        require_type("cache", cache, rank=4)
        require_type("new", new, cache.dtype, rank=3)
        require_type("start", start, DType.I64, rank=1)
        require_equal("batch of new", new.shape[0], cache.shape[0])
        require_equal("batch of start", start.shape[0], cache.shape[0])
        heads = cache.shape[1]
        require(isinstance(heads, int), f"cache must have a known number of heads, got {cache}")
        require_equal("width of new", new.shape[2], cache.shape[3] * int(str(heads)))
        return (cache,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """See `write_rows`."""
        return (write_rows(*operands),)


class Attention(Op[AttentionAttributes]):
    """Grouped-query attention of the newest rows over a cache.

    q `[b, s, heads * D]` holds the queries of the last s valid rows; `length` i64 `[b]` counts the
    valid rows, those s included. With `causal`, query i sees rows up to its own, with a `window`
    only the last of them; without, all valid rows. Scores are `scale * q k`, softmax in the
    evaluation dtype.
    """

    name = "attention"
    attributes = AttentionAttributes
    operands = ("q", "k_cache", "v_cache", "length")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: AttentionAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """`[b, s, heads * Dv]`."""
        q, k_cache, v_cache, length = operands
        return (_check_attention(q, k_cache, v_cache, length, attrs),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: AttentionAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """See `attend`."""
        q, k_cache, v_cache, length = operands
        return (attend(q, k_cache, v_cache, length, attrs),)


class CachedAttention(Op[AttentionAttributes]):
    """Rotary embedding, cache update and attention in one: made by `fuse-cached-attention`.

    q `[b, s, heads * D]`, k and v `[b, n, kv_heads * D]` with n >= s new rows that start at
    `start`; the queries belong to the last s of them. Results: the attention output and both
    updated caches.
    With the optional `cos` and `sin` tables, q and k are rotated at their own positions first.
    """

    name = "cached_attention"
    attributes = AttentionAttributes
    operands = ("q", "k", "v", "k_cache", "v_cache", "start")
    weights = ("cos?", "sin?")
    results = ("result", "k_cache", "v_cache")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: AttentionAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """Like `attention`, then both caches."""
        q, k, v, k_cache, v_cache, start = operands
        out = _check_attention(q, k_cache, v_cache, start, attrs)
        require_type("k", k, k_cache.dtype, rank=3)
        require_type("v", v, k_cache.dtype, rank=3)
        require_equal("batch of k", k.shape[0], q.shape[0])
        require_equal("rows of v", v.shape[:2], k.shape[:2])
        require_equal("width of k", k.shape[2], k_cache.shape[3] * attrs.kv_heads)
        require_equal("width of v", v.shape[2], v_cache.shape[3] * attrs.kv_heads)
        extra = q.shape[1] - k.shape[1]
        require(
            not isinstance(extra, int) or extra <= 0,
            f"{q.shape[1]} queries belong to at most {k.shape[1]} new rows",
        )
        require(len(weights) != 1, "give both rotary tables or none")
        if weights:
            check_tables(weights, k_cache.shape[3])
        return (out, k_cache, v_cache)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: AttentionAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Rotate, write, attend."""
        q, k, v, k_cache, v_cache, start = operands
        if weights:
            cos, sin = look_up(weights, start[:, None] + np.arange(k.shape[1]))
            k = rotate(k, cos, sin, attrs.kv_heads)
            last = slice(k.shape[1] - q.shape[1], None)
            q = rotate(q, cos[:, last], sin[:, last], attrs.heads)
        k_cache, v_cache = write_rows(k_cache, k, start), write_rows(v_cache, v, start)
        return attend(q, k_cache, v_cache, start + k.shape[1], attrs), k_cache, v_cache


class SplitHeads(Op[SplitHeadsAttributes]):
    """Each head cut into pieces: x `[..., heads * sum(sizes)]` gives `[..., heads * size]` a size.

    For projections that store query and gate of a head side by side. With one head it is `split`
    along the last axis.
    """

    name = "split_heads"
    attributes = SplitHeadsAttributes
    operands = ("x",)
    results = ("pieces",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: SplitHeadsAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """One type per size; the sizes of all heads add up to the last axis."""
        (x,) = operands
        require(x.rank > 0, f"x must have at least one axis, got {x}")
        require(attrs.heads > 0, f"heads must be positive, got {attrs.heads}")
        require(
            len(attrs.sizes) > 0 and min(attrs.sizes) > 0, f"sizes {attrs.sizes} must be positive"
        )
        require_equal("heads * sum of sizes", attrs.heads * sum(attrs.sizes), x.shape[-1])
        return tuple(TensorType(x.dtype, (*x.shape[:-1], attrs.heads * s)) for s in attrs.sizes)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: SplitHeadsAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """`numpy.split` of each head."""
        (x,) = operands
        lead = x.shape[:-1]
        edges = np.cumsum(attrs.sizes)[:-1]
        pieces = np.split(x.reshape(*lead, attrs.heads, sum(attrs.sizes)), edges, axis=-1)
        return tuple(
            piece.reshape(*lead, attrs.heads * size)
            for piece, size in zip(pieces, attrs.sizes, strict=True)
        )


OPS = (Rope(), CacheUpdate(), Attention(), CachedAttention(), SplitHeads())
