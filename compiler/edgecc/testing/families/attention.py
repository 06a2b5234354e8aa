"""Expressions of attention, rotary embedding and caches."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes, SplitHeadsAttributes
from edgecc.ir.types import Dim, sym, symbols_of
from edgecc.testing.expressions import Apply, Expr, Leaf, Wanted, floats, indices, most
from edgecc.testing.families.norm import last_axis
from edgecc.testing.rules import Grower, Rule, apply, is_float
from edgecc.testing.weight_trees import WeightTree, rotary_tables

HEAD_DIM = 2
"""Of queries and keys, where the wanted tensor does not fix it."""


def _is_heads(wanted: Wanted) -> bool:
    """`[b, s, heads * D]`."""
    return is_float(wanted) and wanted.rank == 3 and last_axis(wanted) > 0


def _is_rotatable(wanted: Wanted) -> bool:
    return _is_heads(wanted) and last_axis(wanted) >= 2


def _is_cache(wanted: Wanted) -> bool:
    """`[b, kv_heads, C, D]` of known sizes."""
    known = wanted.rank == 4 and all(isinstance(d, int) and d > 0 for d in wanted.shape[1:])
    return known and is_float(wanted)


def _cache_fits(wanted: Wanted) -> bool:
    return _is_cache(wanted) and most(wanted.shape[2]) > 1


def _rope(grow: Grower, wanted: Wanted) -> Expr:
    width, rows = last_axis(wanted), wanted.shape[1]
    heads = grow.pick(*(h for h in (1, 2, 4) if width % h == 0 and width // h >= 2))
    rotated = grow.pick(*(r for r in (2, 4) if r <= width // heads))
    length = most(rows) + 3
    positions = grow(indices(length, *wanted.shape[:2]))
    tables = rotary_tables(length, rotated)
    return apply("rope", grow(wanted), positions, weights=tables, attrs=RopeAttributes(heads))


def _new_rows(grow: Grower, capacity: int) -> Dim:
    """How many rows are written at once, always fewer than fit."""
    choices: tuple[Dim, ...] = (1, sym("s"), sym("t"), 3, 0)
    return grow.pick(*(rows for rows in choices if most(rows) < capacity))


def _cache_update(grow: Grower, wanted: Wanted) -> Expr:
    batch, heads, capacity, head_dim = (wanted.shape[0], *map(most, wanted.shape[1:]))
    rows = _new_rows(grow, capacity)
    new = grow(floats(batch, rows, heads * head_dim))
    start = grow(indices(capacity - most(rows) + 1, batch))
    return apply("cache_update", grow(wanted), new, start)


def _head_counts(grow: Grower, width: int) -> tuple[int, int]:
    """Query heads, which divide the width, and key heads, which divide them."""
    heads = grow.pick(*(h for h in (1, 2, 4) if width % h == 0))
    return heads, grow.pick(*(h for h in (1, 2) if heads % h == 0))


def _attributes(grow: Grower, heads: int, kv_heads: int) -> AttentionAttributes:
    causal, window = grow.pick((True, None), (False, None), (True, 1), (True, 3))
    return AttentionAttributes(heads, kv_heads, 0.5, causal, window)


def _attention(grow: Grower, wanted: Wanted) -> Expr:
    """Attention over any caches that are long enough."""
    batch, rows, width = wanted.shape[0], wanted.shape[1], last_axis(wanted)
    heads, kv_heads = _head_counts(grow, width)
    capacity = most(rows) + 2
    q = grow(floats(batch, rows, heads * HEAD_DIM))
    k_cache = grow(floats(batch, kv_heads, capacity, HEAD_DIM))
    v_cache = grow(floats(batch, kv_heads, capacity, width // heads))
    length = apply("advance", grow(indices(capacity - most(rows) + 1, batch)), q)
    attrs = _attributes(grow, heads, kv_heads)
    return apply("attention", q, k_cache, v_cache, length, attrs=attrs)


def _context(grow: Grower, wanted: Wanted) -> Dim:
    """Rows of keys: those of the queries, and in block drafts context rows before them."""
    rows = wanted.shape[1]
    free = [sym(s) for s in ("t", "s") if s not in symbols_of(wanted.shape)]
    return grow.pick(rows, *(rows + more for more in free))


def _layer(grow: Grower, wanted: Wanted) -> Expr:
    """An attention layer from its input on: projections, rotary embedding, caches."""
    batch, rows, width = wanted.shape[0], wanted.shape[1], last_axis(wanted)
    heads, kv_heads = _head_counts(grow, width)
    dim, capacity, columns = width // heads, most(rows) + 4, grow.pick(4, 2)
    x, start = grow(floats(batch, rows, columns)), grow(indices(5, batch))
    sizes = [count * dim for count in (heads, kv_heads, kv_heads)]
    weights: list[tuple[WeightTree, ...]] = [(grow.weight(size, columns),) for size in sizes]
    if grow.pick(False, True):
        weights = [(*w, grow.weight(size)) for w, size in zip(weights, sizes, strict=True)]
    q, k, v = (apply("linear", x, weights=w) for w in weights)
    if dim >= 2 and grow.pick(False, True):
        positions, tables = apply("position_ids", start, x), rotary_tables(capacity, 2)
        q = apply("rope", q, positions, weights=tables, attrs=RopeAttributes(heads))
        k = apply("rope", k, positions, weights=tables, attrs=RopeAttributes(kv_heads))
    cache = floats(batch, kv_heads, capacity, dim)
    caches = [apply("cache_update", Leaf(cache, i), new, start) for i, new in enumerate((k, v))]
    attrs = _attributes(grow, heads, kv_heads)
    return apply("attention", q, *caches, apply("advance", start, x), attrs=attrs)


@dataclass(frozen=True, slots=True)
class _Fused:
    """Sizes of a `cached_attention`."""

    batch: Dim
    rows: Dim
    new_rows: Dim
    heads: int
    kv_heads: int
    capacity: int
    k_dim: int
    v_dim: int

    def grow(self, grow: Grower, index: int) -> Expr:
        """The op with its operands; `index` says which result."""
        heads, capacity = self.kv_heads, self.capacity
        operands = (
            floats(self.batch, self.rows, self.heads * self.k_dim),
            floats(self.batch, self.new_rows, heads * self.k_dim),
            floats(self.batch, self.new_rows, heads * self.v_dim),
            floats(self.batch, heads, capacity, self.k_dim),
            floats(self.batch, heads, capacity, self.v_dim),
            indices(capacity - most(self.new_rows) + 1, self.batch),
        )
        weights: tuple[WeightTree, ...] = ()
        if self.k_dim >= 2 and grow.pick(False, True):
            weights = rotary_tables(capacity, 2)
        attrs = _attributes(grow, self.heads, heads)
        return Apply("cached_attention", tuple(map(grow, operands)), weights, attrs, index)


def _fused_result(grow: Grower, wanted: Wanted) -> Expr:
    new_rows = _context(grow, wanted)
    heads, kv_heads = _head_counts(grow, last_axis(wanted))
    capacity, v_dim = most(new_rows) + 2, last_axis(wanted) // heads
    batch, rows = wanted.shape[:2]
    sizes = _Fused(batch, rows, new_rows, heads, kv_heads, capacity, HEAD_DIM, v_dim)
    return sizes.grow(grow, 0)


def _fused_cache(grow: Grower, wanted: Wanted) -> Expr:
    """The updated key cache (result 1) or value cache (result 2)."""
    kv_heads, capacity, dim = map(most, wanted.shape[1:])
    rows, heads, index = _new_rows(grow, capacity), kv_heads * grow.pick(1, 2), grow.pick(1, 2)
    dims = (dim, HEAD_DIM) if index == 1 else (HEAD_DIM, dim)
    sizes = _Fused(wanted.shape[0], rows, rows, heads, kv_heads, capacity, *dims)
    return sizes.grow(grow, index)


def _split_heads(grow: Grower, wanted: Wanted) -> Expr:
    width = last_axis(wanted)
    heads = grow.pick(*(h for h in (1, 2, 4) if width % h == 0))
    before = [width // heads] * grow.number(0, 1)
    sizes = (*before, width // heads, *([1] * grow.number(0, 1)))
    x = grow(wanted.with_axis(wanted.rank - 1, heads * sum(sizes)))
    attrs = SplitHeadsAttributes(heads, sizes)
    return Apply("split_heads", (x,), attrs=attrs, index=len(before))


_LAYER = ("linear", "position_ids", "rope", "cache_update", "advance")

RULES = (
    Rule("split_heads", lambda w: is_float(w) and last_axis(w) > 0, _split_heads),
    Rule("rope", _is_rotatable, _rope),
    Rule("cache_update", _cache_fits, _cache_update),
    Rule("attention", _is_heads, _attention, uses=("advance",)),
    Rule("attention", _is_heads, _layer, uses=_LAYER),
    Rule("cached_attention", _is_heads, _fused_result, uses=("concat",)),
    Rule("cached_attention", _cache_fits, _fused_cache),
)
