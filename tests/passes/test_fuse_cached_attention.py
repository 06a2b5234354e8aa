from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import (
    Builder,
    DType,
    Interpreter,
    Location,
    Module,
    Role,
    SymbolRange,
    Value,
    sym,
    verify,
)
from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes
from edgecc.ir.ops.elementwise import CastAttributes
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.ir.types import substitute
from edgecc.passes.base import PassContext
from edgecc.passes.dce import Dce
from edgecc.passes.fuse_cached_attention import FuseCachedAttention
from helpers.modules import check_pass
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options
from helpers.weights import dense

OWN = PairOptions(draft_head="own", draft_embedding="own")
HEADS, KV_HEADS, DIM, CAPACITY = 2, 1, 4, 12


@dataclass
class Parts:
    """Values of one attention, for variations: what is not given is made the usual way."""

    b: Builder
    start: Value
    q: Value
    k: Value
    v: Value
    k_cache: Value
    v_cache: Value
    given: dict[str, Value] = field(default_factory=dict)

    def finish(self) -> Builder:
        """Update the caches, attend, return all three."""
        b, made = self.b, self.given
        k = made.get("k_new") or b.op("cache_update", self.k_cache, self.k, self.start, name="kn")
        v = made.get("v_new") or b.op("cache_update", self.v_cache, self.v, self.start, name="vn")
        length = made.get("length") or b.op("advance", self.start, self.k)
        attrs = AttentionAttributes(HEADS, KV_HEADS, 0.5)
        y = b.op("attention", self.q, k, v, length, attrs=attrs, name="y")
        b.output(y, "y", Role.ACTIVATION)
        b.output(k, "k_cache", Role.KV_CACHE, alias="k_cache")
        b.output(v, "v_cache", Role.KV_CACHE, alias="v_cache")
        return b


def parts(queries: str = "t", rows: str = "t") -> Parts:
    """Inputs of one attention; `rows` new keys, `queries` queries."""
    dims = {"t": sym("t"), "c + 2": sym("c") + 2, "c": sym("c"), "2": 2, "3": 3, "c + t": None}
    dims["c + t"] = sym("c") + sym("t")
    module = Module("m")
    module.symbols.update(b=SymbolRange(1, 2), t=SymbolRange(1, 8), c=SymbolRange(0, 8))
    b = Builder(module, "main").at("model.safetensors: attn")
    batch = sym("b")
    start = b.input("start", DType.I64, (batch,), Role.CACHE_LENGTH)
    rows_in = [
        b.input(n, DType.F32, (batch, dims[s], heads * DIM), Role.ACTIVATION)
        for n, s, heads in (("q", queries, HEADS), ("k", rows, KV_HEADS), ("v", rows, KV_HEADS))
    ]
    shape = (batch, KV_HEADS, CAPACITY, DIM)
    caches = [b.input(f"{n}_cache", DType.F32, shape, Role.KV_CACHE) for n in "kv"]
    return Parts(b, start, *rows_in, *caches)


def rotary(p: Parts, symbol: str = "rope") -> tuple[str, str]:
    angle = np.random.default_rng(len(symbol)).uniform(-3, 3, (CAPACITY, 2))
    p.b.module.weights.add(f"{symbol}.cos", dense(np.cos(angle)))
    p.b.module.weights.add(f"{symbol}.sin", dense(np.sin(angle)))
    return f"{symbol}.cos", f"{symbol}.sin"


def turn(p: Parts, x: Value, heads: int, positions: Value, tables: tuple[str, str]) -> Value:
    return p.b.op("rope", x, positions, weights=tables, attrs=RopeAttributes(heads))


def inputs(module: Module, seed: int = 0, **sizes: int) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    sizes = {"b": 2, "t": 3, "c": 2} | sizes
    made = {}
    for item in module.graphs["main"].inputs:
        shape = substitute(item.value.type.shape, sizes)
        if item.value.type.dtype is DType.I64:
            made[item.name] = rng.integers(0, 4, shape)
        else:
            made[item.name] = rng.standard_normal(shape)
    return {"main": made}


def fused(module: Module) -> list:
    return [n for g in module.graphs.values() for n in g.nodes if n.op.name == "cached_attention"]


def check(p: Parts, *, weights: tuple[str, ...] = (), dead: int = 0):
    """The pass fuses, values stay, and what only moved into the op is left for `dce`."""
    b = p.finish()
    module, ctx = b.module, PassContext()
    assert check_pass(FuseCachedAttention(), module, inputs(module), ctx)
    assert [r.message for r in ctx.remarks] == ["fused"]
    (node,) = fused(module)
    assert node.weights == weights
    assert [r.name for r in node.results] == ["y", "kn", "vn"]
    assert node.location == Location("model.safetensors: attn", ("fuse-cached-attention",))
    assert [o.value for o in b.graph.outputs] == list(node.results)
    count = len(b.graph.nodes)
    Dce().run(module, ctx)
    assert len(b.graph.nodes) == count - dead
    return node


def test_without_rotary_embedding():
    p = parts()
    node = check(p)
    assert node.operands == (p.q, p.k, p.v, p.k_cache, p.v_cache, p.start)
    assert node.attrs == AttentionAttributes(HEADS, KV_HEADS, 0.5)
    assert [n.op.name for n in p.b.graph.nodes] == ["cached_attention"]


@pytest.mark.parametrize(("sequences", "count"), [(1, 1), (2, 0)])
def test_caches_that_are_computed(sequences, count):
    """A draft that runs its layer step by step: each but the first goes on with the last one's."""
    p = parts()
    p.b.module.metadata["limits"] = {"max_batch_size": sequences}
    before = (
        p.b.op("cache_update", p.k_cache, p.k, p.start),
        p.b.op("cache_update", p.v_cache, p.v, p.start),
    )
    p.k_cache, p.v_cache = before
    p.finish()
    ctx = PassContext()
    assert FuseCachedAttention().run(p.b.module, ctx) is (count > 0)
    assert len(fused(p.b.module)) == count


@pytest.mark.parametrize(("sequences", "count"), [(1, 1), (2, 0)])
def test_graphs_that_are_called_together_have_their_caches_alike(sequences, count):
    """One layer of two that take turns: here it attends, there its cache is only written to."""
    p = parts()
    p.b.module.metadata["limits"] = {"max_batch_size": sequences}
    p.finish()
    module = p.b.module
    writes = Builder(module, "writes")
    cache = writes.input("cache", DType.F32, p.k_cache.type.shape, Role.KV_CACHE)
    rows = writes.input("rows", DType.F32, p.k.type.shape, Role.ACTIVATION)
    start = writes.input("start", DType.I64, p.start.type.shape, Role.CACHE_LENGTH)
    written = writes.op("cache_update", cache, rows, start)
    writes.output(written, "cache", Role.KV_CACHE, alias="cache")

    assert FuseCachedAttention().run(module, PassContext()) is True  # nobody calls both
    assert len(fused(module)) == 1

    p = parts()
    p.b.module.metadata["limits"] = {"max_batch_size": sequences}
    p.finish()
    p.b.op("cache_update", p.k_cache, p.k, p.start, name="other")
    assert FuseCachedAttention().run(p.b.module, PassContext()) is (count > 0)
    assert len(fused(p.b.module)) == count


def test_rotary_embeddings_that_are_rounded_stay_outside():
    p = parts()
    narrow = CastAttributes("bf16")
    p.q, p.k, p.v, p.k_cache, p.v_cache = (
        p.b.op("cast", v, attrs=narrow) for v in (p.q, p.k, p.v, p.k_cache, p.v_cache)
    )
    positions = p.b.op("position_ids", p.start, p.k)
    tables = rotary(p)
    p.q, p.k = turn(p, p.q, HEADS, positions, tables), turn(p, p.k, KV_HEADS, positions, tables)
    k, v = (
        p.b.op("cache_update", cache, new, p.start)
        for cache, new in ((p.k_cache, p.k), (p.v_cache, p.v))
    )
    attrs = AttentionAttributes(HEADS, KV_HEADS, 0.5)
    y = p.b.op("attention", p.q, k, v, p.b.op("advance", p.start, p.k), attrs=attrs)
    p.b.output(y, "y", Role.ACTIVATION)
    assert check_pass(FuseCachedAttention(), p.b.module, inputs(p.b.module))
    assert [n.weights for n in fused(p.b.module)] == [()]


def test_with_rotary_embedding_at_common_positions():
    p = parts()
    q, k, tables = p.q, p.k, rotary(p)
    positions = p.b.op("position_ids", p.start, p.k)
    p.q, p.k = turn(p, q, HEADS, positions, tables), turn(p, k, KV_HEADS, positions, tables)
    node = check(p, weights=tables, dead=3)
    assert node.operands[:2] == (q, k)
    assert [n.op.name for n in p.b.graph.nodes] == ["cached_attention"]


def test_with_positions_counted_twice():
    p = parts()
    tables = rotary(p)
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        positions = p.b.op("position_ids", p.start, getattr(p, name))
        setattr(p, name, turn(p, getattr(p, name), heads, positions, tables))
    check(p, weights=tables, dead=4)


def test_queries_at_the_last_positions_of_a_block():
    p = parts("2", "c + 2")
    q, tables = p.q, rotary(p)
    positions = p.b.op("position_ids", p.start, p.k)
    last = p.b.op("tail", positions, q, attrs=AxisAttributes(1))
    p.q, p.k = turn(p, q, HEADS, last, tables), turn(p, p.k, KV_HEADS, positions, tables)
    check(p, weights=tables, dead=4)


@pytest.mark.parametrize("shape", [("t", "c + t"), ("2", "3"), ("2", "2"), ("2", "c + 2")])
def test_queries_of_the_last_rows(shape):
    check(parts(*shape))


# Rotations that stay where they are: the attention is fused all the same.


def rotated(change: str) -> Parts:
    p = parts("2", "c + 2") if change == "tail of other positions" else parts()
    tables, other = rotary(p), rotary(p, "other tables")
    positions = p.b.op("position_ids", p.start, p.k)
    elsewhere = p.b.input("other", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
    shifted = p.b.op("position_ids", elsewhere, p.k)
    q_positions = k_positions = positions
    q_tables = k_tables = tables
    if change == "other tables":
        q_tables = other
    elif change == "other positions":
        q_positions = shifted
    elif change == "positions that count from elsewhere":
        q_positions = k_positions = shifted
    elif change == "tail of other positions":
        q_positions = p.b.op("tail", shifted, p.q, attrs=AxisAttributes(1))
    elif change == "positions from outside":
        q_positions = k_positions = p.b.input(
            "positions", DType.I64, (sym("b"), sym("t")), Role.ACTIVATION
        )
    if change != "queries not rotated":
        p.q = turn(p, p.q, HEADS, q_positions, q_tables)
    if change != "keys not rotated":
        p.k = turn(p, p.k, KV_HEADS, k_positions, k_tables)
    return p


@pytest.mark.parametrize(
    "change",
    [
        "other tables",
        "other positions",
        "positions that count from elsewhere",
        "tail of other positions",
        "positions from outside",
        "queries not rotated",
        "keys not rotated",
    ],
)
def test_other_rotations_stay_outside(change):
    p = rotated(change)
    b = p.finish()
    assert check_pass(FuseCachedAttention(), b.module, inputs(b.module))
    (node,) = fused(b.module)
    assert node.weights == ()
    assert node.operands[:2] == (p.q, p.k)


# Near misses: nothing is fused.

NEAR_MISSES: dict[str, tuple[str, Callable[[], Builder]]] = {}


def near_miss(reason: str):
    def register(function: Callable[[], Builder]):
        NEAR_MISSES[function.__name__] = (reason, function)
        return function

    return register


@near_miss("k_cache of attention is a graph input, expected cache_update")
def keys_not_updated() -> Builder:
    p = parts()
    p.given["k_new"] = p.k_cache
    return p.finish()


@near_miss("v_cache of attention is a graph input, expected cache_update")
def values_not_updated() -> Builder:
    p = parts()
    p.given["v_new"] = p.v_cache
    return p.finish()


@near_miss("k_cache of attention is made by silu, expected cache_update")
def cache_made_by_something_else() -> Builder:
    p = parts()
    p.given["k_new"] = p.b.op("silu", p.k_cache)
    return p.finish()


@near_miss("v_cache of attention is made by silu, expected cache_update")
def values_made_by_something_else() -> Builder:
    p = parts()
    p.given["v_new"] = p.b.op("silu", p.v_cache)
    return p.finish()


@near_miss("start of cache_update is %other, expected %start as before")
def other_start() -> Builder:
    p = parts()
    other = p.b.input("other", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
    p.given["v_new"] = p.b.op("cache_update", p.v_cache, p.v, other)
    return p.finish()


@near_miss("keys and values are one cache")
def one_cache() -> Builder:
    p = parts()
    p.given["k_new"] = p.given["v_new"] = p.b.op("cache_update", p.k_cache, p.k, p.start)
    b = p.finish()
    b.graph.outputs.pop()
    return b


@near_miss("k_cache of attention is also read by %silu = silu(%cache_update)")
def other_reader_of_keys() -> Builder:
    p = parts()
    p.given["k_new"] = p.b.op("cache_update", p.k_cache, p.k, p.start)
    p.b.output(p.b.op("silu", p.given["k_new"]), "z", Role.ACTIVATION)
    return p.finish()


@near_miss("v_cache of attention is also read by %silu = silu(%vn)")
def other_reader_of_values() -> Builder:
    p = parts()
    b = p.finish()
    b.output(b.op("silu", b.graph.outputs[2].value), "z", Role.ACTIVATION)
    return b


@near_miss("length of attention is a graph input, expected advance")
def length_from_outside() -> Builder:
    p = parts()
    p.given["length"] = p.b.input("length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
    return p.finish()


@near_miss("length of advance is %other, expected %start as before")
def length_advanced_from_elsewhere() -> Builder:
    p = parts()
    other = p.b.input("other", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
    p.given["length"] = p.b.op("advance", other, p.k)
    return p.finish()


@near_miss("length of attention is a graph input, expected advance")
def length_is_the_start() -> Builder:
    p = parts("2", "2")
    p.given["length"] = p.start
    return p.finish()


@near_miss("the length does not count the new rows")
def length_counts_other_rows() -> Builder:
    p = parts("2", "c + 2")
    p.given["length"] = p.b.op("advance", p.start, p.q)
    return p.finish()


@near_miss("there may be more queries than new rows")
def more_queries_than_rows() -> Builder:
    return parts("3", "2").finish()


@near_miss("there may be more queries than new rows")
def perhaps_more_queries_than_rows() -> Builder:
    return parts("t", "2").finish()


@near_miss("there may be more queries than new rows")
def queries_and_rows_of_unrelated_counts() -> Builder:
    return parts("t", "c").finish()


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    reason, make = NEAR_MISSES[name]
    module, ctx = make().module, PassContext()
    assert verify(module) == []
    sizes = {"t": 2, "c": 2} if "queries" in name else {}
    data = inputs(module, **sizes)
    data["main"] |= {n: np.array([8, 9]) for n in ("length",) if n in data["main"]}
    if name == "length_advanced_from_elsewhere":
        data["main"]["other"] = data["main"]["start"] + 1
    if name == "length_is_the_start":
        data["main"]["start"] = np.array([4, 5])
    if name == "more_queries_than_rows":
        data["main"]["start"] = np.array([4, 5])
    assert not check_pass(FuseCachedAttention(), module, data, ctx)
    assert [(r.message, r.applied) for r in ctx.remarks] == [(reason, False)]


def test_symbols_without_a_range_are_not_trusted():
    b = parts("2", "c + 2").finish()
    assert verify(b.module) == []
    del b.module.symbols["c"]
    assert not FuseCachedAttention().run(b.module, PassContext())


def test_sizes_that_symbols_cannot_reach_are_fine():
    """At most 8 queries and at least 8 rows."""
    p = parts("t", "c")
    p.b.module.symbols["c"] = SymbolRange(8, 9)
    module = p.finish().module
    assert check_pass(FuseCachedAttention(), module, inputs(module, t=3, c=8))


# Whole decoders


@pytest.mark.parametrize("rope", [True, False])
def test_pairs(rope):
    options = replace(OWN, layers=2, rope=rope)
    module = pair(options)
    assert check_pass(FuseCachedAttention(), module, pair_inputs(module, options))
    nodes = fused(module)
    assert len(nodes) == 4
    assert [len(n.weights) for n in nodes] == [2 * rope] * 4
    Dce().run(module, PassContext())
    names = {n.op.name for g in module.graphs.values() for n in g.nodes}
    assert names.isdisjoint({"attention", "cache_update", "rope", "position_ids", "advance"})


@FEWER
@given(
    pair_options(),
    st.integers(0, 9),
    st.integers(1, 2),
    st.integers(0, 3),
    st.integers(0, 2),
)
def test_random_pairs(options, seed, batch, context, start):
    options = replace(options, draft_head="own", draft_embedding="own")
    module = pair(options)
    data = pair_inputs(module, options, seed, batch=batch, context=context, start=start)
    assert check_pass(FuseCachedAttention(), module, data)
    assert len(fused(module)) == 2 * options.layers


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_both_precisions(dtype):
    module = pair(OWN)
    data = pair_inputs(module, OWN)["draft"]
    before = Interpreter(module, dtype).run("draft", data)
    FuseCachedAttention().run(module, PassContext())
    after = Interpreter(module, dtype).run("draft", data)
    assert all(after[n].tobytes() == before[n].tobytes() for n in before)
