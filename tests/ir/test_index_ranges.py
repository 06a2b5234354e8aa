"""Ranges of integer inputs: by hand for each op, and as promises that evaluation keeps."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc.errors import InputError, RequestError
from edgecc.ir import Builder, DType, Interpreter, Module, Role, SymbolRange, Value, sym
from edgecc.ir.index_ranges import input_ranges
from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.sampling import MarkovChainAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes
from helpers.pairs import PairOptions, pair
from helpers.weights import dense

SIZES = {"b": 1, "t": 3}


class Maker:
    """A graph under construction with one integer input."""

    def __init__(self, shape: tuple[object, ...] = (sym("b"), sym("t"))) -> None:
        self.module = Module("m", symbols={"b": SymbolRange(1, 2), "t": SymbolRange(0, 9)})
        self.b = Builder(self.module, "g")
        self.x = self.b.input("x", DType.I64, shape, Role.ACTIVATION)  # type: ignore[arg-type]

    def table(self, name: str, rows: int, columns: int = 2) -> str:
        return self.module.weights.add(name, dense(np.ones((rows, columns)), DType.F32))

    def floats(self, name: str, *shape: object) -> Value:
        return self.b.input(name, DType.F32, shape, Role.ACTIVATION)  # type: ignore[arg-type]

    def range(self, value: Value | None = None, sizes: dict[str, int] | None = None) -> str:
        if value is not None:
            self.b.output(value, "y", Role.ACTIVATION)
        return str(input_ranges(self.module, "g", SIZES if sizes is None else sizes)["x"])


def test_embedding_takes_rows_of_its_table() -> None:
    m = Maker()
    y = m.b.op("embedding", m.x, weights=(m.table("w", 7),))
    assert m.range(y) == "0..6"


def test_the_strictest_user_counts() -> None:
    m = Maker()
    for rows in (7, 5, 9):
        m.b.op("embedding", m.x, weights=(m.table(f"w{rows}", rows),))
    assert m.range() == "0..4"


def test_take_rows_indexes_the_axis() -> None:
    m = Maker((sym("t"),))
    assert m.range(m.b.op("take_rows", m.floats("f", 1, 4, 2), m.x)) == "0..3"


def test_moved_integers_keep_their_demands() -> None:
    m = Maker((sym("b"), 4))
    y = m.b.op("slice", m.x, attrs=SliceAttributes(1, 1, 3))
    y = m.b.op("pad", y, attrs=PadAttributes(1, 2, 0))
    y = m.b.op("unsqueeze", y, attrs=AxisAttributes(2))
    y = m.b.op("squeeze", y, attrs=AxisAttributes(2))
    y = m.b.op("concat", y, y, attrs=AxisAttributes(1))
    assert m.range(m.b.op("embedding", y, weights=(m.table("w", 5),))) == "0..4"


def test_tail_moves_and_needs_its_rows() -> None:
    m = Maker()
    like = m.floats("like", sym("b"), 2)
    y = m.b.op("tail", m.x, like, attrs=AxisAttributes(1))
    assert m.range(m.b.op("embedding", y, weights=(m.table("w", 5),))) == "0..4"
    with pytest.raises(InputError, match="needs 2 rows of %x"):
        m.range(sizes={"b": 1, "t": 1})


@pytest.mark.parametrize(("rows", "expected"), [(3, "0..7"), (1, "0..9")])
def test_positions_are_a_length_and_what_follows(rows: int, expected: str) -> None:
    m = Maker((sym("b"),))
    x = m.floats("f", sym("b"), sym("t"), 4)
    positions = m.b.op("position_ids", m.x, x)
    tables = m.table("cos", 10), m.table("sin", 10)
    y = m.b.op("rope", x, positions, weights=tables, attrs=RopeAttributes(1))
    assert m.range(y, {"b": 1, "t": rows}) == expected


def test_no_rows_have_no_positions() -> None:
    m = Maker((sym("b"),))
    x = m.floats("f", sym("b"), sym("t"), 4)
    y = m.b.op("embedding", m.b.op("position_ids", m.x, x), weights=(m.table("w", 5),))
    assert m.range(y, {"b": 1, "t": 0}) == f"{-(1 << 63)}..{(1 << 63) - 1}"


def test_rows_are_written_where_the_cache_has_room() -> None:
    m = Maker((sym("b"),))
    cache, new = m.floats("cache", sym("b"), 1, 8, 4), m.floats("new", sym("b"), sym("t"), 4)
    assert m.range(m.b.op("cache_update", cache, new, m.x)) == "0..5"


def test_attention_reads_the_new_rows_at_least() -> None:
    m = Maker((sym("b"),))
    cache, q = m.floats("cache", sym("b"), 1, 8, 4), m.floats("q", sym("b"), sym("t"), 4)
    attrs = AttentionAttributes(1, 1, 1.0)
    assert m.range(m.b.op("attention", q, cache, cache, m.x, attrs=attrs)) == "3..8"


def test_a_length_before_new_rows_is_shorter() -> None:
    m = Maker((sym("b"),))
    cache, q = m.floats("cache", sym("b"), 1, 8, 4), m.floats("q", sym("b"), sym("t"), 4)
    length = m.b.op("advance", m.x, q)
    attrs = AttentionAttributes(1, 1, 1.0)
    assert m.range(m.b.op("attention", q, cache, cache, length, attrs=attrs)) == "0..5"


@pytest.mark.parametrize(("positions", "expected"), [(0, "0..5"), (6, "0..3")])
def test_cached_attention_heeds_caches_and_tables(positions: int, expected: str) -> None:
    m = Maker((sym("b"),))
    cache, q = m.floats("cache", sym("b"), 1, 8, 4), m.floats("q", sym("b"), sym("t"), 4)
    tables = (m.table("cos", positions), m.table("sin", positions)) if positions else ()
    attrs = AttentionAttributes(1, 1, 1.0)
    node = m.b.node("cached_attention", (q, q, q, cache, cache, m.x), tables, attrs)
    assert m.range(node.results[0]) == expected


def test_queries_of_cached_attention_are_new_rows() -> None:
    m = Maker((sym("b"),))
    cache, q = m.floats("cache", sym("b"), 1, 8, 4), m.floats("q", sym("b"), sym("t"), 4)
    k = m.floats("k", sym("b"), 2, 4)
    m.b.node("cached_attention", (q, k, k, cache, cache, m.x), (), AttentionAttributes(1, 1, 1.0))
    with pytest.raises(InputError, match="more queries than new rows"):
        m.range()


def test_markov_chain_looks_its_anchor_up() -> None:
    m = Maker((sym("b"),))
    base = m.floats("base", sym("b"), 2, 9)
    weights = m.table("w1", 6), m.table("w2", 9)
    node = m.b.node("markov_chain", (base, m.x), weights, MarkovChainAttributes(2, 6))
    assert m.range(node.results[0]) == "0..5"


def test_calls_pass_demands_both_ways() -> None:
    """The callee indexes one result with its input, the caller the other; it has its own `t`."""
    m = Maker()
    b = Builder(m.module, "inner")
    ids = b.input("ids", DType.I64, (sym("s"),), Role.ACTIVATION)
    m.module.symbols["s"] = SymbolRange(1, 9)
    b.output(b.op("embedding", ids, weights=(m.table("w", 9),)), "y", Role.ACTIVATION)
    b.output(ids, "same", Role.ACTIVATION)
    flat = m.b.input("flat", DType.I64, (sym("t"),), Role.ACTIVATION)
    _, same = m.b.node("call", (flat,), attrs=CallAttributes("inner")).results
    m.b.output(m.b.op("embedding", same, weights=(m.table("v", 4),)), "z", Role.ACTIVATION)
    assert str(input_ranges(m.module, "g", SIZES)["flat"]) == "0..3"
    assert str(input_ranges(m.module, "inner", {"s": 1})["ids"]) == "0..8"


def test_sizes_must_give_shapes() -> None:
    m = Maker()
    m.b.output(m.x, "y", Role.ACTIVATION)
    m.b.op(
        "pad",
        m.b.input("z", DType.I64, (sym("t") - 2,), Role.ACTIVATION),
        attrs=PadAttributes(0, 1, 0),
    )
    with pytest.raises(InputError, match=r"no shape for b = 1, t = 0"):
        m.range(sizes={"b": 1, "t": 0})


@pytest.mark.parametrize("graph", ["target", "draft"])
def test_ranges_of_a_pair_are_exact(graph: str) -> None:
    """One step beyond either end is refused; the ends are taken."""
    module = pair(PairOptions(draft_head="own", draft_embedding="own"))
    sizes = {"b": 1, "t": 2, "r": 1, "c": 3}
    ranges = input_ranges(module, graph, sizes)
    assert (
        set(ranges)
        == {
            "target": {"token_ids", "cache_length", "logit_rows"},
            "draft": {"anchor", "cache_length"},
        }[graph]
    )
    interpreter = Interpreter(module)
    for name, allowed in ranges.items():
        for value in (allowed.low, allowed.high, allowed.low - 1, allowed.high + 1):
            arrays = {}
            for item in module.graphs[graph].inputs:
                shape = [d if isinstance(d, int) else sizes[str(d)] for d in item.value.type.shape]
                floats = item.value.type.dtype.is_float
                arrays[item.name] = np.zeros(shape, np.float32 if floats else np.int64)
            arrays[name] += value
            if allowed.low <= value <= allowed.high:
                interpreter.run(graph, arrays)
            else:
                with pytest.raises(RequestError):
                    interpreter.run(graph, arrays)
