from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir.types import (
    Dim,
    DimExpr,
    DType,
    SymbolRange,
    TensorType,
    format_shape,
    substitute,
    sym,
    symbols_of,
)
from helpers.ops import tensor

# Spelling, bits, NumPy dtype, floating-point: written down independently of the implementation.
DTYPES = [
    ("f64", 64, np.float64, True),
    ("f32", 32, np.float32, True),
    ("f16", 16, np.float16, True),
    ("bf16", 16, ml_dtypes.bfloat16, True),
    ("f8e4m3", 8, ml_dtypes.float8_e4m3fn, True),
    ("f8e5m2", 8, ml_dtypes.float8_e5m2, True),
    ("f8e8m0", 8, ml_dtypes.float8_e8m0fnu, True),
    ("f4e2m1", 4, ml_dtypes.float4_e2m1fn, True),
    ("i64", 64, np.int64, False),
    ("i32", 32, np.int32, False),
    ("i16", 16, np.int16, False),
    ("i8", 8, np.int8, False),
    ("i4", 4, ml_dtypes.int4, False),
    ("u64", 64, np.uint64, False),
    ("u32", 32, np.uint32, False),
    ("u16", 16, np.uint16, False),
    ("u8", 8, np.uint8, False),
    ("u4", 4, ml_dtypes.uint4, False),
    ("bool", 8, np.bool_, False),
]
A, B = sym("a"), sym("b")


def test_all_dtypes_are_listed():
    assert {d.value for d in DType} == {name for name, *_ in DTYPES}


@pytest.mark.parametrize(("name", "bits", "numpy", "is_float"), DTYPES)
def test_dtype(name, bits, numpy, is_float):
    dtype = DType(name)
    assert (dtype.bits, dtype.numpy, dtype.is_float) == (bits, np.dtype(numpy), is_float)
    assert DType.of(np.dtype(numpy)) is dtype


def test_nbytes_rounds_up():
    assert [DType.U4.nbytes(n) for n in range(4)] == [0, 1, 1, 2]
    assert [DType.BF16.nbytes(n) for n in range(3)] == [0, 2, 4]


@pytest.mark.parametrize("dtype", [np.complex64, "U3", "datetime64[s]"])
def test_numpy_dtypes_without_counterpart(dtype):
    with pytest.raises(ValueError, match="no IR element type for NumPy dtype"):
        DType.of(np.dtype(dtype))


# An affine expression as a tree of operations, evaluated twice: over symbols and over integers.
Tree = str | int | tuple[str, "Tree", "Tree"]
TREES = st.recursive(
    st.sampled_from(["a", "b", "c"]) | st.integers(-5, 5),
    lambda inner: (
        st.tuples(st.sampled_from("+-"), inner, inner)
        | st.tuples(st.just("*"), inner, st.integers(-3, 3))
        | st.tuples(st.just("*"), st.integers(-3, 3), inner)
    ),
    max_leaves=8,
)
VALUES = st.fixed_dictionaries({s: st.integers(-9, 9) for s in "abc"})


def evaluate(tree: Tree, values: dict[str, Dim]) -> Dim:
    if isinstance(tree, tuple):
        op, left, right = tree[0], evaluate(tree[1], values), evaluate(tree[2], values)
        return left + right if op == "+" else left - right if op == "-" else left * right
    return values[tree] if isinstance(tree, str) else tree


SYMBOLS: dict[str, Dim] = {s: sym(s) for s in "abc"}


@given(TREES, VALUES)
def test_arithmetic_is_that_of_integers(tree, values):
    dim = evaluate(tree, SYMBOLS)
    found = dim.substitute(values) if isinstance(dim, DimExpr) else dim
    assert found == evaluate(tree, values)
    assert isinstance(found, int)


@given(TREES)
def test_dims_are_normalized(tree):
    dim = evaluate(tree, SYMBOLS)
    if isinstance(dim, DimExpr):
        names = [name for name, _ in dim.terms]
        assert dim.terms, "an expression without symbols is an int"
        assert names == sorted(set(names))
        assert all(coefficient for _, coefficient in dim.terms)


@given(TREES, TREES, VALUES)
def test_equality_is_that_of_the_functions(left, right, values):
    """Affine functions are equal exactly when they agree at 0 and at the unit vectors."""
    points = [dict.fromkeys("abc", 0), *({**dict.fromkeys("abc", 0), s: 1} for s in "abc")]
    agree = all(evaluate(left, p) == evaluate(right, p) for p in points)
    a, b = evaluate(left, SYMBOLS), evaluate(right, SYMBOLS)
    assert (a == b) is agree
    if agree:
        assert hash(a) == hash(b)
        assert evaluate(left, values) == evaluate(right, values)


@given(TREES)
def test_printed_dims_read_back(tree):
    dim = evaluate(tree, SYMBOLS)
    (found,) = tensor(f"f32[{dim}]").shape if not isinstance(dim, int) else (dim,)
    assert found == dim


@pytest.mark.parametrize(
    ("dim", "text"),
    [
        (A, "a"),
        (A + 7, "a + 7"),
        (7 + A, "a + 7"),
        (A - 7, "a - 7"),
        (7 - A, "-a + 7"),
        (2 * A, "2*a"),
        (A * -2, "-2*a"),
        (B + A, "a + b"),
        (B - A, "-a + b"),
        (3 * B - 2 * A - 1, "-2*a + 3*b - 1"),
    ],
)
def test_text(dim, text):
    assert str(dim) == text


def test_expressions_without_symbols_are_ints():
    for dim in (A - A, A * 0, 0 * A, (A + B) - B - A):
        assert isinstance(dim, int)
        assert dim == 0
    assert A + 3 - A == 3


def test_products_of_symbols_are_refused():
    with pytest.raises(TypeError):
        A * B
    with pytest.raises(TypeError):
        A * 1.5


def test_partial_substitution():
    assert (2 * A + B + 1).substitute({"b": 4}) == 2 * A + 5
    assert (A + B).substitute({"z": 1}) == A + B
    assert substitute((A + 1, 3, B), {"a": 2}) == (3, 3, B)


def test_symbols_of():
    assert symbols_of((A + B, 3, 2 * sym("c"))) == {"a", "b", "c"}
    assert symbols_of((1, 2)) == frozenset()


def test_tensor_type():
    type_ = TensorType(DType.BF16, (B, A + 7, 256))
    assert str(type_) == "bf16[b, a + 7, 256]"
    assert type_.rank == 3
    assert str(TensorType(DType.I64, ())) == "i64[]"
    assert format_shape([A, 1]) == "[a, 1]"
    same = TensorType(DType.BF16, (B, 7 + A, 256))
    assert type_ == same
    assert len({type_, same, TensorType(DType.F32, type_.shape)}) == 2


def test_negative_sizes_are_refused():
    with pytest.raises(ValueError, match=r"negative dimension in \[t, -1\]"):
        TensorType(DType.F32, (sym("t"), -1))
    assert TensorType(DType.F32, (0,)).shape == (0,)


def test_symbol_range():
    assert str(SymbolRange(1, 64)) == "1..64"
    assert SymbolRange(0, 0) == SymbolRange(0, 0)
    for low, high in ((2, 1), (-1, 3), (-2, -1)):
        with pytest.raises(ValueError, match=f"empty or negative range {low}..{high}"):
            SymbolRange(low, high)


@pytest.mark.parametrize("value", [A, TensorType(DType.F32, (A,)), SymbolRange(0, 1)])
def test_types_are_immutable(value):
    with pytest.raises((AttributeError, TypeError)):
        value.constant = 3
