from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import RequestError
from edgecc.ir import DType
from edgecc.ir.ops import TypeRuleError, matmul
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.weights import WeightTable
from helpers.ops import Array, Cases, check_reference, check_rows, family, infer, run_op, values
from helpers.ops import Case as C
from helpers.weights import dense, packed


def linear(rng: np.random.Generator) -> C:
    x, w, bias = values(rng, 2, 3, 12), values(rng, 5, 12), values(rng, 5)
    expected = np.einsum("btk,nk->btn", x, w) + bias
    return C(
        (x,),
        (expected,),
        (dense(w), dense(bias)),
        types=("f32[b, t, 12]",),
        results=("f32[b, t, 5]",),
    )


def linear_nvfp4(rng: np.random.Generator) -> C:
    x, w = values(rng, 4, 32), packed(rng, 7, 32, block=16)
    return C((x,), (x @ w.values.T,), (w.weight,), types=("f32[t, 32]",), results=("f32[t, 7]",))


def linear_bf16(rng: np.random.Generator) -> C:
    x, w = values(rng, 4, 8), values(rng, 3, 8).astype(ml_dtypes.bfloat16)
    return C(
        (x,),
        (x @ w.astype(np.float64).T,),
        (dense(w, DType.BF16),),
        types=("f32[c + 3, 8]",),
        results=("f32[c + 3, 3]",),
    )


def linear_vector(rng: np.random.Generator) -> C:
    x, w = values(rng, 8), values(rng, 3, 8)
    return C((x,), (w @ x,), (dense(w),), types=("f32[8]",), results=("f32[3]",))


def embedding(rng: np.random.Generator) -> C:
    ids, table = rng.integers(0, 9, (2, 4)), values(rng, 9, 6)
    expected = np.array([[table[i] for i in row] for row in ids])
    return C((ids,), (expected,), (dense(table),), types=("i64[b, t]",), results=("f32[b, t, 6]",))


def embedding_bf16(rng: np.random.Generator) -> C:
    ids, table = rng.integers(0, 9, 5), values(rng, 9, 6).astype(ml_dtypes.bfloat16)
    return C(
        (ids,),
        (table[ids].astype(np.float64),),
        (dense(table, DType.BF16),),
        types=("i64[t]",),
        results=("f32[t, 6]",),
    )


def embedding_nvfp4(rng: np.random.Generator) -> C:
    ids, table = rng.integers(0, 9, (3, 1, 2)), packed(rng, 9, 8)
    return C(
        (ids,),
        (table.values[ids],),
        (table.weight,),
        types=("i64[b, 1, 2]",),
        results=("f32[b, 1, 2, 8]",),
    )


def lookup(rng: np.random.Generator) -> C:
    ids, table = rng.integers(0, 9, (2, 4)), rng.integers(-(1 << 60), 1 << 60, 9)
    expected = np.array([[table[i] for i in row] for row in ids])
    return C((ids,), (expected,), (dense(table),), types=("i64[b, t]",), results=("i64[b, t]",))


def lookup_scalar(rng: np.random.Generator) -> C:
    ids, table = np.array(3), rng.integers(0, 100, 4)
    return C((ids,), (table[3],), (dense(table),), types=("i64[]",), results=("i64[]",))


CASES: Cases = {
    "linear": linear,
    "linear-nvfp4": linear_nvfp4,
    "linear-bf16": linear_bf16,
    "linear-vector": linear_vector,
    "embedding": embedding,
    "embedding-bf16": embedding_bf16,
    "embedding-nvfp4": embedding_nvfp4,
    "lookup": lookup,
    "lookup-scalar": lookup_scalar,
}


def test_every_op_has_a_case():
    assert {name.split("-")[0] for name in CASES} == family(matmul.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference(name.split("-")[0], CASES[name](np.random.default_rng(1)))


@pytest.mark.parametrize("columns", [1, 3, 16, 33])
def test_linear_rows_do_not_depend_on_each_other(columns):
    rng = np.random.default_rng(2)
    x, w = values(rng, 9, columns), dense(values(rng, 21, columns))
    check_rows("linear", [x], [w])


def test_embedding_rows_do_not_depend_on_each_other():
    rng = np.random.default_rng(2)
    check_rows("embedding", [rng.integers(0, 9, 7)], [packed(rng, 9, 8).weight])


def test_lookups_do_not_depend_on_each_other():
    rng = np.random.default_rng(2)
    check_rows("lookup", [rng.integers(0, 9, 7)], [dense(rng.integers(0, 99, 9))])


def test_linear_rows_do_not_depend_on_the_layout_of_the_input():
    rng = np.random.default_rng(3)
    x, w = values(rng, 9, 37), dense(values(rng, 4, 37))
    assert run_op("linear", [np.asfortranarray(x)], [w])[0].tobytes() == (
        run_op("linear", [x], [w])[0].tobytes()
    )


def test_linear_streams_its_weight(monkeypatch):
    """Blocks of three rows give the bits of one block: a row is one product either way."""
    rng = np.random.default_rng(4)
    x, w = values(rng, 3, 8), packed(rng, 10, 8)
    whole = run_op("linear", [x], [w.weight])[0]
    blocks = WeightTable.row_blocks
    sizes = []

    def small(self: WeightTable, symbol: str, block_bytes: int):
        for start, stop, parts in blocks(self, symbol, 3 * 8 * 4):
            sizes.append(stop - start)
            yield start, stop, parts

    monkeypatch.setattr(WeightTable, "row_blocks", small)
    np.testing.assert_allclose(run_op("linear", [x], [w.weight])[0], whole, rtol=1e-6)
    assert sizes == [3, 3, 3, 1]


def test_rows_that_are_multiplied_together_fit_a_core():
    """One block of 4 MB would be divided among all cores by OpenBLAS."""
    view, blocks = dense(np.zeros((1024, 1024), dtype=np.float32)), []
    with pytest.MonkeyPatch.context() as patch:
        original = WeightTable.row_blocks

        def watched(self: WeightTable, symbol: str, block_bytes: int):
            for start, stop, parts in original(self, symbol, block_bytes):
                blocks.append(parts["weight"].nbytes)
                yield start, stop, parts

        patch.setattr(WeightTable, "row_blocks", watched)
        run_op("linear", [np.ones((2, 1024))], [view])
    assert blocks == [1 << 20] * 4


def test_linear_without_rows():
    (y,) = run_op("linear", [np.zeros((2, 0, 4))], [dense(np.ones((3, 4)))])
    assert y.shape == (2, 0, 3)


def test_embedding_reads_only_the_rows_that_occur(monkeypatch):
    rng = np.random.default_rng(5)
    table = packed(rng, 50, 8)
    read = []
    original = WeightTable.read

    def spy(self: WeightTable, symbol: str, start: int = 0, stop: int | None = None):
        read.append((start, stop))
        return original(self, symbol, start, stop)

    monkeypatch.setattr(WeightTable, "read", spy)
    run_op("embedding", [np.array([[7, 3], [7, 7]])], [table.weight])
    assert sorted(read) == [(3, 4), (7, 8)]


@given(st.lists(st.integers(0, 4), max_size=6))
def test_embedding_of_any_ids(ids):
    table = np.arange(10.0).reshape(5, 2)
    (found,) = run_op("embedding", [np.array(ids, dtype=np.int64)], [dense(table)])
    assert found.tolist() == [table[i].tolist() for i in ids]


@given(st.lists(st.integers(0, 4), max_size=6))
def test_lookup_of_any_ids(ids):
    """Values that float64 does not hold; no ids give no values, of integers all the same."""
    table = np.arange(5) * 7 + (1 << 60)
    (found,) = run_op("lookup", [np.array(ids, dtype=np.int64)], [dense(table)])
    assert found.dtype == np.int64
    assert found.tolist() == [(1 << 60) + 7 * i for i in ids]


TABLES = {
    "dense": ("embedding", dense(np.ones((5, 4)))),
    "nvfp4": ("embedding", packed(np.random.default_rng(0), 5, 4).weight),
    "ids": ("lookup", dense(np.arange(5))),
}


@pytest.mark.parametrize("bad", [-1, 5, 6, 1 << 40, -(1 << 63)])
@pytest.mark.parametrize("kind", TABLES)
def test_ids_outside_the_table_are_a_request_error(bad, kind):
    op, table = TABLES[kind]
    with pytest.raises(RequestError, match=rf"index {bad} is outside 0\.\.4") as caught:
        run_op(op, [np.array([[0, bad]])], [table])
    assert caught.value.id == "run/index-range"


W: Array = np.ones((3, 4))


@pytest.mark.parametrize(
    ("types", "weights", "message"),
    [
        (["i64[t, 4]"], [W], "x must be floating-point, got i64"),
        (["f32[]"], [W], r"x must have at least one axis, got f32\[\]"),
        (["f32[t, 4]"], [np.ones(4)], "rank of the weight: expected 2, got 1"),
        (["f32[t, 4]"], [np.ones((1, 3, 4))], "rank of the weight: expected 2, got 3"),
        (["f32[t, 3]"], [W], r"columns of the weight \(last axis of x\): expected 3, got 4"),
        (["f32[4, t]"], [W], r"columns of the weight \(last axis of x\): expected t, got 4"),
        (["f32[t, 4]"], [W, np.ones(4)], r"shape of the bias: expected \(3,\), got \(4,\)"),
        (["f32[t, 4]"], [W, W], r"shape of the bias: expected \(3,\), got \(3, 4\)"),
        (["f32[t, 4]"], [], r"expects weights \(weight, bias\?\), got 0"),
        (["f32[t, 4]"], [W, W[:, 0], W], r"expects weights \(weight, bias\?\), got 3"),
        ([], [W], r"expects operands \(x\), got 0"),
        (["f32[t, 4]"] * 2, [W], r"expects operands \(x\), got 2"),
    ],
)
def test_linear_refuses(types, weights, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("linear", types, [dense(w) for w in weights])


@pytest.mark.parametrize(
    ("types", "weights", "message"),
    [
        (["f32[t]"], [W], r"ids must be i64, got f32\[t\]"),
        (["i32[t]"], [W], r"ids must be i64, got i32\[t\]"),
        (["i64[t]"], [np.ones(4)], "rank of the table: expected 2, got 1"),
        (["i64[t]"], [], r"expects weights \(table\), got 0"),
        (["i64[t]"], [W, W], r"expects weights \(table\), got 2"),
    ],
)
def test_embedding_refuses(types, weights, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("embedding", types, [dense(w) for w in weights])


I64: Array = np.arange(4)


@pytest.mark.parametrize(
    ("types", "weights", "message"),
    [
        (["f32[t]"], [I64], r"ids must be i64, got f32\[t\]"),
        (["i32[t]"], [I64], r"ids must be i64, got i32\[t\]"),
        (["i64[t]"], [I64.reshape(2, 2)], "rank of the table: expected 1, got 2"),
        (["i64[t]"], [I64.astype(np.int32)], "encoding of the table: expected dense<i64>, got"),
        (["i64[t]"], [np.ones(4)], "encoding of the table: expected dense<i64>, got dense<f32>"),
        (["i64[t]"], [], r"expects weights \(table\), got 0"),
        (["i64[t]"], [I64, I64], r"expects weights \(table\), got 2"),
    ],
)
def test_lookup_refuses(types, weights, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("lookup", types, [dense(w) for w in weights])


@pytest.mark.parametrize(("op", "type_"), [("linear", "f32[t, 4]"), ("embedding", "i64[t]")])
def test_foreign_attributes_are_refused(op, type_):
    with pytest.raises(TypeRuleError, match="expects attributes Attributes, got RmsNormAttributes"):
        infer(op, [type_], [dense(W)], RmsNormAttributes(1e-6))
