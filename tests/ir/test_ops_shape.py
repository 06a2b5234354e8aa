from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import RequestError
from edgecc.ir.ops import TypeRuleError, shape
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes
from helpers.ops import Case as C
from helpers.ops import (
    Cases,
    assert_same_bits,
    check_reference,
    check_rows,
    family,
    infer,
    run_op,
    values,
)


def filled(shape_: tuple[int, ...], element) -> np.ndarray:
    """An array element by element: `element` gets the index."""
    out = np.empty(shape_)
    for index in np.ndindex(shape_):
        out[index] = element(index)
    return out


def concat(rng: np.random.Generator) -> C:
    a, b, c = values(rng, 2, 3, 4), values(rng, 2, 1, 4), values(rng, 2, 3, 4)
    expected = filled(
        (2, 7, 4),
        lambda i: a[i] if i[1] < 3 else b[i[0], 0, i[2]] if i[1] == 3 else c[i[0], i[1] - 4, i[2]],
    )
    return C(
        (a, b, c),
        (expected,),
        attrs=AxisAttributes(1),
        types=("f32[b, t, 4]", "f32[b, 1, 4]", "f32[b, t, 4]"),
        results=("f32[b, 2*t + 1, 4]",),
    )


def concat_one(rng: np.random.Generator) -> C:
    ids = rng.integers(0, 9, (2, 3))
    return C((ids,), (ids,), attrs=AxisAttributes(0), types=("i64[b, t]",), results=("i64[b, t]",))


def split(rng: np.random.Generator) -> C:
    x = values(rng, 2, 3, 6)
    expected = (
        filled((2, 3, 1), lambda i: x[i]),
        filled((2, 3, 3), lambda i: x[i[0], i[1], i[2] + 1]),
        filled((2, 3, 2), lambda i: x[i[0], i[1], i[2] + 4]),
    )
    return C(
        (x,),
        expected,
        attrs=SplitAttributes(2, (1, 3, 2)),
        types=("f32[b, t, 6]",),
        results=("f32[b, t, 1]", "f32[b, t, 3]", "f32[b, t, 2]"),
    )


def slice_(rng: np.random.Generator) -> C:
    x = values(rng, 2, 5, 3)
    return C(
        (x,),
        (filled((2, 2, 3), lambda i: x[i[0], i[1] + 1, i[2]]),),
        attrs=SliceAttributes(1, 1, 3),
        types=("f32[b, 5, h]",),
        results=("f32[b, 2, h]",),
    )


def tail(rng: np.random.Generator) -> C:
    x, like = values(rng, 2, 5), rng.integers(0, 9, (2, 3, 4))
    return C(
        (x, like),
        (filled((2, 3), lambda i: x[i[0], i[1] + 2]),),
        attrs=AxisAttributes(1),
        types=("f32[b, c + 3]", "i64[b, 3, 4]"),
        results=("f32[b, 3]",),
    )


def take_rows(rng: np.random.Generator) -> C:
    x, rows = values(rng, 2, 5, 3), np.array([4, 0, 4])
    return C(
        (x, rows),
        (filled((2, 3, 3), lambda i: x[i[0], rows[i[1]], i[2]]),),
        types=("f32[b, t, 3]", "i64[r]"),
        results=("f32[b, r, 3]",),
    )


def pad(rng: np.random.Generator) -> C:
    x = values(rng, 2, 3)
    return C(
        (x,),
        (filled((2, 5), lambda i: x[i] if i[1] < 3 else -7),),
        attrs=PadAttributes(1, 2, -7),
        types=("f32[b, t]",),
        results=("f32[b, t + 2]",),
    )


def pad_ids(rng: np.random.Generator) -> C:
    ids = rng.integers(0, 9, (2, 1))
    expected = np.array([[int(row[0]), 4095, 4095] for row in ids])
    return C(
        (ids,),
        (expected,),
        attrs=PadAttributes(1, 2, 4095),
        types=("i64[b, 1]",),
        results=("i64[b, 3]",),
    )


def unsqueeze(rng: np.random.Generator) -> C:
    x = values(rng, 2, 3)
    return C(
        (x,),
        (filled((2, 1, 3), lambda i: x[i[0], i[2]]),),
        attrs=AxisAttributes(1),
        types=("f32[b, t]",),
        results=("f32[b, 1, t]",),
    )


def squeeze(rng: np.random.Generator) -> C:
    x = values(rng, 2, 3, 1)
    return C(
        (x,),
        (filled((2, 3), lambda i: x[i[0], i[1], 0]),),
        attrs=AxisAttributes(2),
        types=("f32[b, t, 1]",),
        results=("f32[b, t]",),
    )


def position_ids(rng: np.random.Generator) -> C:
    length, x = np.array([0, 7]), values(rng, 2, 3, 1)
    return C(
        (length, x),
        (np.array([[0, 1, 2], [7, 8, 9]]),),
        types=("i64[b]", "f32[b, c + 1, 1]"),
        results=("i64[b, c + 1]",),
    )


def advance(rng: np.random.Generator) -> C:
    length, x = np.array([0, 7]), rng.integers(0, 9, (2, 3))
    return C((length, x), (np.array([3, 10]),), types=("i64[b]", "i64[b, t]"), results=("i64[b]",))


CASES: Cases = {
    "concat": concat,
    "concat-one": concat_one,
    "split": split,
    "slice": slice_,
    "tail": tail,
    "take_rows": take_rows,
    "pad": pad,
    "pad-ids": pad_ids,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "position_ids": position_ids,
    "advance": advance,
}


def test_every_op_has_a_case():
    assert {name.split("-")[0] for name in CASES} == family(shape.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference(name.split("-")[0], CASES[name](np.random.default_rng(1)))


@pytest.mark.parametrize(
    ("op", "others", "attrs"),
    [
        ("concat", [(3, 2, 5)], AxisAttributes(1)),
        ("split", [], SplitAttributes(2, (1, 4))),
        ("slice", [], SliceAttributes(2, 1, 4)),
        ("tail", [(3, 2)], AxisAttributes(1)),
        ("pad", [], PadAttributes(1, 2, 0)),
        ("unsqueeze", [], AxisAttributes(1)),
    ],
)
def test_sequences_do_not_depend_on_each_other(op, others, attrs):
    rng = np.random.default_rng(4)
    check_rows(op, [values(rng, 3, 4, 5), *(values(rng, *s) for s in others)], attrs=attrs)


def test_sequences_of_positions_do_not_depend_on_each_other():
    length, x = np.array([0, 5, 2]), np.zeros((3, 4))
    for op in ("position_ids", "advance"):
        check_rows(op, [length, x])
    rows = np.array([1, 0])
    check_rows("take_rows", [values(np.random.default_rng(5), 3, 4, 5), rows], shared=[1])
    check_rows("squeeze", [np.ones((3, 1))], attrs=AxisAttributes(1))


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    axis=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_concat_undoes_split(sizes, axis, seed):
    shape_ = [2, 3, 2]
    shape_[axis] = sum(sizes)
    x = values(np.random.default_rng(seed), *shape_)
    pieces = run_op("split", [x], attrs=SplitAttributes(axis, tuple(sizes)))
    assert [p.shape[axis] for p in pieces] == sizes
    joined = run_op("concat", pieces, attrs=AxisAttributes(axis))
    assert_same_bits(joined, [x.astype(np.float32)])


@given(rows=st.integers(0, 4), wanted=st.integers(0, 4), axis=st.integers(0, 1))
def test_tail_takes_the_last_rows(rows, wanted, axis):
    x = np.arange(2 * rows).reshape((rows, 2) if axis == 0 else (2, rows))
    like = np.zeros((wanted, wanted))
    symbols = ("n" if axis == 0 else "2", "n" if axis == 1 else "2")
    types = (f"i64[{symbols[0]}, {symbols[1]}]", "f32[k, k]")
    if wanted > rows:  # the sizes are only known at run time
        with pytest.raises(RequestError, match="expected i64"):
            run_op("tail", [x, like], attrs=AxisAttributes(axis), types=types)
    else:
        (found,) = run_op("tail", [x, like], attrs=AxisAttributes(axis), types=types)
        picked = range(rows - wanted, rows)
        assert found.tolist() == np.take(x, list(picked), axis=axis).tolist()


@pytest.mark.parametrize("bad", [-1, 3, 1 << 40])
def test_rows_out_of_range_are_a_request_error(bad):
    with pytest.raises(RequestError, match=rf"take_rows: index {bad} is outside 0\.\.2"):
        run_op("take_rows", [np.zeros((1, 3, 2)), np.array([0, bad])])


def test_take_no_rows():
    (found,) = run_op("take_rows", [np.zeros((1, 3, 2)), np.zeros(0, np.int64)])
    assert found.shape == (1, 0, 2)


def test_symbolic_sizes_that_disagree_at_run_time_are_a_request_error():
    a, b = np.zeros((2, 3)), np.zeros((2, 4))
    with pytest.raises(RequestError, match=r"expected f32\[2, t\], got shape \(2, 4\)"):
        run_op("concat", [a, b], attrs=AxisAttributes(0), types=("f32[2, t]", "f32[2, t]"))


AXIS = AxisAttributes


@pytest.mark.parametrize(
    ("op", "types", "attrs", "message"),
    [
        ("concat", ["f32[t]"], AXIS(1), r"axis 1 is outside f32\[t\]"),
        ("concat", ["f32[t]"], AXIS(-1), "axis -1 is outside"),
        ("concat", ["f32[t]", "i64[t]"], AXIS(0), "dtype: expected"),
        ("concat", ["f32[t]", "f32[t, 1]"], AXIS(0), "rank: expected 1, got 2"),
        ("concat", ["f32[t, 2]", "f32[t, 3]"], AXIS(0), "the other axes"),
        ("concat", ["f32[t, 2]", "f32[c, 2]"], AXIS(1), "the other axes"),
        ("concat", [], AXIS(0), r"expects operands \(x, more\), got 0"),
        ("split", ["f32[4]"], SplitAttributes(1, (4,)), "axis 1 is outside"),
        ("split", ["f32[4]"], SplitAttributes(0, ()), r"sizes \(\) must be positive"),
        ("split", ["f32[4]"], SplitAttributes(0, (4, 0)), r"sizes \(4, 0\) must be positive"),
        ("split", ["f32[4]"], SplitAttributes(0, (5, -1)), "must be positive"),
        ("split", ["f32[4]"], SplitAttributes(0, (1, 2)), "sum of sizes: expected 4, got 3"),
        ("split", ["f32[t]"], SplitAttributes(0, (1, 2)), "sum of sizes: expected t, got 3"),
        ("slice", ["f32[4]"], SliceAttributes(1, 0, 1), "axis 1 is outside"),
        ("slice", ["f32[4]"], SliceAttributes(0, 2, 5), r"2\.\.5 is outside axis 0 of f32\[4\]"),
        ("slice", ["f32[4]"], SliceAttributes(0, -1, 2), r"-1\.\.2 is outside"),
        ("slice", ["f32[4]"], SliceAttributes(0, 2, 2), r"2\.\.2 is outside"),
        ("slice", ["f32[t]"], SliceAttributes(0, 0, 1), r"0\.\.1 is outside axis 0 of f32\[t\]"),
        ("tail", ["f32[4]", "f32[2]"], AXIS(1), "axis 1 is outside f32"),
        ("tail", ["f32[4, 1]", "f32[2]"], AXIS(1), r"axis 1 is outside f32\[2\]"),
        ("tail", ["f32[4]", "f32[5]"], AXIS(0), r"axis 0 of f32\[4\] has no 5 last rows"),
        ("tail", ["f32[t]", "f32[t + 1]"], AXIS(0), r"has no t \+ 1 last rows"),
        ("take_rows", ["f32[t, 4]", "i64[r]"], None, "x must have rank 3"),
        ("take_rows", ["f32[b, t, 4]", "i32[r]"], None, "rows must be i64"),
        ("take_rows", ["f32[b, t, 4]", "i64[b, r]"], None, "rows must have rank 1"),
        ("pad", ["i64[4]"], PadAttributes(1, 1, 0), "axis 1 is outside"),
        ("pad", ["i64[4]"], PadAttributes(0, -1, 0), "after must not be negative, got -1"),
        ("unsqueeze", ["f32[4]"], AXIS(2), "axis 2 is outside"),
        ("unsqueeze", ["f32[4]"], AXIS(-1), "axis -1 is outside"),
        ("squeeze", ["f32[1]"], AXIS(1), "axis 1 is outside"),
        ("squeeze", ["f32[2]"], AXIS(0), "size of the squeezed axis: expected 1, got 2"),
        ("squeeze", ["f32[t]"], AXIS(0), "size of the squeezed axis: expected 1, got t"),
        ("position_ids", ["i32[b]", "f32[b, t]"], None, "length must be i64"),
        ("position_ids", ["i64[b, 1]", "f32[b, t]"], None, "length must have rank 1"),
        ("position_ids", ["i64[b]", "f32[b]"], None, "x must have at least two axes"),
        ("position_ids", ["i64[b]", "f32[c, t]"], None, "batch: expected b, got c"),
        ("advance", ["i32[b]", "f32[b, t]"], None, "length must be i64"),
        ("advance", ["i64[]", "f32[b, t]"], None, "length must have rank 1"),
        ("advance", ["i64[b]", "f32[b]"], None, "x must have at least two axes"),
        ("advance", ["i64[b]", "f32[c, t]"], None, "batch: expected b, got c"),
    ],
)
def test_refuses(op, types, attrs, message):
    with pytest.raises(TypeRuleError, match=message):
        infer(op, types, (), attrs)


@pytest.mark.parametrize("op", sorted(family(shape.OPS) - {"take_rows", "position_ids", "advance"}))
def test_attributes_are_needed(op):
    count = 2 if op == "tail" else 1
    with pytest.raises(TypeRuleError, match=r"expects attributes \w+Attributes, got Attributes"):
        infer(op, ["f32[1]"] * count)


def test_unsqueeze_at_the_end():
    assert infer("unsqueeze", ["f32[t]"], (), AXIS(1)) == ["f32[t, 1]"]


def test_pad_by_nothing():
    (found,) = run_op("pad", [np.array([3, 4])], attrs=PadAttributes(0, 0, 9))
    assert found.tolist() == [3, 4]
