from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from edgecc.backends.torch.encodings import DECODERS, e2m1
from edgecc.backends.torch.tensors import to_array
from edgecc.backends.torch.weights import WeightStore
from edgecc.errors import LegalizeError, RequestError, UnsupportedError
from edgecc.ir import NVFP4, Dense, DType, Encoding, Int8Block, Module, Unbound, Weight, WeightTable
from helpers.oracle import on_devices
from helpers.weights import (
    E2M1,
    SMALL_ENCODINGS,
    MemoryReader,
    Packed,
    dense,
    inline,
    packed,
    sample,
    store,
)


def concrete(cls: type[Encoding]) -> set[type[Encoding]]:
    below = set().union(*map(concrete, cls.__subclasses__())) if cls.__subclasses__() else set()
    return below | ({cls} if hasattr(cls, "kind") else set())


def test_every_encoding_has_a_decoder():
    assert set(DECODERS) == {cls.kind for cls in concrete(Encoding)}


def stored(table: WeightTable, dtype=torch.float64, device="cpu", keep_bytes=0) -> WeightStore:
    return WeightStore(table, dtype, torch.device(device), keep_bytes)


def table(**weights: Weight) -> WeightTable:
    made = WeightTable()
    for symbol, weight in weights.items():
        made.add(symbol, weight)
    return made


def test_all_sixteen_codes():
    found = e2m1(torch.arange(16, dtype=torch.uint8))
    assert found.tolist() == [*E2M1, *(-v for v in E2M1)]
    assert not torch.signbit(found[8])  # minus zero reads as plus zero


def all_scales(rng: np.random.Generator) -> Packed:
    """Every finite E4M3 scale, subnormals and negative ones too, with every code."""
    scales = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    scales = scales[np.isfinite(scales.astype(np.float32))].reshape(-1, 1)
    codes = rng.permuted(np.tile(np.arange(16, dtype=np.uint8), (len(scales), 1)), axis=1)
    return Packed(codes, scales, np.float32(0.0117), 16)


@on_devices
def test_nvfp4_gives_the_exact_values(device):
    weight = all_scales(np.random.default_rng(1))
    found = stored(table(w=weight.weight), device=device)["w"].dense()
    np.testing.assert_array_equal(to_array(found), weight.values)


@on_devices
@pytest.mark.parametrize("encoding", SMALL_ENCODINGS, ids=str)
def test_every_encoding_gives_the_values_of_the_formula(encoding, device):
    weight = sample(np.random.default_rng(4), encoding, 10, 24)
    found = stored(table(w=weight.weight), device=device)["w"]
    np.testing.assert_array_equal(to_array(found.dense()), weight.values)
    ids = torch.arange(10, device=device)  # also rows that are stored together with others
    np.testing.assert_array_equal(to_array(found.rows(ids)), weight.values)


@on_devices
@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F8E4M3, DType.F8E5M2])
def test_narrow_floats_widen_exactly(dtype, device):
    values = np.random.default_rng(2).standard_normal((5, 7)).astype(dtype.numpy)
    found = stored(table(w=dense(values, dtype)), device=device)["w"].dense()
    np.testing.assert_array_equal(to_array(found), values.astype(np.float64))


@on_devices
def test_int8_codes_carry_the_values_of_nvfp4(device):
    weights = table(w=all_scales(np.random.default_rng(3)).weight)
    weights.derive("codes", "int8_codes", ("w",))
    assert isinstance(weights["codes"].encoding, Int8Block)
    store_ = stored(weights, device=device)
    assert torch.equal(store_["codes"].dense(), store_["w"].dense())


def test_float64_and_integers_stay():
    fine, ids = np.array([1 / 3, 2 / 3]), np.array([[1, 1 << 40]])
    store_ = stored(table(fine=dense(fine, DType.F64), ids=dense(ids), one=dense(np.array(1 / 4))))
    assert to_array(store_["fine"].dense()).tolist() == fine.tolist()
    assert to_array(store_["ids"].dense()).tolist() == ids.tolist()
    assert store_["ids"].dense().dtype == torch.int64
    assert store_["one"].dense().shape == ()
    assert store_["one"].dense().item() == 0.25


def test_dequantized_weights_are_decoded_here(monkeypatch):
    """Packed bytes are read through the table, NumPy's dequantization is not."""
    made = packed(np.random.default_rng(4), 6, 8)
    weights = table(a=made.weight)
    weights.derive("stack", "concat_rows", ("a", "a"))
    weights.derive("wide", "dequantize", ("stack",))
    weights.add("name", Weight((12, 8), Dense(DType.F32), weights["wide"].source))
    weights.alias("name", "wide")

    def refuse(self, parts):
        raise AssertionError("dequantized by NumPy")

    monkeypatch.setattr(NVFP4, "dequantize", refuse)
    store_ = stored(weights)
    expected = np.concatenate([made.values] * 2)
    for symbol in ("stack", "wide", "name"):
        np.testing.assert_array_equal(to_array(store_[symbol].dense()), expected)
        rows = store_[symbol].rows(torch.tensor([[7, 0]]))
        np.testing.assert_array_equal(to_array(rows), expected[[[7, 0]]])


@on_devices
@pytest.mark.parametrize("keep_bytes", [0, 1 << 20])
def test_blocks_and_rows_are_those_of_the_whole(monkeypatch, keep_bytes, device):
    made = packed(np.random.default_rng(5), 10, 8)
    blocks = WeightTable.row_blocks
    monkeypatch.setattr(WeightTable, "row_blocks", lambda self, s: blocks(self, s, 3 * 8 * 4))
    weight = stored(table(w=made.weight), device=device, keep_bytes=keep_bytes)["w"]
    found = list(weight.blocks())
    assert [(a, b) for a, b, _ in found] == (
        [(0, 10)] if keep_bytes else [(0, 3), (3, 6), (6, 9), (9, 10)]
    )
    np.testing.assert_array_equal(to_array(torch.cat([v for *_, v in found])), made.values)
    for ids in ([[3, 9], [3, 0]], [[], []]):
        index = torch.tensor(ids, dtype=torch.int64, device=device)
        expected = made.values[np.array(ids, dtype=np.int64)]
        np.testing.assert_array_equal(to_array(weight.rows(index)), expected)


@pytest.mark.parametrize("keep_bytes", [0, 1 << 10])
def test_entries_of_a_vector(keep_bytes):
    weights = table(v=dense(np.array([5, 6, 7])))
    found = stored(weights, keep_bytes=keep_bytes)["v"].rows(torch.tensor([[2, 0], [2, 1]]))
    assert found.tolist() == [[7, 5], [7, 6]]


def test_only_the_rows_that_occur_are_read():
    module = Module("m")
    store(module, "c", "w", packed(np.random.default_rng(6), 64, 8).weight)
    reader = module.weights.readers["c"]
    assert isinstance(reader, MemoryReader)
    stored(module.weights)["w"].rows(torch.tensor([5, 9, 5]))
    assert len(reader.reads) == 2 * 3  # two different rows, three components


def test_weights_are_kept_within_the_budget():
    module = Module("m")
    reader = MemoryReader()
    module.weights.readers["c"] = reader
    for name in "abc":
        store(module, "c", name, dense(np.full((4, 2), float(ord(name)))))
    store_ = stored(module.weights, torch.float32, keep_bytes=2 * 32)
    for _ in range(3):
        for name in "abc":
            assert store_[name].dense()[3, 1] == ord(name)
    assert store_.kept_bytes == 2 * 32
    assert [reader.reads.count(f"{n}.weight") for n in "abc"] == [1, 1, 3]


def test_integers_count_as_what_they_are():
    weights = table(ids=dense(np.ones((4, 2), np.int64)))
    assert stored(weights, torch.float32, keep_bytes=63)["ids"].dense().sum() == 8
    store_ = stored(weights, torch.float32, keep_bytes=64)
    assert store_["ids"].dense().sum() == 8
    assert store_.kept_bytes == 64


def test_kept_weights_follow_changes_of_the_table():
    weights = table(a=dense(np.zeros((2, 2))), b=dense(np.ones((2, 2))))
    weights.derive("sum", "concat_rows", ("a", "b"))
    store_ = stored(weights, keep_bytes=1 << 10)
    assert store_["sum"].dense().sum() == 4
    weights.rebind("a", dense(np.full((2, 2), 5.0)))
    assert store_["sum"].dense().sum() == 24
    weights.alias("b", "a")
    assert store_["sum"].dense().sum() == 40
    assert store_.kept_bytes == 4 * 2 * 8


def test_weights_without_rows():
    store_ = stored(table(w=dense(np.zeros((0, 3))), none=dense(np.zeros((0, 0)))))
    assert store_["w"].dense().shape == (0, 3)
    assert store_["none"].dense().shape == (0, 0)
    assert store_["w"].rows(torch.zeros((2, 0), dtype=torch.int64)).shape == (2, 0, 3)


def test_rows_that_are_not_there():
    store_ = stored(table(w=dense(np.zeros((3, 2)))))
    for bad in (-1, 3):
        with pytest.raises(RequestError, match=rf"table @w: index {bad} is outside 0\.\.2"):
            store_["w"].rows(torch.tensor([0, bad]))


def test_unbound_weights_raise_when_they_are_read():
    unbound = Weight((2, 2), Dense(DType.BF16), Unbound("lm_head"))
    view = stored(table(head=unbound))["head"]
    with pytest.raises(LegalizeError, match="weight @head has no bytes"):
        view.dense()


def test_encodings_nobody_knows(monkeypatch):
    monkeypatch.setattr(Int8Block, "kind", "int7_block")
    parts = {"weight": np.zeros((1, 4), np.uint8), "weight_scale": np.zeros((1, 1), np.float32)}
    store_ = stored(table(w=inline((1, 4), Int8Block(4), parts)))
    with pytest.raises(UnsupportedError, match=r"cannot decode int\d_block<block=4>") as caught:
        store_["w"].dense()
    assert caught.value.id == "torch/encoding"
    assert caught.value.diagnostics[0].notes == (f"it decodes {', '.join(sorted(DECODERS))}",)
