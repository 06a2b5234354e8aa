from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import RequestError
from edgecc.ir.ops import TypeRuleError, vision
from edgecc.ir.ops.attention import RopeAttributes
from edgecc.ir.ops.vision import (
    MergeRowsAttributes,
    MultiAxisRopeAttributes,
    MultiHeadAttentionAttributes,
)
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
from helpers.weights import dense, packed


def angles(rng: np.random.Generator, positions: int, half: int) -> tuple[Array, Array]:
    angle = rng.uniform(-3, 3, (positions, half))
    cos, sin = (f(angle).astype(np.float32).astype(np.float64) for f in (np.cos, np.sin))
    return cos, sin


def turned(x: Array, positions: Array, cos: Array, sin: Array, heads: int, axes) -> Array:
    """Complex rotation of (x[j], x[j + R/2]) by the angle of the position on axis `axes[j]`."""
    out, width, half = x.copy(), x.shape[2] // heads, len(axes)
    for b, s in np.ndindex(x.shape[:2]):
        for head in range(heads):
            for j, axis in enumerate(axes):
                p = positions[axis, b, s]
                first, second = head * width + j, head * width + j + half
                z = complex(x[b, s, first], x[b, s, second]) * complex(cos[p, j], sin[p, j])
                out[b, s, first], out[b, s, second] = z.real, z.imag
    return out


def multi_axis_rope(rng: np.random.Generator, heads=2, width=6, axes=(0, 2, 1), count=3) -> C:
    x, positions = values(rng, 2, 4, heads * width), rng.integers(0, 9, (count, 2, 4))
    cos, sin = angles(rng, 9, len(axes))
    return C(
        (x, positions),
        (turned(x, positions, cos, sin, heads, axes),),
        (dense(cos), dense(sin)),
        MultiAxisRopeAttributes(heads, axes),
        types=(f"f32[b, t, {heads * width}]", f"i64[{count}, b, t]"),
        results=(f"f32[b, t, {heads * width}]",),
    )


def multi_axis_rope_partial(rng: np.random.Generator) -> C:
    """Interleaved M-RoPE of the first six of eight dims."""
    return multi_axis_rope(rng, heads=3, width=8, axes=(0, 1, 2))


def multi_axis_rope_axial(rng: np.random.Generator) -> C:
    """The first half of the frequencies turns with the row, the second with the column."""
    return multi_axis_rope(rng, heads=1, width=8, axes=(0, 0, 1, 1), count=2)


def multi_head_attention(rng: np.random.Generator) -> C:
    q, k, v = (values(rng, 2, 5, 6) for _ in "qkv")
    expected = np.empty_like(q)
    for b, i, h in np.ndindex(2, 5, 3):
        part = slice(2 * h, 2 * h + 2)
        shares = np.exp([0.7 * np.dot(q[b, i, part], k[b, j, part]) for j in range(5)])
        expected[b, i, part] = shares / shares.sum() @ v[b, :, part]
    return C(
        (q, k, v),
        (expected,),
        attrs=MultiHeadAttentionAttributes(3, 0.7),
        types=("f32[b, 4*m + 1, 6]",) * 3,
        results=("f32[b, 4*m + 1, 6]",),
    )


def merge_rows(rng: np.random.Generator) -> C:
    x = values(rng, 2, 12, 3)
    expected = np.array([[np.hstack(s[i : i + 4]) for i in range(0, 12, 4)] for s in x])
    return C(
        (x,),
        (expected,),
        attrs=MergeRowsAttributes(4),
        types=("f32[b, 4*m, 3]",),
        results=("f32[b, m, 12]",),
    )


def merge_rows_of_integers(rng: np.random.Generator) -> C:
    x = rng.integers(0, 99, (6, 1))
    return C(
        (x,),
        (x.reshape(3, 2),),
        attrs=MergeRowsAttributes(2),
        types=("i64[2*c + 4, 1]",),
        results=("i64[c + 2, 2]",),
    )


def replace_rows(rng: np.random.Generator) -> C:
    x, rows = values(rng, 2, 3, 4), values(rng, 5, 4)
    index = np.array([[-1, 4, 0], [2, -1, 2]])
    expected = np.array(
        [[rows[i] if i >= 0 else x[b, t] for t, i in enumerate(r)] for b, r in enumerate(index)]
    )
    return C(
        (x, rows, index),
        (expected,),
        types=("f32[b, t, 4]", "f32[n, 4]", "i64[b, t]"),
        results=("f32[b, t, 4]",),
    )


def embedding_bag(rng: np.random.Generator) -> C:
    ids, factors, table = rng.integers(0, 9, (2, 3, 4)), values(rng, 2, 3, 4), values(rng, 9, 5)
    expected = np.einsum("btk,btkh->bth", factors, table[ids])
    return C(
        (ids, factors),
        (expected,),
        (dense(table),),
        types=("i64[b, t, 4]", "f32[b, t, 4]"),
        results=("f32[b, t, 5]",),
    )


def embedding_bag_packed(rng: np.random.Generator) -> C:
    ids, factors, table = rng.integers(0, 9, 3), values(rng, 3), packed(rng, 9, 8)
    return C(
        (ids, factors),
        (factors @ table.values[ids],),
        (table.weight,),
        types=("i64[3]", "f32[3]"),
        results=("f32[8]",),
    )


CASES: Cases = {
    "multi_axis_rope": multi_axis_rope,
    "multi_axis_rope-partial": multi_axis_rope_partial,
    "multi_axis_rope-axial": multi_axis_rope_axial,
    "multi_head_attention": multi_head_attention,
    "merge_rows": merge_rows,
    "merge_rows-integers": merge_rows_of_integers,
    "replace_rows": replace_rows,
    "embedding_bag": embedding_bag,
    "embedding_bag-packed": embedding_bag_packed,
}


def test_every_op_has_a_case():
    assert {name.split("-")[0] for name in CASES} == family(vision.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference(name.split("-")[0], CASES[name](np.random.default_rng(1)))


@given(st.integers(0, 8), st.integers(0, 99))
def test_equal_positions_on_all_axes_turn_like_rope(position, seed):
    """Text tokens: bit for bit what the op with one position does."""
    rng = np.random.default_rng(seed)
    x, tables = values(rng, 1, 3, 12), [dense(t) for t in angles(rng, 9, 3)]
    where = np.full((1, 3), position)
    expected = run_op("rope", [x, where], tables, RopeAttributes(2))
    attrs = MultiAxisRopeAttributes(2, (0, 1, 2))
    assert_same_bits(run_op("multi_axis_rope", [x, np.stack([where] * 3)], tables, attrs), expected)


def test_rows_of_bags_do_not_depend_on_each_other():
    rng = np.random.default_rng(2)
    check_rows("embedding_bag", [rng.integers(0, 9, (7, 4)), values(rng, 7, 4)], [dense(np.eye(9))])


def test_sequences_do_not_attend_to_each_other():
    case = multi_head_attention(np.random.default_rng(3))
    check_rows("multi_head_attention", case.operands, (), case.attrs)


def test_large_scores_do_not_overflow():
    x = np.array([[[1e4, 1e4], [-1e4, -1e4]]])
    (y,) = run_op("multi_head_attention", [x, x, x], attrs=MultiHeadAttentionAttributes(1, 1.0))
    assert y.tolist() == x.tolist()


def test_no_rows():
    x = np.zeros((1, 0, 4))
    attrs = MultiHeadAttentionAttributes(2, 1.0)
    assert run_op("multi_head_attention", [x, x, x], attrs=attrs)[0].shape == (1, 0, 4)
    assert run_op("merge_rows", [x], attrs=MergeRowsAttributes(4))[0].shape == (1, 0, 16)
    index = np.full((1, 3), -1)
    kept = np.ones((1, 3, 4))
    (y,) = run_op("replace_rows", [kept, np.zeros((0, 4)), index])
    assert y.tolist() == kept.tolist()


@pytest.mark.parametrize("bad", [-2, 2, 1 << 40])
def test_rows_that_are_not_there_are_a_request_error(bad):
    operands = [np.zeros((1, 2, 3)), np.zeros((2, 3)), np.array([[0, bad]])]
    with pytest.raises(RequestError) as caught:
        run_op("replace_rows", operands)
    assert caught.value.id == "run/index-range"


T = [dense(np.ones((9, 2)))] * 2
ROPE = MultiAxisRopeAttributes(2, (0, 1))


@pytest.mark.parametrize(
    ("types", "weights", "attrs", "message"),
    [
        (["i64[b, t, 8]", "i64[2, b, t]"], T, ROPE, "x must be floating-point"),
        (["f32[t, 8]", "i64[2, b, t]"], T, ROPE, "x must have rank 3"),
        (["f32[b, t, 8]", "f32[2, b, t]"], T, ROPE, "positions must be i64"),
        (["f32[b, t, 8]", "i64[b, t]"], T, ROPE, "positions must have rank 3"),
        (["f32[b, t, 8]", "i64[2, b, c]"], T, ROPE, "rows of positions"),
        (["f32[b, t, 9]", "i64[2, b, t]"], T, ROPE, "must divide into 2 heads"),
        (["f32[b, t, 6]", "i64[2, b, t]"], T, ROPE, "tables rotate 4 dims of a head of 3"),
        (
            ["f32[b, t, 8]", "i64[2, b, t]"],
            T,
            MultiAxisRopeAttributes(2, (0,)),
            "frequencies in axes: expected 2, got 1",
        ),
        (
            ["f32[b, t, 8]", "i64[2, b, t]"],
            T,
            MultiAxisRopeAttributes(2, (0, 2)),
            r"axes \(0, 2\) must be below the 2 axes",
        ),
        (["f32[b, t, 8]", "i64[a, b, t]"], T, ROPE, "must be below the a axes"),
    ],
)
def test_multi_axis_rope_refuses(types, weights, attrs, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("multi_axis_rope", types, weights, attrs)


@pytest.mark.parametrize(
    ("op", "types", "weights", "attrs", "message"),
    [
        (
            "multi_head_attention",
            ["f32[b, t, 8]", "f32[b, c, 8]", "f32[b, c, 8]"],
            [],
            MultiHeadAttentionAttributes(2, 1.0),
            "must have one type",
        ),
        (
            "multi_head_attention",
            ["f32[b, t, 8]"] * 3,
            [],
            MultiHeadAttentionAttributes(3, 1.0),
            "must divide into 3 heads",
        ),
        (
            "multi_head_attention",
            ["f32[b, t, 8]"] * 3,
            [],
            MultiHeadAttentionAttributes(0, 1.0),
            "must divide into 0 heads",
        ),
        (
            "multi_head_attention",
            ["i64[b, t, 8]"] * 3,
            [],
            MultiHeadAttentionAttributes(2, 1.0),
            "q must be floating-point",
        ),
        (
            "multi_head_attention",
            ["f32[t, 8]"] * 3,
            [],
            MultiHeadAttentionAttributes(2, 1.0),
            "q must have rank 3",
        ),
        ("merge_rows", ["f32[8]"], [], MergeRowsAttributes(2), "at least two axes"),
        ("merge_rows", ["f32[8, 3]"], [], MergeRowsAttributes(0), "count must be positive"),
        ("merge_rows", ["f32[7, 3]"], [], MergeRowsAttributes(2), "7 rows do not divide by 2"),
        ("merge_rows", ["f32[t, 3]"], [], MergeRowsAttributes(2), "t rows do not divide by 2"),
        ("merge_rows", ["f32[2*t + 1, 3]"], [], MergeRowsAttributes(2), "do not divide by 2"),
        ("replace_rows", ["f32[b, t, 4]", "f32[n, 3]", "i64[b, t]"], [], None, "width of rows"),
        ("replace_rows", ["f32[b, t, 4]", "bf16[n, 4]", "i64[b, t]"], [], None, "rows must be f32"),
        ("replace_rows", ["f32[b, t, 4]", "f32[n, 4]", "i64[b, c]"], [], None, "axes of index"),
        ("replace_rows", ["f32[b, t, 4]", "f32[n, 4]", "f32[b, t]"], [], None, "index must be i64"),
        ("embedding_bag", ["f32[4]", "f32[4]"], T[:1], None, "ids must be i64"),
        ("embedding_bag", ["i64[4]", "i64[4]"], T[:1], None, "factors must be f32"),
        ("embedding_bag", ["i64[]", "f32[]"], T[:1], None, "at least one axis"),
        ("embedding_bag", ["i64[4]", "f32[3]"], T[:1], None, "shape of factors"),
        ("embedding_bag", ["i64[4]", "f32[4]"], [dense(np.ones(3))], None, "rank of the table"),
    ],
)
def test_refuses(op, types, weights, attrs, message):
    with pytest.raises(TypeRuleError, match=message):
        infer(op, types, weights, attrs)
