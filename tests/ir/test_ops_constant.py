from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from edgecc.ir import DType
from edgecc.ir.ops import TypeRuleError, constant
from helpers.ops import (
    Case,
    Cases,
    assert_same_bits,
    check_reference,
    family,
    infer,
    run_op,
    values,
)
from helpers.weights import dense, packed

RNG = np.random.default_rng(0)
PACKED = packed(RNG, 3, 8)
ROUNDED = values(RNG, 4).astype(ml_dtypes.bfloat16)
VALUES = values(RNG, 2, 3, 4)
IDS = np.array([2**62 + 1, -5])


def floats(rng: np.random.Generator) -> Case:
    made = packed(rng, 3, 8)
    return Case((), (made.values,), (made.weight,), results=("f32[3, 8]",))


def integers(rng: np.random.Generator) -> Case:
    ids = rng.integers(-9, 9, 5)
    return Case((), (ids,), (dense(ids),), results=("i64[5]",))


CASES: Cases = {"constant": floats, "constant-integers": integers}


def test_every_op_has_a_case():
    assert {name.split("-")[0] for name in CASES} == family(constant.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference("constant", CASES[name](np.random.default_rng(1)))


@pytest.mark.parametrize(
    ("weight", "expected", "type_"),
    [
        (dense(VALUES), VALUES, "f32[2, 3, 4]"),
        (dense(ROUNDED, DType.BF16), ROUNDED.astype(np.float64), "f32[4]"),
        (PACKED.weight, PACKED.values, "f32[3, 8]"),
        (dense(np.array(1.5)), np.array(1.5), "f32[]"),
        (dense(VALUES, DType.F64), VALUES, "f32[2, 3, 4]"),
    ],
)
def test_floats(weight, expected, type_):
    assert infer("constant", [], [weight]) == [type_]
    for dtype in (np.float32, np.float64):
        (found,) = run_op("constant", [], [weight], dtype=dtype)
        np.testing.assert_array_equal(found, expected.astype(dtype), strict=True)


@pytest.mark.parametrize("dtype", [DType.I64, DType.I32, DType.U8, DType.BOOL])
def test_whole_numbers_keep_their_type(dtype):
    expected = IDS.astype(dtype.numpy)
    assert infer("constant", [], [dense(IDS, dtype)]) == [f"{dtype.value}[2]"]
    for evaluation in (np.float32, np.float64):
        found = run_op("constant", [], [dense(IDS, dtype)], dtype=evaluation)
        assert_same_bits(found, [expected])


def test_counts():
    with pytest.raises(TypeRuleError, match=r"expects operands \(\), got 1"):
        infer("constant", ["f32[2]"], [dense(IDS)])
    with pytest.raises(TypeRuleError, match=r"expects weights \(value\), got 0"):
        infer("constant", [], [])
