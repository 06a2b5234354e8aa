from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import RequestError
from edgecc.ir.ops import TypeRuleError, attention
from edgecc.ir.ops.attention import AttentionAttributes, RopeAttributes, SplitHeadsAttributes
from helpers.ops import (
    Array,
    Cases,
    assert_same_bits,
    check_reference,
    check_rows,
    family,
    infer,
    run_op,
    values,
)
from helpers.ops import Case as C
from helpers.weights import dense

B, CAPACITY = 2, 9


def angles(rng: np.random.Generator, positions: int, half: int) -> tuple[Array, Array]:
    """Cosines and sines of arbitrary angles: rotations need not come from a rope table."""
    angle = rng.uniform(-3, 3, (positions, half))
    cos, sin = (f(angle).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
    return cos, sin


def rotated(x: Array, positions: Array, cos: Array, sin: Array, heads: int) -> Array:
    """Complex rotation of (x[j], x[j + R/2]); the rest of each head passes."""
    out = x.copy()
    head_dim, half = x.shape[2] // heads, cos.shape[1]
    for b, s in np.ndindex(x.shape[:2]):
        p = positions[b, s]
        for head in range(heads):
            for j in range(half):
                first, second = head * head_dim + j, head * head_dim + j + half
                z = complex(x[b, s, first], x[b, s, second]) * complex(cos[p, j], sin[p, j])
                out[b, s, first], out[b, s, second] = z.real, z.imag
    return out


def written(cache: Array, new: Array, start: Array) -> Array:
    out = cache.copy()
    _, heads, _, width = cache.shape
    for b in range(cache.shape[0]):
        for i in range(new.shape[1]):
            for head in range(heads):
                out[b, head, start[b] + i] = new[b, i, head * width : (head + 1) * width]
    return out


def attended(
    q: Array, k_cache: Array, v_cache: Array, length: Array, attrs: AttentionAttributes
) -> Array:
    """Softmax attention from its definition, query by query, head by head, key by key."""
    b, s, _ = q.shape
    d, dv = k_cache.shape[3], v_cache.shape[3]
    out = np.zeros((b, s, attrs.heads * dv))
    for i, j, head in np.ndindex(b, s, attrs.heads):
        position = length[i] - s + j
        kv = head // (attrs.heads // attrs.kv_heads)
        query = q[i, j, head * d : (head + 1) * d]
        keys = range(length[i]) if not attrs.causal else range(position + 1)
        if attrs.window is not None:
            keys = [n for n in keys if n > position - attrs.window]
        mass = [np.exp(attrs.scale * float(query @ k_cache[i, kv, n])) for n in keys]
        for weight, n in zip(mass, keys, strict=True):
            out[i, j, head * dv : (head + 1) * dv] += weight / sum(mass) * v_cache[i, kv, n]
    return out


def rope(rng: np.random.Generator) -> C:
    """Partial rotary: 6 of the 8 dims of each of 3 heads."""
    x, (cos, sin) = values(rng, B, 4, 24), angles(rng, 20, 3)
    positions = rng.integers(0, 20, (B, 4))
    return C(
        (x, positions),
        (rotated(x, positions, cos, sin, 3),),
        (dense(cos), dense(sin)),
        RopeAttributes(3),
        types=("f32[b, c + 2, 24]", "i64[b, c + 2]"),
        results=("f32[b, c + 2, 24]",),
    )


def rope_full(rng: np.random.Generator) -> C:
    x, (cos, sin) = values(rng, 1, 3, 8), angles(rng, 5, 2)
    positions = np.array([[2, 3, 4]])
    return C(
        (x, positions),
        (rotated(x, positions, cos, sin, 2),),
        (dense(cos), dense(sin)),
        RopeAttributes(2),
        types=("f32[1, t, 8]", "i64[1, t]"),
        results=("f32[1, t, 8]",),
    )


def cache_update(rng: np.random.Generator) -> C:
    cache, new = values(rng, B, 2, CAPACITY, 4), values(rng, B, 3, 8)
    start = np.array([0, 6])
    return C(
        (cache, new, start),
        (written(cache, new, start),),
        types=("f32[b, 2, n, 4]", "f32[b, t, 8]", "i64[b]"),
        results=("f32[b, 2, n, 4]",),
    )


def attention_case(heads: int, kv_heads: int, *, causal: bool, window: int | None = None):
    def make(rng: np.random.Generator) -> C:
        """Values are wider than keys, so that a mix-up of the two does not fit."""
        q = values(rng, B, 3, heads * 4)
        k_cache = values(rng, B, kv_heads, CAPACITY, 4)
        v_cache = values(rng, B, kv_heads, CAPACITY, 5)
        length = np.array([3, 9])
        attrs = AttentionAttributes(heads, kv_heads, 0.37, causal, window)
        return C(
            (q, k_cache, v_cache, length),
            (attended(q, k_cache, v_cache, length, attrs),),
            (),
            attrs,
            types=(
                f"f32[b, t, {heads * 4}]",
                f"f32[b, {kv_heads}, n, 4]",
                f"f32[b, {kv_heads}, n, 5]",
                "i64[b]",
            ),
            results=(f"f32[b, t, {heads * 5}]",),
        )

    return make


def cached(*, rotary: bool, causal: bool, window: int | None = None):
    def make(rng: np.random.Generator) -> C:
        """Two queries for the last of four new rows."""
        heads, kv_heads = 4, 2
        q, k, v = values(rng, B, 2, 16), values(rng, B, 4, 8), values(rng, B, 4, 8)
        k_cache, v_cache = (values(rng, B, 2, CAPACITY, 4) for _ in range(2))
        start = np.array([0, 5])
        attrs = AttentionAttributes(heads, kv_heads, 0.5, causal, window)
        cos, sin = angles(rng, CAPACITY, 2)
        positions = start[:, None] + np.arange(4)
        q1, k1 = q, k
        if rotary:
            q1 = rotated(q, positions[:, -2:], cos, sin, heads)
            k1 = rotated(k, positions, cos, sin, kv_heads)
        new_k, new_v = written(k_cache, k1, start), written(v_cache, v, start)
        return C(
            (q, k, v, k_cache, v_cache, start),
            (attended(q1, new_k, new_v, start + 4, attrs), new_k, new_v),
            (dense(cos), dense(sin)) if rotary else (),
            attrs,
            types=(
                "f32[b, 2, 16]",
                "f32[b, c + 2, 8]",
                "f32[b, c + 2, 8]",
                *["f32[b, 2, n, 4]"] * 2,
                "i64[b]",
            ),
            results=("f32[b, 2, 16]", *["f32[b, 2, n, 4]"] * 2),
        )

    return make


def split_heads(rng: np.random.Generator) -> C:
    """Query and gate of three heads; a flat split would give the same shapes."""
    x = values(rng, 2, 4, 15)
    query, gate = np.empty((2, 4, 6)), np.empty((2, 4, 9))
    for b, t, head in np.ndindex(2, 4, 3):
        both = x[b, t, 5 * head : 5 * head + 5]
        query[b, t, 2 * head : 2 * head + 2] = both[:2]
        gate[b, t, 3 * head : 3 * head + 3] = both[2:]
    return C(
        (x,),
        (query, gate),
        attrs=SplitHeadsAttributes(3, (2, 3)),
        types=("f32[b, t, 15]",),
        results=("f32[b, t, 6]", "f32[b, t, 9]"),
    )


CASES: Cases = {
    "split_heads": split_heads,
    "rope": rope,
    "rope-full": rope_full,
    "cache_update": cache_update,
    "attention-grouped": attention_case(4, 2, causal=True),
    "attention-many": attention_case(2, 2, causal=True),
    "attention-one": attention_case(3, 1, causal=True),
    "attention-block": attention_case(4, 2, causal=False),
    "attention-window": attention_case(4, 2, causal=True, window=2),
    "attention-window-of-one": attention_case(3, 1, causal=True, window=1),
    "attention-wide-window": attention_case(2, 2, causal=True, window=8),
    "cached_attention": cached(rotary=False, causal=True),
    "cached_attention-rotary": cached(rotary=True, causal=True),
    "cached_attention-block": cached(rotary=True, causal=False),
    "cached_attention-window": cached(rotary=True, causal=True, window=3),
}


def test_every_op_has_a_case():
    assert {name.split("-")[0] for name in CASES} == family(attention.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference(name.split("-")[0], CASES[name](np.random.default_rng(1)))


@pytest.mark.parametrize(
    ("type_", "attrs", "message"),
    [
        ("f32[t, 12]", SplitHeadsAttributes(2, (3, 4)), "sizes: expected 12, got 14"),
        ("f32[t, 12]", SplitHeadsAttributes(0, (12,)), "heads must be positive, got 0"),
        ("f32[t, 12]", SplitHeadsAttributes(-3, (-4,)), "heads must be positive, got -3"),
        ("f32[t, 12]", SplitHeadsAttributes(3, ()), r"sizes \(\) must be positive"),
        ("f32[t, 12]", SplitHeadsAttributes(3, (4, 0)), r"sizes \(4, 0\) must be positive"),
        ("f32[12, t]", SplitHeadsAttributes(3, (2, 2)), "sizes: expected t, got 12"),
        ("f32[]", SplitHeadsAttributes(1, (1,)), "at least one axis"),
        ("f32[12]", None, "expects attributes SplitHeadsAttributes"),
    ],
)
def test_split_heads_refuses(type_, attrs, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("split_heads", [type_], attrs=attrs)


def test_split_heads_takes_integers_and_rows_alone():
    x, attrs = np.arange(24).reshape(4, 6), SplitHeadsAttributes(2, (1, 2))
    found = run_op("split_heads", [x], attrs=attrs)
    assert [y[0].tolist() for y in found] == [[0, 3], [1, 2, 4, 5]]
    check_rows("split_heads", [x], attrs=attrs)


def test_rope_rows_do_not_depend_on_each_other():
    rng = np.random.default_rng(2)
    cos, sin = angles(rng, 30, 5)
    operands = [values(rng, 2, 6, 22), rng.integers(0, 30, (2, 6))]
    check_rows("rope", operands, [dense(cos), dense(sin)], RopeAttributes(2), axis=1)
    check_rows("rope", operands, [dense(cos), dense(sin)], RopeAttributes(2), axis=0)


def test_sequences_do_not_depend_on_each_other():
    rng = np.random.default_rng(3)
    case = CASES["attention-grouped"](rng)
    check_rows("attention", case.operands, attrs=case.attrs)
    case = CASES["cache_update"](rng)
    check_rows("cache_update", case.operands)
    case = CASES["cached_attention-rotary"](rng)
    check_rows("cached_attention", case.operands, case.weights, case.attrs)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    "name", ["cached_attention", "cached_attention-rotary", "cached_attention-window"]
)
def test_causal_attention_gives_the_same_bits_row_by_row(name, dtype):
    """Five rows in one call, or one per call over the growing cache: plain and speculative
    decoding differ in nothing else.
    """
    rng = np.random.default_rng(4)
    case = CASES[name](rng)
    q, k, v = values(rng, 1, 5, 16), values(rng, 1, 5, 8), values(rng, 1, 5, 8)
    caches = [values(rng, 1, 2, 8, 4) for _ in range(2)]
    options = {"weights": case.weights, "attrs": case.attrs, "dtype": dtype}
    together = run_op("cached_attention", [q, k, v, *caches, np.array([3])], **options)
    rows = []
    for i in range(5):
        row = [x[:, i : i + 1] for x in (q, k, v)]
        out, *caches = run_op("cached_attention", [*row, *caches, np.array([3 + i])], **options)
        rows.append(out)
    assert_same_bits([np.concatenate(rows, axis=1), *caches], together)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_reads_only_valid_rows(causal):
    rng = np.random.default_rng(5)
    q, k_cache, v_cache, length = CASES["attention-grouped"](rng).operands
    attrs = AttentionAttributes(4, 2, 0.5, causal)
    expected = run_op("attention", [q, k_cache, v_cache, length], attrs=attrs)
    for cache in (k_cache, v_cache):
        cache[0, :, 3:] = np.nan
    assert_same_bits(run_op("attention", [q, k_cache, v_cache, length], attrs=attrs), expected)


def test_block_attention_sees_later_rows_and_causal_attention_does_not():
    rng = np.random.default_rng(6)
    q, k_cache, v_cache, length = CASES["attention-grouped"](rng).operands
    changed = v_cache.copy()
    changed[:, :, 8] += 1  # the newest row of sequence 1
    for causal in (True, False):
        attrs = AttentionAttributes(4, 2, 0.5, causal)
        (before,) = run_op("attention", [q, k_cache, v_cache, length], attrs=attrs)
        (after,) = run_op("attention", [q, k_cache, changed, length], attrs=attrs)
        assert np.array_equal(before[1, :2], after[1, :2]) is causal
        assert not np.array_equal(before[1, 2], after[1, 2])
        assert np.array_equal(before[0], after[0])


@pytest.mark.parametrize("window", [1, 2, 5])
def test_attention_does_not_read_what_is_behind_the_window(window):
    rng = np.random.default_rng(8)
    q, k_cache, v_cache, length = CASES["attention-window"](rng).operands
    attrs = AttentionAttributes(4, 2, 0.5, True, window)
    (expected,) = run_op("attention", [q, k_cache, v_cache, length], attrs=attrs)
    for cache in (k_cache, v_cache):
        cache[1, :, : 9 - 2 - window] = np.nan  # what the first of the three queries has left
    (found,) = run_op("attention", [q, k_cache, v_cache, length], attrs=attrs)
    assert_same_bits([found], [expected])
    for cache in (k_cache, v_cache):
        cache[1, :, : 9 - 1 - window] = np.nan  # its oldest row as well
    (found,) = run_op("attention", [q, k_cache, v_cache, length], attrs=attrs)
    assert np.isnan(found[1, 0]).all()
    assert_same_bits([found[:, 1:]], [expected[:, 1:]])


@pytest.mark.parametrize("window", [9, 100])
def test_a_window_that_holds_all_rows_changes_nothing(window):
    operands = CASES["attention-grouped"](np.random.default_rng(9)).operands
    plain, windowed = (AttentionAttributes(4, 2, 0.5, True, w) for w in (None, window))
    assert_same_bits(
        run_op("attention", operands, attrs=windowed), run_op("attention", operands, attrs=plain)
    )


def test_large_scores_do_not_overflow():
    q = np.full((1, 1, 2), 1e4)
    cache = np.array([[[[1e4, 1e4], [-1e4, -1e4]]]])
    attrs = AttentionAttributes(1, 1, 1.0)
    (y,) = run_op("attention", [q, cache, cache, np.array([2])], attrs=attrs)
    assert y.tolist() == [[[1e4, 1e4]]]


@given(start=st.integers(0, 6), rows=st.integers(0, 4), seed=st.integers(0, 99))
def test_cache_update_changes_its_rows_only(start, rows, seed):
    rng = np.random.default_rng(seed)
    cache, new = values(rng, 1, 2, 10, 3), values(rng, 1, rows, 6)
    before = cache.copy()
    (found,) = run_op("cache_update", [cache, new, np.array([start])])
    inside = np.zeros(10, dtype=bool)
    inside[start : start + rows] = True
    assert np.array_equal(found[0, :, ~inside], cache[0, :, ~inside])
    assert np.array_equal(found[0, :, inside].reshape(rows, 6), new[0])
    assert np.array_equal(cache, before)  # the operand is a value, not a buffer


def test_no_new_rows():
    attrs = AttentionAttributes(2, 1, 1.0)
    caches = [np.ones((1, 1, 4, 3))] * 2
    empty = [np.zeros((1, 0, 6)), np.zeros((1, 0, 3)), np.zeros((1, 0, 3))]
    out, k_cache, v_cache = run_op(
        "cached_attention", [*empty, *caches, np.array([2])], attrs=attrs
    )
    assert out.shape == (1, 0, 6)
    assert np.array_equal(k_cache, caches[0])
    assert np.array_equal(v_cache, caches[1])


def test_no_sequences():
    attrs = AttentionAttributes(2, 1, 1.0)
    rows = [np.zeros((0, 2, 6)), np.zeros((0, 2, 3)), np.zeros((0, 2, 3))]
    caches = [np.zeros((0, 1, 4, 3))] * 2
    found = run_op("cached_attention", [*rows, *caches, np.zeros(0, np.int64)], attrs=attrs)
    assert [f.shape for f in found] == [(0, 2, 6), (0, 1, 4, 3), (0, 1, 4, 3)]


@pytest.mark.parametrize("start", [-1, 8, 9, 1 << 40])
@pytest.mark.parametrize("op", ["cache_update", "cached_attention"])
def test_rows_beyond_the_capacity_are_a_request_error(op, start):
    cache, rows = np.zeros((1, 1, 9, 2)), np.zeros((1, 2, 2))
    operands = [cache, rows, np.array([start])]
    attrs = None
    if op == "cached_attention":
        operands = [rows, rows, rows, cache, cache, np.array([start])]
        attrs = AttentionAttributes(1, 1, 1.0)
    with pytest.raises(RequestError, match="exceed the cache capacity 9") as caught:
        run_op(op, operands, attrs=attrs)
    assert caught.value.id == "run/cache-overflow"


@pytest.mark.parametrize("length", [-1, 0, 1, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_that_do_not_hold_the_queries_are_a_request_error(length, causal):
    operands = [np.ones((1, 2, 2)), *[np.ones((1, 1, 4, 2))] * 2, np.array([length])]
    with pytest.raises(RequestError, match=f"{length} valid rows: expected at least the 2 new"):
        run_op("attention", operands, attrs=AttentionAttributes(1, 1, 1.0, causal))


@pytest.mark.parametrize("bad", [-1, 4])
def test_positions_outside_the_tables_are_a_request_error(bad):
    table = dense(np.ones((4, 1)))
    operands = [np.ones((1, 2, 2)), np.array([[0, bad]])]
    with pytest.raises(RequestError, match=rf"rotary tables: index {bad} is outside 0\.\.3"):
        run_op("rope", operands, [table, table], RopeAttributes(1))


def test_cached_attention_beyond_the_tables_is_a_request_error():
    table = dense(np.ones((4, 1)))
    rows, cache = np.ones((1, 2, 2)), np.ones((1, 1, 8, 2))
    operands = [rows, rows, rows, cache, cache, np.array([3])]
    with pytest.raises(RequestError, match="rotary tables: index 4"):
        run_op("cached_attention", operands, [table, table], AttentionAttributes(1, 1, 1.0))


ROPE = ("f32[b, t, 8]", "i64[b, t]")
TABLE = np.ones((9, 2))


@pytest.mark.parametrize(
    ("change", "tables", "heads", "message"),
    [
        ({0: "i64[b, t, 8]"}, (TABLE, TABLE), 2, "x must be floating-point"),
        ({0: "f32[b, t, 2, 4]"}, (TABLE, TABLE), 2, "x must have rank 3"),
        ({1: "i32[b, t]"}, (TABLE, TABLE), 2, "positions must be i64"),
        ({1: "i64[t]"}, (TABLE, TABLE), 2, "positions must have rank 2"),
        ({1: "i64[b, c]"}, (TABLE, TABLE), 2, "axes of positions"),
        ({0: "f32[b, t, n]"}, (TABLE, TABLE), 2, "must divide into 2 heads"),
        ({}, (TABLE, TABLE), 3, "must divide into 3 heads"),
        ({}, (TABLE, TABLE), 0, "must divide into 0 heads"),
        ({}, (TABLE, TABLE[:8]), 2, r"shape of sin: expected \(9, 2\), got \(8, 2\)"),
        ({}, (TABLE[0], TABLE[0]), 2, "rank of cos: expected 2, got 1"),
        ({}, (TABLE, TABLE), 4, "tables rotate 4 dims of a head of 2"),
        ({}, (TABLE,), 2, r"expects weights \(cos, sin\), got 1"),
    ],
)
def test_rope_refuses(change, tables, heads, message):
    types = [change.get(i, t) for i, t in enumerate(ROPE)]
    with pytest.raises(TypeRuleError, match=message):
        infer("rope", types, [dense(t) for t in tables], RopeAttributes(heads))


UPDATE = ("f32[b, 2, 9, 4]", "f32[b, t, 8]", "i64[b]")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: "f32[b, 9, 8]"}, "cache must have rank 4"),
        ({1: "f16[b, t, 8]"}, "new must be f32"),
        ({1: "f32[b, t, 2, 4]"}, "new must have rank 3"),
        ({2: "i32[b]"}, "start must be i64"),
        ({2: "i64[]"}, "start must have rank 1"),
        ({1: "f32[c, t, 8]"}, "batch of new: expected b, got c"),
        ({2: "i64[c]"}, "batch of start: expected b, got c"),
        ({1: "f32[b, t, 4]"}, "width of new: expected 8, got 4"),
        ({0: "f32[b, h, 9, 4]"}, "known number of heads"),
    ],
)
def test_cache_update_refuses(change, message):
    types = [change.get(i, t) for i, t in enumerate(UPDATE)]
    with pytest.raises(TypeRuleError, match=message):
        infer("cache_update", types)


ATTENTION = ("f32[b, t, 16]", "f32[b, 2, 9, 4]", "f32[b, 2, 9, 5]", "i64[b]")
CACHED = ("f32[b, t, 16]", *["f32[b, t, 8]"] * 2, *["f32[b, 2, 9, 4]"] * 2, "i64[b]")
BOTH = {"q": 0, "k_cache": (1, 3), "v_cache": (2, 4), "length": (3, 5)}


@pytest.mark.parametrize(
    ("operand", "type_", "message"),
    [
        ("q", "i64[b, t, 16]", "q must be floating-point"),
        ("q", "f16[b, t, 16]", "q must be f32"),
        ("q", "f32[b, t, 4, 4]", "q must have rank 3"),
        ("q", "f32[c, t, 16]", "batch of k_cache: expected c, got b"),
        ("q", "f32[b, t, 8]", "width of q: expected 16, got 8"),
        ("k_cache", "f32[b, 9, 8]", "k_cache must have rank 4"),
        ("k_cache", "f32[c, 2, 9, 4]", "batch of k_cache: expected b, got c"),
        ("k_cache", "f32[b, 4, 9, 4]", "heads of k_cache: expected 2, got 4"),
        ("k_cache", "f32[b, 2, 8, 4]", "capacity of v_cache: expected 8, got 9"),
        ("v_cache", "f32[b, 9, 8]", "v_cache must have rank 4"),
        ("v_cache", "f16[b, 2, 9, 4]", "v_cache must be f32"),
        ("v_cache", "f32[c, 2, 9, 4]", "batch of v_cache"),
        ("v_cache", "f32[b, 1, 9, 4]", "heads of v_cache: expected 2, got 1"),
        ("length", "i32[b]", "length must be i64"),
        ("length", "i64[]", "length must have rank 1"),
        ("length", "i64[c]", "batch of length: expected b, got c"),
    ],
)
@pytest.mark.parametrize("op", ["attention", "cached_attention"])
def test_attention_refuses(op, operand, type_, message):
    types = list(ATTENTION if op == "attention" else CACHED)
    index = BOTH[operand]
    if isinstance(index, tuple):
        index = index[op == "cached_attention"]
    types[index] = type_
    with pytest.raises(TypeRuleError, match=message):
        infer(op, types, (), AttentionAttributes(4, 2, 1.0))


@pytest.mark.parametrize("op", ["attention", "cached_attention"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 3), (4, 0), (0, 2), (-2, 2), (4, -2), (1, 2)])
def test_head_counts_that_do_not_divide_are_refused(op, heads, kv_heads):
    types = ATTENTION if op == "attention" else CACHED
    with pytest.raises(TypeRuleError, match="heads / kv_heads is not whole"):
        infer(op, types, (), AttentionAttributes(heads, kv_heads, 1.0))


@pytest.mark.parametrize("op", ["attention", "cached_attention"])
@pytest.mark.parametrize(("causal", "window"), [(True, 0), (True, -1), (False, 4)])
def test_windows_of_nothing_or_of_both_sides_are_refused(op, causal, window):
    types = ATTENTION if op == "attention" else CACHED
    with pytest.raises(TypeRuleError, match="a window must be positive and causal"):
        infer(op, types, (), AttentionAttributes(4, 2, 1.0, causal, window))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: "f16[b, t, 8]"}, "k must be f32"),
        ({1: "f32[b, t, 2, 4]"}, "k must have rank 3"),
        ({2: "f16[b, t, 8]"}, "v must be f32"),
        ({2: "f32[t, 8]"}, "v must have rank 3"),
        ({1: "f32[c, t, 8]"}, "batch of k: expected b, got c"),
        ({2: "f32[b, c, 8]"}, "rows of v"),
        ({1: "f32[b, t, 4]"}, "width of k: expected 8, got 4"),
        ({2: "f32[b, t, 4]"}, "width of v: expected 8, got 4"),
        ({0: "f32[b, t + 1, 16]"}, "queries belong to at most t new rows"),
        ({0: "f32[b, 3, 16]", 1: "f32[b, 2, 8]", 2: "f32[b, 2, 8]"}, "3 queries belong to"),
    ],
)
def test_cached_attention_refuses(change, message):
    types = [change.get(i, t) for i, t in enumerate(CACHED)]
    with pytest.raises(TypeRuleError, match=message):
        infer("cached_attention", types, (), AttentionAttributes(4, 2, 1.0))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ((TABLE,), "give both rotary tables or none"),
        ((TABLE, TABLE[:8]), "shape of sin"),
        ((TABLE[0], TABLE[0]), "rank of cos"),
        ((np.ones((9, 3)), np.ones((9, 3))), "tables rotate 6 dims of a head of 4"),
        ((TABLE, TABLE, TABLE), r"expects weights \(cos\?, sin\?\), got 3"),
    ],
)
def test_cached_attention_refuses_tables(tables, message):
    with pytest.raises(TypeRuleError, match=message):
        infer(
            "cached_attention", CACHED, [dense(t) for t in tables], AttentionAttributes(4, 2, 1.0)
        )
