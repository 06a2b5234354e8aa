from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc import nvfp4
from edgecc.ir import NVFP4, Dense, Derived, DType, Int8Block, Unbound, Weight, WeightTable
from edgecc.ir.recipes import RECIPES
from edgecc.ir.rope import RopeParams, rope_tables
from helpers.weights import E2M1, Packed, dense, packed

F8 = ml_dtypes.float8_e4m3fn


def table(**weights: Weight) -> WeightTable:
    made = WeightTable()
    for symbol, weight in weights.items():
        made.add(symbol, weight)
    return made


def test_names():
    assert all(name == recipe.name for name, recipe in RECIPES.items())
    assert {n for n, r in RECIPES.items() if r.expands} == {"dequantize", "int8_codes", "narrow"}
    assert all(type(r).__doc__ for r in RECIPES.values())


# concat_rows


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    cut=st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted),
    kind=st.sampled_from(["f32", "bf16", "nvfp4"]),
    seed=st.integers(0, 99),
)
def test_concat_rows_on_any_range(counts, cut, kind, seed):
    """Ranges that start and stop inside inputs, skip some, or are empty; inputs without rows."""
    rng = np.random.default_rng(seed)
    made = WeightTable()
    expected = []
    for i, count in enumerate(counts):
        if kind == "nvfp4":
            weight = packed(rng, count, 8)
            made.add(f"w{i}", weight.weight)
            expected.append(weight.values)
        else:
            array = rng.standard_normal((count, 8)).astype(ml_dtypes.bfloat16).astype(np.float32)
            made.add(f"w{i}", dense(array, DType(kind)))
            expected.append(array)
    made.derive("all", "concat_rows", tuple(made))
    assert made["all"].shape == (sum(counts), 8)
    assert made["all"].encoding == made["w0"].encoding
    low, high = (min(c, sum(counts)) for c in cut)
    found = made.dense("all", low, high)
    assert np.array_equal(found, np.concatenate(expected)[low:high])


def test_concat_rows_keeps_packed_bytes():
    rng = np.random.default_rng(0)
    a, b = packed(rng, 3, 16, block=16), packed(rng, 2, 16, block=16)
    found = table(a=a.weight, b=b.weight)
    found.derive("ab", "concat_rows", ("a", "b"))
    parts = found.read("ab")
    for name in ("weight", "weight_scale"):
        expected = np.concatenate([a.parts[name], b.parts[name]])
        assert parts[name].tobytes() == expected.tobytes()
    assert parts["weight_scale_2"] == a.global_scale
    assert found["ab"].nbytes == a.weight.nbytes + b.weight.nbytes - 4


def test_concat_rows_of_vectors():
    found = table(a=dense(np.arange(3.0), DType.BF16), b=dense(np.arange(3.0, 5.0), DType.BF16))
    found.derive("ab", "concat_rows", ("a", "b"))
    assert found["ab"].shape == (5,)
    assert found["ab"].encoding == Dense(DType.BF16)
    assert found.dense("ab").tolist() == [0, 1, 2, 3, 4]
    assert found.dense("ab", 2, 4).tolist() == [2, 3]


def test_concat_rows_of_aliases_and_derived_weights():
    found = table(a=dense(np.ones((1, 2))), b=dense(np.zeros((2, 2))), c=dense(np.ones((9, 9))))
    found.alias("c", "b")
    found.derive("d", "concat_rows", ("a", "c"))
    found.derive("e", "concat_rows", ("d", "a", "d"))
    assert found.dense("e")[:, 0].tolist() == [1, 0, 0, 1, 1, 0, 0]
    assert found.dense("e", 2, 5)[:, 0].tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "concat_rows takes at least 1 inputs, got 0"),
        ([dense(np.ones((2, 3))), dense(np.ones((2, 4)))], "columns differ"),
        ([dense(np.ones((2, 3))), dense(np.ones(3))], "columns differ"),
        ([dense(np.ones(())), dense(np.ones(()))], "columns differ"),
        ([dense(np.ones((2, 2, 2)))], "columns differ"),
        ([dense(np.ones((2, 4))), dense(np.ones((2, 4)), DType.BF16)], "encodings differ"),
        (
            [packed(np.random.default_rng(0), 2, 16, block=b).weight for b in (4, 16)],
            "encodings differ: nvfp4<block=16>, nvfp4<block=4>",
        ),
    ],
)
def test_concat_rows_refuses(weights, message):
    found = table(**{f"w{i}": w for i, w in enumerate(weights)})
    with pytest.raises(ValueError, match=message):
        found.derive("all", "concat_rows", tuple(found))
    assert "all" not in found


# add_one


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_add_one_rounds_once_to_float32(kind):
    """Offsets down to 2^-40, of which a sum in 16 bits would keep nothing."""
    rng = np.random.default_rng(5)
    stored = (rng.standard_normal(64) * 2.0 ** -rng.integers(0, 40, 64)).astype(DType(kind).numpy)
    found = table(w=dense(stored, DType(kind)))
    found.derive("w+1", "add_one", ("w",))
    assert (found["w+1"].shape, found["w+1"].encoding) == ((64,), Dense(DType.F32))
    expected = (1 + stored.astype(np.float64)).astype(np.float32)
    assert found.dense("w+1", 3, 60).tobytes() == expected[3:60].tobytes()
    assert found.read("w+1")["weight"].dtype == np.float32


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "add_one takes 1 inputs, got 0"),
        ([dense(np.ones(3)), dense(np.ones(3))], "add_one takes 1 inputs, got 2"),
        ([dense(np.ones(3, np.int64))], "dense floating-point numbers, found dense<i64>"),
        ([packed(np.random.default_rng(0), 2, 16).weight], "numbers, found nvfp4"),
    ],
)
def test_add_one_refuses(weights, message):
    found = table(**{f"w{i}": w for i, w in enumerate(weights)})
    with pytest.raises(ValueError, match=message):
        found.derive("one", "add_one", tuple(found))


# dequantize


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "f8e4m3"])
def test_dequantize_dense(kind):
    stored = np.random.default_rng(1).standard_normal((5, 4)).astype(DType(kind).numpy)
    found = table(w=dense(stored, DType(kind)))
    found.derive("wide", "dequantize", ("w",))
    assert found["wide"].encoding == Dense(DType.F32)
    assert np.array_equal(found.dense("wide", 1, 4), stored[1:4].astype(np.float32))
    assert found.read("wide")["weight"].dtype == np.float32


def test_dequantize_nvfp4_and_what_int8_codes_make_of_it():
    made = packed(np.random.default_rng(2), 5, 8)
    found = table(w=made.weight)
    found.derive("wide", "dequantize", ("w",))
    found.derive("codes", "int8_codes", ("w",))
    found.derive("wide codes", "dequantize", ("codes",))
    assert found["codes"].encoding == Int8Block(4)
    assert np.array_equal(found.dense("wide"), made.values)
    assert found.dense("wide codes").tobytes() == found.dense("wide").tobytes()


def test_dequantize_scalars_and_vectors():
    found = table(s=dense(np.array(2.5), DType.BF16), v=dense(np.arange(3.0), DType.F16))
    for symbol in ("s", "v"):
        found.derive(f"{symbol}.f32", "dequantize", (symbol,))
        assert found.dense(f"{symbol}.f32").tolist() == found.dense(symbol).tolist()


# int8_codes


def every_code_and_scale(global_scale: float) -> Packed:
    """One row for each valid E4M3 scale, 0 to 448, with all 16 codes."""
    scale = np.arange(0x7F, dtype=np.uint8)[:, None].view(F8)
    codes = np.tile(np.arange(16, dtype=np.uint8), (0x7F, 1))
    return Packed(codes, scale, np.float32(global_scale))


@pytest.mark.parametrize("global_scale", [1.0, 0.0022321429569274187, 3.3e-7, 1e-30, 512.0, 1e30])
def test_int8_codes_are_exact_for_all_codes_and_scales(global_scale):
    made = every_code_and_scale(global_scale)
    parts = made.parts
    codes, scale = nvfp4.int8_codes(*parts.values())
    assert (codes.dtype, scale.dtype) == (np.uint8, np.float32)
    assert codes.shape == made.shape
    found = Int8Block(16).dequantize({"weight": codes, "weight_scale": scale})
    assert found.tobytes() == NVFP4().dequantize(parts).tobytes()
    assert np.array_equal(found, made.values)


def test_int8_codes_are_doubled_values_around_128():
    codes, _ = nvfp4.int8_codes(*every_code_and_scale(1.0).parts.values())
    doubled = [int(2 * m) for m in E2M1]
    assert codes[0].tolist() == [128 + d for d in doubled] + [128 - d for d in doubled]


@given(seed=st.integers(0, 1 << 32), exponent=st.floats(-30, 30))
def test_int8_codes_of_any_global_scale(seed, exponent):
    rng = np.random.default_rng(seed)
    made = replace(packed(rng, 4, 16, block=8), global_scale=np.float32(10.0**exponent))
    found = table(w=made.weight)
    found.derive("codes", "int8_codes", ("w",))
    assert found.dense("codes", 1, 3).tobytes() == found.dense("w", 1, 3).tobytes()


def test_int8_codes_refuses_other_encodings():
    found = table(w=dense(np.ones((2, 16))))
    with pytest.raises(ValueError, match="int8_codes needs nvfp4, found dense<f32>"):
        found.derive("codes", "int8_codes", ("w",))


# rope_table


def test_rope_table():
    found = WeightTable()
    settings = {"theta": 1e4, "dim": 6, "rope_type": "linear", "factor": 2.0}
    for part in ("cos", "sin"):
        found.derive(part, "rope_table", (), part=part, length=9, **settings)
        assert found[part].shape == (9, 3)
        assert found[part].encoding == Dense(DType.F32)
    cos, sin = rope_tables(RopeParams(1e4, 6, "linear", factor=2.0), 9)
    assert found.dense("cos").tobytes() == cos.tobytes()
    assert found.dense("sin", 3, 5).tobytes() == sin[3:5].tobytes()
    assert not np.array_equal(cos, sin)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part": None}, "parameters of a rope table: 'part'"),
        ({"length": None}, "parameters of a rope table: 'length'"),
        ({"theta": None}, "parameters of a rope table: .*theta"),
        ({"colour": "red"}, "parameters of a rope table: .*colour"),
        ({"part": "tan"}, "no part 'tan' of a table of 9 rows"),
        ({"length": -1}, "of a table of -1 rows"),
        ({"dim": 3}, "dim must be even and positive, found 3"),
        ({"theta": 0.5}, "theta must be finite and above 1"),
    ],
)
def test_rope_table_refuses(change, message):
    params = {"part": "cos", "length": 9, "theta": 1e4, "dim": 6} | change
    given_ = {k: v for k, v in params.items() if v is not None}
    with pytest.raises(ValueError, match=message):
        WeightTable().derive("cos", "rope_table", (), **given_)


# offsets_to_ids


@given(
    st.lists(st.integers(-(1 << 60), 1 << 60), max_size=12),
    st.tuples(st.integers(0, 12), st.integers(0, 12)).map(sorted),
)
def test_offsets_to_ids_on_any_range(offsets, cut):
    found = table(d2t=dense(np.array(offsets, dtype=np.int64)))
    found.derive("ids", "offsets_to_ids", ("d2t",))
    assert found["ids"].shape == (len(offsets),)
    low, high = (min(c, len(offsets)) for c in cut)
    expected = [i + offsets[i] for i in range(low, high)]
    assert found.dense("ids", low, high).tolist() == expected
    assert found.dense("ids", low, high).dtype == np.int64


@pytest.mark.parametrize(
    "values", [np.zeros(3), np.zeros((2, 2), np.int64), np.zeros(3, np.int32)], ids=str
)
def test_offsets_to_ids_refuses(values):
    found = table(d2t=dense(values))
    with pytest.raises(ValueError, match="offsets_to_ids needs a dense<i64> vector, found dense<"):
        found.derive("ids", "offsets_to_ids", ("d2t",))


# narrow


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_narrow_rounds_once(dtype):
    values = np.random.default_rng(4).standard_normal((6, 8)).astype(np.float32)
    found = table(w=dense(values))
    found.derive("n", "narrow", ("w",), dtype=dtype)
    kind = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}[dtype]
    assert found["n"].encoding == Dense(DType(dtype))
    assert np.array_equal(found.read("n", 2, 5)["weight"], values[2:5].astype(kind))


@pytest.mark.parametrize("params", [{}, {"dtype": "f32"}, {"dtype": "bf16", "more": 1}])
def test_narrow_takes_a_type_of_16_bits(params):
    found = table(w=dense(np.ones((2, 2))))
    with pytest.raises(ValueError, match="narrow takes dtype = bf16 or f16"):
        found.derive("n", "narrow", ("w",), **params)


# All recipes


@pytest.mark.parametrize("count", range(3))
@pytest.mark.parametrize("recipe", [name for name, r in RECIPES.items() if not r.repacks])
def test_number_of_inputs(recipe, count):
    allowed = {"concat_rows": {1, 2}, "rope_table": {0}, "quantize": {1, 2}}
    made = packed(np.random.default_rng(0), 2, 8).weight
    if recipe == "offsets_to_ids":
        made = dense(np.arange(3))
    if recipe == "add_one":
        made = dense(np.ones((2, 8)))
    if recipe == "input_scale":
        made = replace(made, encoding=NVFP4(4, input_scale=True))
    params = {
        "rope_table": {"part": "cos", "length": 2, "theta": 1e4, "dim": 2},
        "quantize": {"encoding": "fp8<tensor>"},
        "narrow": {"dtype": "bf16"},
    }.get(recipe, {})
    if count in allowed.get(recipe, {1}):
        RECIPES[recipe].check([made] * count, params)
    else:
        with pytest.raises(ValueError, match=rf"{recipe} takes .* inputs, got {count}"):
            RECIPES[recipe].check([made] * count, params)


def test_recipes_of_unbound_weights_are_typed_but_not_read():
    found = table(head=Weight((4, 8), Dense(DType.BF16), Unbound("lm_head")))
    found.derive("wide", "dequantize", ("head",))
    assert found["wide"] == Weight((4, 8), Dense(DType.F32), Derived("dequantize", ("head",)))
