from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from edgecc.ir import DType
from edgecc.ir.ops import TypeRuleError, norm
from edgecc.ir.ops.norm import AddRmsNormAttributes, LayerNormAttributes, RmsNormAttributes
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
from helpers.weights import dense


def rms_norm(rng: np.random.Generator) -> C:
    x, w, eps = values(rng, 2, 3, 10), values(rng, 10), 1e-3
    expected = np.empty_like(x)
    for row in np.ndindex(2, 3):
        expected[row] = x[row] / np.sqrt(sum(v * v for v in x[row]) / 10 + eps) * w
    return C(
        (x,),
        (expected,),
        (dense(w),),
        RmsNormAttributes(eps),
        types=("f32[b, t, 10]",),
        results=("f32[b, t, 10]",),
    )


def rms_norm_heads(rng: np.random.Generator) -> C:
    """Per-head norm: one weight of head_dim for three heads."""
    x, w, eps = values(rng, 2, 12), values(rng, 4).astype(ml_dtypes.bfloat16), 1e-6
    expected = np.empty_like(x)
    for t in range(2):
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            mean = np.dot(x[t, part], x[t, part]) / 4
            expected[t, part] = x[t, part] / np.sqrt(mean + eps) * w.astype(np.float64)
    return C(
        (x,),
        (expected,),
        (dense(w, DType.BF16),),
        RmsNormAttributes(eps, groups=3),
        types=("f32[2*t, 12]",),
        results=("f32[2*t, 12]",),
    )


def add_rms_norm(rng: np.random.Generator) -> C:
    a, b, w, eps = values(rng, 2, 3, 10), values(rng, 2, 3, 10), values(rng, 10), 1e-3
    total, normed = a + b, np.empty_like(a)
    for row in np.ndindex(2, 3):
        mean = sum(v * v for v in total[row]) / 10
        normed[row] = total[row] / np.sqrt(mean + eps) * w
    return C(
        (a, b),
        (normed, total),
        (dense(w),),
        AddRmsNormAttributes(eps),
        types=("f32[b, t, 10]", "f32[b, t, 10]"),
        results=("f32[b, t, 10]", "f32[b, t, 10]"),
    )


def layer_norm(rng: np.random.Generator) -> C:
    """Rows whose mean is not zero."""
    x, w, bias, eps = values(rng, 2, 3, 10) + 4, values(rng, 10), values(rng, 10), 1e-3
    expected = np.empty_like(x)
    for row in np.ndindex(2, 3):
        mean = sum(x[row]) / 10
        variance = sum((v - mean) ** 2 for v in x[row]) / 10
        expected[row] = (x[row] - mean) / np.sqrt(variance + eps) * w + bias
    return C(
        (x,),
        (expected,),
        (dense(w), dense(bias)),
        LayerNormAttributes(eps),
        types=("f32[b, t, 10]",),
        results=("f32[b, t, 10]",),
    )


CASES: Cases = {
    "rms_norm": rms_norm,
    "rms_norm-heads": rms_norm_heads,
    "add_rms_norm": add_rms_norm,
    "layer_norm": layer_norm,
}


def test_every_op_has_a_case():
    assert {name.split("-")[0] for name in CASES} == family(norm.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference(name.split("-")[0], CASES[name](np.random.default_rng(1)))


@pytest.mark.parametrize(("width", "groups"), [(7, 1), (300, 1), (36, 4), (5, 5)])
def test_rows_do_not_depend_on_each_other(width, groups):
    rng = np.random.default_rng(2)
    x, w = values(rng, 6, width), dense(values(rng, width // groups))
    check_rows("rms_norm", [x], [w], RmsNormAttributes(1e-6, groups))


@pytest.mark.parametrize("width", [7, 300])
def test_rows_of_sums_do_not_depend_on_each_other(width):
    rng = np.random.default_rng(2)
    operands, w = [values(rng, 6, width), values(rng, 6, width)], dense(values(rng, width))
    check_rows("add_rms_norm", operands, [w], AddRmsNormAttributes(1e-6))


def test_sums_are_normalized_like_values():
    rng = np.random.default_rng(4)
    a, b, w = values(rng, 5, 70), values(rng, 5, 70), dense(values(rng, 70))
    (total,) = run_op("add", [a, b])
    (expected,) = run_op("rms_norm", [total], [w], RmsNormAttributes(1e-6))
    found = run_op("add_rms_norm", [a, b], [w], AddRmsNormAttributes(1e-6))
    assert_same_bits(found, [expected, total])


@pytest.mark.parametrize(
    ("types", "width", "eps", "message"),
    [
        (("i64[t, 4]", "i64[t, 4]"), 4, 1e-6, "a must be floating-point, got i64"),
        (("f32[t, 4]", "f32[b, 4]"), 4, 1e-6, r"must have one type, got f32\[t, 4\], f32\[b, 4\]"),
        (("f32[]", "f32[]"), 4, 1e-6, r"a must have at least one axis, got f32\[\]"),
        (("f32[t, 4]", "f32[t, 4]"), 4, 0.0, "eps must be positive, got 0.0"),
        (("f32[t, 4]", "f32[t, 4]"), 5, 1e-6, r"weight: expected \(4,\), got \(5,\)"),
    ],
)
def test_refuses_sums(types, width, eps, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("add_rms_norm", types, [dense(np.ones(width))], AddRmsNormAttributes(eps))


@pytest.mark.parametrize("width", [7, 300])
def test_centered_rows_do_not_depend_on_each_other_or_the_layout(width):
    rng = np.random.default_rng(2)
    x, weights = values(rng, 6, width), [dense(values(rng, width)) for _ in "wb"]
    attrs = LayerNormAttributes(1e-6)
    check_rows("layer_norm", [x], weights, attrs)
    turned = run_op("layer_norm", [np.asfortranarray(x)], weights, attrs)
    assert_same_bits(turned, run_op("layer_norm", [x], weights, attrs))


@pytest.mark.parametrize(
    ("type_", "width", "bias", "eps", "message"),
    [
        ("i64[t, 4]", 4, 4, 1e-6, "x must be floating-point, got i64"),
        ("f32[]", 4, 4, 1e-6, "must have a known size above 0"),
        ("f32[4, t]", 4, 4, 1e-6, "must have a known size above 0"),
        ("f32[t, 4]", 4, 4, 0.0, "eps must be positive"),
        ("f32[t, 4]", 5, 4, 1e-6, r"weight: expected \(4,\), got \(5,\)"),
        ("f32[t, 4]", 4, 5, 1e-6, r"bias: expected \(4,\), got \(5,\)"),
    ],
)
def test_layer_norm_refuses(type_, width, bias, eps, message):
    weights = [dense(np.ones(width)), dense(np.ones(bias))]
    with pytest.raises(TypeRuleError, match=message):
        infer("layer_norm", [type_], weights, LayerNormAttributes(eps))


def test_rows_do_not_depend_on_the_layout_of_the_input():
    """NumPy sums an array in Fortran order row by row of the other axis, so bits would differ."""
    rng = np.random.default_rng(3)
    x, w, attrs = values(rng, 6, 300), dense(np.ones(300)), RmsNormAttributes(1e-6)
    (expected,) = run_op("rms_norm", [x], [w], attrs)
    (found,) = run_op("rms_norm", [np.asfortranarray(x)], [w], attrs)
    assert found.tobytes() == expected.tobytes()


def test_eps_keeps_zero_rows_finite():
    (y,) = run_op("rms_norm", [np.zeros((1, 4))], [dense(np.ones(4))], RmsNormAttributes(1e-6))
    assert y.tolist() == [[0, 0, 0, 0]]


def test_no_rows():
    x = np.zeros((1, 0, 4))
    (y,) = run_op("rms_norm", [x], [dense(np.ones(2))], RmsNormAttributes(1e-6, 2))
    assert y.shape == (1, 0, 4)


@pytest.mark.parametrize(
    ("type_", "width", "attrs", "message"),
    [
        ("i64[t, 4]", 4, RmsNormAttributes(1e-6), "x must be floating-point, got i64"),
        ("f32[]", 4, RmsNormAttributes(1e-6), r"last axis of f32\[\] must divide into 1 groups"),
        ("f32[t, 0]", 0, RmsNormAttributes(1e-6), "must divide into 1 groups"),
        ("f32[4, t]", 4, RmsNormAttributes(1e-6), "must divide into 1 groups"),
        ("f32[t, 4]", 4, RmsNormAttributes(1e-6, 3), r"f32\[t, 4\] must divide into 3 groups"),
        ("f32[t, 4]", 4, RmsNormAttributes(1e-6, 0), "must divide into 0 groups"),
        ("f32[t, 4]", 4, RmsNormAttributes(1e-6, -1), "must divide into -1 groups"),
        ("f32[t, 4]", 4, RmsNormAttributes(0.0), "eps must be positive, got 0.0"),
        ("f32[t, 4]", 4, RmsNormAttributes(-1.0), "eps must be positive, got -1.0"),
        ("f32[t, 4]", 4, RmsNormAttributes(float("nan")), "eps must be positive, got nan"),
        ("f32[t, 4]", 3, RmsNormAttributes(1e-6), r"weight: expected \(4,\), got \(3,\)"),
        ("f32[t, 4]", 4, RmsNormAttributes(1e-6, 2), r"weight: expected \(2,\), got \(4,\)"),
        ("f32[t, 4]", 4, None, "expects attributes RmsNormAttributes, got Attributes"),
    ],
)
def test_refuses(type_, width, attrs, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("rms_norm", [type_], [dense(np.ones(width))], attrs)


def test_weight_must_be_a_vector():
    with pytest.raises(TypeRuleError, match=r"expected \(4,\), got \(4, 1\)"):
        infer("rms_norm", ["f32[t, 4]"], [dense(np.ones((4, 1)))], RmsNormAttributes(1e-6))


def test_counts():
    w = dense(np.ones(4))
    with pytest.raises(TypeRuleError, match=r"expects weights \(weight\), got 0"):
        infer("rms_norm", ["f32[4]"], [], RmsNormAttributes(1e-6))
    with pytest.raises(TypeRuleError, match=r"expects operands \(x\), got 2"):
        infer("rms_norm", ["f32[4]", "f32[4]"], [w], RmsNormAttributes(1e-6))
