from __future__ import annotations

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import InputError, InternalError, LegalizeError
from edgecc.ir import (
    NVFP4,
    Alias,
    Dense,
    Derived,
    DType,
    Encoding,
    Module,
    Stored,
    StoredPart,
    Unbound,
    Weight,
    WeightTable,
)
from helpers.weights import Array, ForbiddenReader, MemoryReader, dense, inline, packed, store

F32 = Dense(DType.F32)


def table(**weights: Weight) -> WeightTable:
    made = WeightTable()
    for symbol, weight in weights.items():
        made.add(symbol, weight)
    return made


def alias(target: str) -> Weight:
    return Weight((2, 2), F32, Alias(target))


ONE, TWO = dense(np.ones((2, 2))), dense(np.full((2, 2), 2.0))


def test_entries_keep_their_order():
    found = table(b=ONE, a=TWO, c=ONE)
    assert list(found) == ["b", "a", "c"]
    assert len(found) == 3
    assert found["a"] == TWO
    assert "z" not in found


def test_adding_the_same_again_is_fine_and_another_is_not():
    found = table(a=ONE)
    assert found.add("a", dense(np.ones((2, 2)))) == "a"
    with pytest.raises(InternalError, match="weight @a is defined twice") as caught:
        found.add("a", TWO)
    assert caught.value.id == "ir/duplicate-weight"
    assert found["a"] == ONE


def test_rebind_and_remove():
    found = table(a=ONE)
    found.rebind("a", TWO)
    assert found["a"] == TWO
    with pytest.raises(InternalError, match="no weight @z"):
        found.rebind("z", TWO)
    assert "z" not in found
    found.remove("a")
    assert not found


def test_copies_are_independent():
    found = table(a=ONE)
    found.readers["x"] = MemoryReader()
    other = found.copy()
    other.add("b", TWO)
    other.rebind("a", TWO)
    other.readers["y"] = MemoryReader()
    assert list(found) == ["a"]
    assert found["a"] == ONE
    assert list(found.readers) == ["x"]
    assert other.readers["x"] is found.readers["x"]


def test_aliases_resolve_through_chains():
    found = table(a=ONE, b=alias("a"), c=alias("b"))
    assert [found.resolve(s) for s in "abc"] == ["a", "a", "a"]
    assert np.array_equal(found.dense("c"), np.ones((2, 2)))
    assert found.digest("c") == found.digest("a")
    assert found.origin("c") == "inline"


@pytest.mark.parametrize(
    ("weights", "path"),
    [
        ({"a": alias("a")}, "a -> a"),
        ({"a": alias("b"), "b": alias("a")}, "a -> b -> a"),
        ({"a": alias("b"), "b": alias("c"), "c": alias("b")}, "a -> b -> c -> b"),
        ({"a": alias("z")}, "a -> z"),
        ({"a": alias("b"), "b": alias("z")}, "a -> b -> z"),
    ],
)
def test_aliases_that_lead_nowhere(weights, path):
    with pytest.raises(InternalError, match=f"alias @a leads to {path}$") as caught:
        table(**weights).resolve("a")
    assert caught.value.id == "ir/bad-alias"


@pytest.mark.parametrize("method", ["resolve", "read", "dense", "digest", "origin"])
def test_unknown_symbols(method):
    with pytest.raises(InternalError, match="no weight @z") as caught:
        getattr(table(a=ONE), method)("z")
    assert caught.value.id == "ir/unknown-weight"


def test_alias_takes_over_shape_and_encoding():
    found = table(a=packed(np.random.default_rng(0), 2, 16, block=16).weight, b=ONE, c=alias("a"))
    found.alias("b", "c")
    assert found["b"] == Weight((2, 16), NVFP4(), Alias("c"))
    assert found.resolve("b") == "a"


def test_other_names_of_an_entry_follow_it():
    sixteen = dense(np.ones((2, 2)), DType.BF16)
    found = table(draft=ONE, name=alias("draft"), other=alias("name"), target=sixteen, free=ONE)
    found.alias("draft", "target")
    assert {s: str(w.encoding) for s, w in found.items()} == {
        "draft": "dense<bf16>",
        "name": "dense<bf16>",
        "other": "dense<bf16>",
        "target": "dense<bf16>",
        "free": "dense<f32>",
    }
    assert [found[s].source for s in ("name", "other")] == [Alias("draft"), Alias("name")]


@pytest.mark.parametrize("target", ["a", "b", "c"])
def test_alias_of_itself_is_refused(target):
    found = table(a=ONE, b=alias("a"), c=alias("b"))
    with pytest.raises(InternalError, match=f"@{target} already leads to @a"):
        found.alias("a", target)
    assert found["a"] == ONE


def test_dependencies():
    found = table(a=ONE, b=TWO, c=alias("b"))
    found.derive("d", "concat_rows", ("a", "c"))
    found.derive("e", "concat_rows", ("d", "a"))
    assert list(found.dependencies("e")) == ["e", "d", "a", "c", "b"]
    assert list(found.dependencies("a")) == ["a"]
    found.add("x", Weight((2, 2), F32, Derived("dequantize", ("gone",))))
    with pytest.raises(InternalError, match="no weight @gone"):
        list(found.dependencies("x"))


def test_dependencies_end_in_a_cycle():
    found = table(
        a=Weight((2, 2), F32, Derived("dequantize", ("b",))),
        b=Weight((2, 2), F32, Derived("dequantize", ("a",))),
    )
    assert list(found.dependencies("a")) == ["a", "b"]


def test_reading_is_lazy():
    """Shapes, bytes, origins, aliases and derivation cost no reading."""
    module = Module("m")
    store(module, "target", "q", packed(np.random.default_rng(0), 4, 16, block=16).weight)
    store(module, "target", "k", packed(np.random.default_rng(0), 4, 16, block=16).weight)
    found = module.weights
    found.readers["target"] = ForbiddenReader()
    found.derive("qk", "concat_rows", ("q", "k"))
    found.derive("wide", "dequantize", ("qk",))
    found.alias("k", "q")
    assert found["qk"].nbytes == 8 * 8 + 8 + 4
    assert found["wide"].nbytes == 8 * 16 * 4
    assert found.origin("wide") == (
        "dequantize of concat_rows of target/model.safetensors: q.weight, "
        "target/model.safetensors: q.weight"
    )
    with pytest.raises(AssertionError, match="was read"):
        found.read("wide")


def test_reading_stored_weights():
    """Tensors of scalars are stored as `[]` or `[1]`, and rows of packed ones are bytes."""
    made = packed(np.random.default_rng(1), 5, 8)
    reader = MemoryReader({"w": made.parts["weight"], "s": made.parts["weight_scale"]})
    reader.tensors["g"] = made.parts["weight_scale_2"].reshape(1)
    parts = tuple(
        StoredPart(component, "f", key)
        for component, key in (("weight", "w"), ("weight_scale", "s"), ("weight_scale_2", "g"))
    )
    found = table(w=Weight((5, 8), NVFP4(4), Stored("c", parts)))
    found.readers["c"] = reader
    rows = found.read("w", 1, 3)
    assert [(n, a.shape) for n, a in rows.items()] == [
        ("weight", (2, 4)),
        ("weight_scale", (2, 2)),
        ("weight_scale_2", ()),
    ]
    assert np.array_equal(found.dense("w", 1, 3), made.values[1:3])
    assert np.array_equal(found.dense("w"), made.values)


def test_reading_without_a_reader():
    found = table(w=Weight((2,), F32, Stored("gone", (StoredPart("weight", "f", "k"),))))
    with pytest.raises(InputError, match="checkpoint 'gone', which is not open") as caught:
        found.read("w")
    assert caught.value.id == "ir/no-reader"
    assert "read_ir" in caught.value.diagnostics[0].help


@pytest.mark.parametrize("method", ["read", "dense", "digest"])
def test_reading_unbound_weights(method):
    found = table(head=Weight((4, 8), F32, Unbound("lm_head")), other=alias("head"))
    for symbol in ("head", "other"):
        with pytest.raises(
            LegalizeError, match=r"weight @\w+ has no bytes: unbound lm_h"
        ) as caught:
            getattr(found, method)(symbol)
        assert caught.value.id == "bind/unbound-weight"
        assert "together with its target" in caught.value.diagnostics[0].help


def test_scalars():
    found = table(s=dense(np.array(3.0)))
    assert found.dense("s") == 3
    assert [(a, b) for a, b, _ in found.row_blocks("s")] == [(0, 0)]
    assert found.digest("s") != table(s=dense(np.array(4.0))).digest("s")


# Every kind of source and encoding, over five to seven rows.


def every_kind(seed: int) -> tuple[Module, list[str]]:
    rng = np.random.default_rng(seed)
    module = Module("m")
    found = module.weights
    found.add("dense", dense(rng.standard_normal((7, 4))))
    found.add("bf16", dense(rng.standard_normal((5, 4)), DType.BF16))
    found.add("vector", dense(rng.standard_normal(6)))
    found.add("ids", dense(rng.integers(0, 9, (6, 2))))
    found.add("nvfp4", packed(rng, 7, 8).weight)
    store(module, "c", "stored", packed(rng, 5, 8).weight)
    found.add("same scale", packed(rng, 6, 8).weight)
    found.derive("concat", "concat_rows", ("stored", "same scale", "stored"))
    found.derive("int8", "int8_codes", ("concat",))
    found.derive("wide", "dequantize", ("concat",))
    found.derive("rope", "rope_table", (), part="cos", length=9, theta=1e4, dim=6)
    found.add("alias", Weight((1,), F32, Alias("wide")))
    found.alias("alias", "int8")
    return module, list(found)


def joined(encoding: Encoding, shape: tuple[int, ...], blocks: list[dict[str, Array]]):
    components = encoding.components(shape)
    return {
        name: np.concatenate([b[name] for b in blocks]) if c.rows else blocks[0][name]
        for name, c in components.items()
    }


@given(seed=st.integers(0, 9), block_bytes=st.sampled_from([1, 16, 40, 64, 100, 1 << 20]))
def test_row_blocks_are_the_whole_weight(seed, block_bytes):
    module, symbols = every_kind(seed)
    for symbol in symbols:
        weight = module.weights[module.weights.resolve(symbol)]
        whole = module.weights.read(symbol)
        blocks = list(module.weights.row_blocks(symbol, block_bytes))
        ranges = [(start, stop) for start, stop, _ in blocks]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == weight.shape[0]
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert all(start < stop for start, stop in ranges)
        row = 4 * int(np.prod(weight.shape[1:]))
        assert all(
            stop - start == 1 or (stop - start) * row <= block_bytes for start, stop in ranges
        )
        found = joined(weight.encoding, weight.shape, [b for *_, b in blocks])
        assert list(found) == list(whole)
        for name, array in whole.items():
            component = weight.encoding.components(weight.shape)[name]
            assert (array.shape, array.dtype) == (component.shape, component.dtype.numpy)
            assert found[name].tobytes() == array.tobytes()
        values = [weight.encoding.dequantize(b) for *_, b in blocks]
        assert np.concatenate(values).tobytes() == module.weights.dense(symbol).tobytes()


@given(seed=st.integers(0, 9), cut=st.tuples(st.integers(0, 16), st.integers(0, 16)).map(sorted))
def test_any_range_of_rows(seed, cut):
    module, symbols = every_kind(seed)
    for symbol in symbols:
        rows = module.weights[module.weights.resolve(symbol)].shape[0]
        low, high = (min(c, rows) for c in cut)
        whole = module.weights.dense(symbol)
        found = module.weights.dense(symbol, low, high)
        assert found.shape == (high - low, *whole.shape[1:])
        assert found.tobytes() == whole[low:high].tobytes()


@given(seed=st.integers(0, 9), block_bytes=st.sampled_from([1, 40, 64, 100]))
def test_digest_does_not_depend_on_the_block_size(seed, block_bytes):
    module, symbols = every_kind(seed)
    found = [module.weights.digest(s) for s in symbols]

    class Small(WeightTable):
        def row_blocks(self, symbol: str, block_bytes: int = block_bytes):
            return super().row_blocks(symbol, block_bytes)

    small = Small()
    small._weights, small.readers = module.weights._weights, module.weights.readers
    assert [small.digest(s) for s in symbols] == found
    assert found.pop() == found[symbols.index("int8")]  # the alias
    assert len(set(found)) == len(found)


def test_digest_tells_bytes_shape_and_encoding_apart():
    values = np.arange(8.0)
    weights = {
        "a": dense(values.reshape(2, 4)),
        "b": dense(values.reshape(4, 2)),
        "c": dense(values),
        "d": dense(values.reshape(2, 4), DType.F64),
        "e": dense(np.append(values[:7], 8).reshape(2, 4)),
        "f": inline((2, 16), Dense(DType.U8), {"weight": np.zeros((2, 16), np.uint8)}),
        "g": inline((2, 16), Dense(DType.I8), {"weight": np.zeros((2, 16), np.int8)}),
    }
    digests = [table(**{s: w}).digest(s) for s, w in weights.items()]
    assert len(set(digests)) == len(weights)
    assert table(other=weights["a"]).digest("other") == digests[0]


@pytest.mark.parametrize("component", ["weight", "weight_scale", "weight_scale_2"])
def test_digest_covers_every_component(component):
    made = packed(np.random.default_rng(2), 3, 8)
    parts = {name: array.copy() for name, array in made.parts.items()}
    first = inline(made.shape, made.encoding, parts)
    parts[component].reshape(-1).view(np.uint8)[-1] ^= 1
    second = inline(made.shape, made.encoding, parts)
    assert table(w=first).digest("w") != table(w=second).digest("w")


def test_digest_is_computed_once():
    module = Module("m")
    store(module, "c", "w", dense(np.ones((3, 4))))
    reader = module.weights.readers["c"]
    assert isinstance(reader, MemoryReader)
    first = module.weights.digest("w")
    count = len(reader.reads)
    assert count > 0
    assert module.weights.digest("w") == first
    assert module.weights.copy().digest("w") == first
    assert len(reader.reads) == count


def test_digest_follows_what_a_weight_is_made_from():
    found = table(a=ONE, b=TWO)
    found.derive("c", "concat_rows", ("a", "b"))
    before = found.digest("c")
    found.rebind("a", TWO)
    assert found.digest("c") == table(x=dense(np.full((4, 2), 2.0))).digest("x")
    assert found.digest("c") != before


def test_origin():
    found = table(a=ONE, head=Weight((4, 8), F32, Unbound("lm_head")))
    found.derive("t", "rope_table", (), part="sin", length=4, theta=1e4, dim=4)
    assert found.origin("a") == "inline"
    assert found.origin("head") == "unbound lm_head"
    assert found.origin("t") == "rope_table(dim=4, length=4, part=sin, theta=10000.0)"
    assert str(alias("x").source) == "alias @x"


def test_derive_refuses_unknown_recipes():
    with pytest.raises(InternalError, match="unknown recipe mix") as caught:
        table(a=ONE).derive("b", "mix", ("a",))
    assert caught.value.id == "ir/unknown-recipe"


def test_deriving_the_same_again_is_fine():
    found = table(a=ONE, b=TWO)
    assert found.derive("c", "concat_rows", ("a", "b")) == "c"
    assert found.derive("c", "concat_rows", ("a", "b")) == "c"
    with pytest.raises(InternalError, match="weight @c is defined twice"):
        found.derive("c", "concat_rows", ("b", "a"))


def test_an_equal_derived_weight_is_shared():
    found = table(w=dense(np.ones((2, 4)), DType.BF16), alias=alias("w"))
    assert found.derive("a", "dequantize", ("w",)) == "a"
    assert found.derive_shared("b", "dequantize", ("alias",)) == "a"
    assert "b" not in found
    assert found.derive_shared("c", "narrow", ("w",), dtype="f16") == "c"
    assert found.derive_shared("d", "narrow", ("w",), dtype="bf16") == "d"
    assert found.derive_shared("e", "narrow", ("w",), dtype="f16") == "c"
    with pytest.raises(InternalError):
        found.derive_shared("w", "add_one", ("w",))


def test_weights_without_rows():
    found = table(a=dense(np.zeros((0, 4))), b=dense(np.zeros((2, 0))))
    assert list(found.row_blocks("a")) == []
    assert found.dense("a").shape == (0, 4)
    assert [stop for _, stop, _ in found.row_blocks("b")] == [2]
    assert found.digest("a") != found.digest("b")


def test_inline_weights_of_odd_dtypes():
    values = np.array([[0.5, -6, 448]], ml_dtypes.float8_e4m3fn)
    found = table(a=inline((1, 3), Dense(DType.F8E4M3), {"weight": values}))
    assert found.dense("a").tolist() == [[0.5, -6, 448]]


def test_a_stated_hash_is_checked_and_not_believed():
    """Else weights would be taken for equal that are not, because a text says so."""
    found = table(a=ONE, b=TWO)
    found.state_digest("a", "0" * 64)
    assert found.known_digest("a") == "0" * 64
    with pytest.raises(InputError, match="the IR text says 0000") as caught:
        found.digest("a")
    assert caught.value.id == "ir/hash-mismatch"
    right = table(a=ONE).digest("a")
    found = table(a=ONE)
    found.state_digest("a", right)
    assert found.digest("a") == right
