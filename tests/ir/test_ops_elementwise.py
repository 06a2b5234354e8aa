from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir.ops import OPS, Trait, TypeRuleError, elementwise
from edgecc.ir.ops.elementwise import GELUS, CastAttributes, GeluAttributes
from helpers.ops import Case as C
from helpers.ops import Cases, check_reference, check_rows, family, infer, run_op, values

SHAPE = (2, 3, 5)
TYPE = "f32[b, t, 5]"


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def one(formula, scale: float = 3.0, attrs=None):
    def make(rng: np.random.Generator) -> C:
        x = values(rng, *SHAPE, scale=scale)
        return C((x,), (formula(x),), attrs=attrs, types=(TYPE,), results=(TYPE,))

    return make


def two(formula):
    def make(rng: np.random.Generator) -> C:
        a, b = values(rng, *SHAPE), values(rng, *SHAPE)
        return C((a, b), (formula(a, b),), types=(TYPE, TYPE), results=(TYPE,))

    return make


def widened(rng: np.random.Generator) -> C:
    x = values(rng, *SHAPE)
    return C((x,), (x,), attrs=CastAttributes("f32"), types=(TYPE,), results=(TYPE,))


def normal_share(x: np.ndarray) -> np.ndarray:
    """How much of a normal distribution is below x, by its definition."""
    return np.vectorize(NormalDist().cdf)(x)


def gelu_tanh(rng: np.random.Generator) -> C:
    """`x * sigmoid(2 z)` is `x/2 * (1 + tanh z)`."""
    x = values(rng, *SHAPE, scale=3)
    y = x * logistic(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return C((x,), (y,), attrs=GeluAttributes("tanh"), types=(TYPE,), results=(TYPE,))


CASES: Cases = {
    "cast": widened,
    "add": two(lambda a, b: a + b),
    "sub": two(lambda a, b: a - b),
    "mul": two(lambda a, b: a * b),
    "silu": one(lambda x: x * logistic(x)),
    "sigmoid": one(logistic),
    "tanh": one(lambda x: 2 * logistic(2 * x) - 1),
    "gelu": one(lambda x: x * normal_share(x), attrs=GeluAttributes()),
    "swiglu": two(lambda gate, up: gate * logistic(gate) * up),
}


ATTRIBUTES = {"cast": CastAttributes("bf16"), "gelu": GeluAttributes()}


def test_every_op_has_a_case():
    assert set(CASES) == family(elementwise.OPS)


@pytest.mark.parametrize("op", CASES)
def test_reference(op):
    check_reference(op, CASES[op](np.random.default_rng(1)))


def test_gelu_by_a_hyperbolic_tangent():
    check_reference("gelu", gelu_tanh(np.random.default_rng(1)))


def test_the_two_forms_of_gelu_differ():
    x = np.linspace(-4, 4, 999)
    exact, tanh = (run_op("gelu", [x], attrs=GeluAttributes(a))[0] for a in GELUS)
    assert 4e-4 < np.abs(exact - tanh).max() < 5e-4


def test_other_forms_of_gelu_are_refused():
    with pytest.raises(TypeRuleError, match="must be one of none, tanh, got 'fast'"):
        infer("gelu", ["f32[t]"], attrs=GeluAttributes("fast"))


@pytest.mark.parametrize("op", CASES)
def test_rows_do_not_depend_on_each_other(op):
    rng = np.random.default_rng(2)
    # 37 elements: a vector kernel and its remainder both take part.
    operands = [values(rng, 6, 37) for _ in OPS[op].operands]
    check_rows(op, operands, attrs=ATTRIBUTES.get(op))


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("shape", [(), (0, 4), (1,)])
def test_any_rank_and_no_rows(op, shape):
    operands = [np.ones(shape) for _ in OPS[op].operands]
    (found,) = run_op(op, operands, attrs=ATTRIBUTES.get(op))
    assert found.shape == shape


@pytest.mark.parametrize("op", CASES)
def test_integers_are_refused(op):
    operand, count = OPS[op].operands[0], len(OPS[op].operands)
    with pytest.raises(TypeRuleError, match=rf"{operand} must be floating-point, got i64\[t\]"):
        infer(op, ["i64[t]"] * count, attrs=ATTRIBUTES.get(op))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "swiglu"])
@pytest.mark.parametrize(
    "other", ["f32[t, 1]", "f32[4]", "f32[4, t]", "f16[t, 4]", "f32[t + 1, 4]"]
)
def test_operands_of_different_types_are_refused(op, other):
    with pytest.raises(TypeRuleError, match="operands must have one type, got f32"):
        infer(op, ["f32[t, 4]", other])


@pytest.mark.parametrize("op", CASES)
def test_operand_counts(op):
    names = ", ".join(OPS[op].operands)
    for count in (0, 3):
        with pytest.raises(TypeRuleError, match=rf"expects operands \({names}\), got {count}"):
            infer(op, ["f32[4]"] * count)


@pytest.mark.parametrize("op", ["add", "mul"])
def test_commutative_ops_commute(op):
    assert Trait.COMMUTATIVE in OPS[op].traits
    rng = np.random.default_rng(3)
    a, b = values(rng, 4, 4), values(rng, 4, 4)
    assert run_op(op, [a, b])[0].tobytes() == run_op(op, [b, a])[0].tobytes()


@pytest.mark.parametrize("op", ["sub", "swiglu"])
def test_others_do_not(op):
    assert Trait.COMMUTATIVE not in OPS[op].traits
    a, b = np.array([1.0]), np.array([2.0])
    assert run_op(op, [a, b])[0] != run_op(op, [b, a])[0]


@given(st.floats(-1e4, 1e4, width=32))
def test_sigmoid_and_silu_never_overflow(x):
    operand = np.array([x])
    (y,), (s,) = run_op("sigmoid", [operand]), run_op("silu", [operand])
    assert 0 <= y[0] <= 1
    assert abs(s[0]) <= abs(np.float32(x))
    assert s[0] >= np.float32(-0.2784646)  # the minimum of silu


def test_tanh_at_the_ends_and_near_zero():
    (y,) = run_op("tanh", [np.array([-1e30, -200.0, -0.0, 1e-30, 200.0, 1e30])])
    assert y.tolist() == [-1, -1, 0, np.float32(1e-30), 1, 1]
    assert np.signbit(y[2])


def test_sigmoid_is_symmetric_at_the_ends():
    (y,) = run_op("sigmoid", [np.array([-1e30, -200.0, 0.0, 200.0, 1e30])])
    assert y.tolist() == [0, pytest.approx(0, abs=1e-80), 0.5, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "rounded"),
    [
        ("bf16", [1.0, 1.0, 1.015625, -1.0, 3.0e38, 0.0]),
        ("f16", [1.0, 1.00390625, 1.01171875, -1.0, np.inf, 0.0]),
    ],
)
@pytest.mark.parametrize("evaluation", [np.float32, np.float64])
def test_casts_round_half_to_even(dtype, rounded, evaluation):
    """Halfway cases of bf16: 1 + 2^-8 goes down, 1 + 3 * 2^-8 up, to the even neighbour."""
    x = np.array([1.0, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -1.0, 3.0e38, 1e-45])
    (found,) = run_op("cast", [x], attrs=CastAttributes(dtype), dtype=evaluation)
    assert found.dtype == evaluation
    np.testing.assert_allclose(found[:-1], rounded[:-1], rtol=2.0**-8 if dtype == "bf16" else 0)
    assert found[:4].tolist() == rounded[:4]
    assert abs(found[-1]) <= 1e-44


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_wider_types_change_nothing(dtype):
    x = np.random.default_rng(0).standard_normal(9)
    (found,) = run_op("cast", [x], attrs=CastAttributes(dtype), dtype=np.float64)
    assert found.tolist() == x.tolist()


@pytest.mark.parametrize("dtype", ["i64", "f8e4m3", "float16", ""])
def test_casts_are_between_wide_enough_floats(dtype):
    with pytest.raises(TypeRuleError, match="dtype must be one of f64, f32, bf16, f16"):
        infer("cast", (TYPE,), attrs=CastAttributes(dtype))
    assert infer("cast", (TYPE,), attrs=CastAttributes("bf16")) == ["bf16[b, t, 5]"]
    with pytest.raises(TypeRuleError, match="x must be floating-point"):
        infer("cast", ("i64[b]",), attrs=CastAttributes("bf16"))
