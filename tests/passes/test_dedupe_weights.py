from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from edgecc.ir import Alias, Dense, DType, Module, Stored, Weight, verify
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.dedupe_weights import DedupeWeights, DedupeWeightsOptions
from helpers.modules import check_pass, module_text, storage
from helpers.pairs import (
    DRAFT_EMBEDDING,
    DRAFT_HEAD,
    FEWER,
    TARGET_EMBEDDING,
    TARGET_HEAD,
    PairOptions,
    pair,
    pair_inputs,
    pair_options,
)
from helpers.weights import MemoryReader, Packed, dense, inline, packed, store

ALL = DedupeWeightsOptions(min_bytes=0)
BIG = np.arange(128.0 * 128).reshape(128, 128)
"""64 KiB in float32: just what the default considers."""


def module_with(**weights: tuple[str, Weight]) -> Module:
    """Stored weights by symbol, each with its checkpoint."""
    module = Module("m")
    for symbol, (checkpoint, weight) in weights.items():
        store(module, checkpoint, symbol, weight)
    return module


def run(module: Module, options: DedupeWeightsOptions = ALL) -> bool:
    text = module_text(module)
    changed = DedupeWeights(options).run(module, PassContext())
    assert verify(module) == []
    assert changed is (module_text(module) != text)
    return changed


def aliases(module: Module) -> dict[str, str]:
    found = {s: w.source for s, w in module.weights.items()}
    return {s: source.symbol for s, source in found.items() if isinstance(source, Alias)}


def test_equal_bytes_of_two_checkpoints_become_one():
    module = module_with(a=("target", dense(BIG)), b=("draft", dense(BIG)))
    ctx = PassContext()
    assert DedupeWeights().run(module, ctx)
    assert aliases(module) == {"b": "a"}
    assert module.decisions == ["b -> a (equal bytes, 65536 bytes saved)"]
    assert [str(r) for r in ctx.remarks] == ["dedupe-weights: applied at @b: equals @a"]
    assert verify(module) == []
    assert not run(module, DedupeWeightsOptions())


def test_the_first_in_the_table_stays():
    module = module_with(z=("draft", dense(BIG)), a=("target", dense(BIG)), m=("third", dense(BIG)))
    assert run(module)
    assert aliases(module) == {"a": "z", "m": "z"}


def test_several_groups():
    other, rng = BIG + 1, np.random.default_rng(0)
    module = module_with(
        a=("target", dense(BIG)),
        b=("target", dense(other)),
        c=("draft", dense(other)),
        d=("draft", dense(BIG)),
        e=("target", packed(rng, 8, 8).weight),
        f=("draft", packed(rng, 8, 8).weight),
    )
    assert run(module)
    assert aliases(module) == {"c": "b", "d": "a"}


def flipped(values: np.ndarray, index: tuple[int, int]) -> Weight:
    changed = values.astype(np.float32)
    changed.view(np.uint32)[index] ^= 1
    return dense(changed)


ROWS = np.ones((4, 4), np.float32)
MADE = packed(np.random.default_rng(1), 4, 8)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(dense(ROWS), flipped(ROWS, (0, 0)), id="first element"),
        pytest.param(dense(ROWS), flipped(ROWS, (3, 3)), id="last element"),
        pytest.param(dense(ROWS), dense(ROWS[:3]), id="rows"),
        pytest.param(dense(ROWS), dense(ROWS.reshape(2, 8)), id="shape"),
        pytest.param(dense(np.zeros((4, 4))), dense(-np.zeros((4, 4))), id="sign of zero"),
        pytest.param(dense(ROWS.view(np.int32)), dense(ROWS), id="same bytes of another dtype"),
        pytest.param(
            MADE.weight, replace(MADE, global_scale=np.float32(0.5)).weight, id="global scale"
        ),
        pytest.param(
            MADE.weight,
            inline(
                MADE.shape,
                replace(MADE.encoding, input_scale=True),
                {**MADE.parts, "input_scale": np.array(1, np.float32)},
            ),
            id="input scale",
        ),
        pytest.param(dense(ROWS, DType.BF16), dense(ROWS), id="same values of another encoding"),
    ],
)
def test_near_misses(first, second):
    module = module_with(a=("target", first), b=("draft", second))
    assert not run(module)
    assert aliases(module) == {}
    assert module.decisions == []


def test_one_scale_of_one_block_differs():
    scale = MADE.scale.copy()
    scale[-1, -1] = np.nextafter(scale[-1, -1], ml_dtypes.float8_e4m3fn(448))
    other = Packed(MADE.codes, scale, MADE.global_scale, MADE.block)
    module = module_with(a=("target", MADE.weight), b=("draft", other.weight))
    assert not run(module)


def test_a_checkpoint_is_not_compared_with_itself():
    module = module_with(a=("target", dense(BIG)), b=("target", dense(BIG)))
    assert not run(module)
    for reader in module.weights.readers.values():
        assert isinstance(reader, MemoryReader)
        assert reader.reads == []


def test_small_weights_are_left_alone():
    small = dense(BIG[:127])
    module = module_with(a=("target", small), b=("draft", small))
    assert not run(module, DedupeWeightsOptions())
    assert run(module, DedupeWeightsOptions(127 * 128 * 4))


def test_weights_of_the_module_itself_are_left_alone():
    module = module_with(a=("target", dense(BIG)))
    module.weights.add("b", dense(BIG))
    assert not run(module)


def test_differing_weights_are_told_apart_by_one_row():
    module = module_with(a=("target", dense(BIG)), b=("draft", dense(BIG + 1)))
    read = []
    original = MemoryReader.read

    class Rows(MemoryReader):
        def read(self, key, start=None, stop=None):
            read.append((key, start, stop))
            return original(self, key, start, stop)

    for name, reader in module.weights.readers.items():
        assert isinstance(reader, MemoryReader)
        module.weights.readers[name] = Rows(reader.tensors)
    assert not run(module)
    assert read == [("a.weight", 0, 1), ("b.weight", 0, 1)]


def test_aliases_of_a_merged_weight_lead_on():
    module = module_with(
        a=("target", dense(BIG)), b=("draft", dense(BIG)), c=("draft", dense(BIG + 1))
    )
    module.weights.alias("c", "b")
    assert run(module)
    assert [module.weights.resolve(s) for s in "abc"] == ["a", "a", "a"]


def test_weights_derived_from_equal_weights_become_one():
    module = module_with(a=("target", dense(BIG)), b=("draft", dense(BIG)))
    for symbol in "ab":
        module.weights.derive(f"{symbol}.f32", "dequantize", (symbol,))
        module.weights.derive(f"{symbol}{symbol}", "concat_rows", (f"{symbol}.f32", symbol))
    assert run(module)
    assert aliases(module) == {"b": "a", "b.f32": "a.f32", "bb": "aa"}
    assert module.decisions[1] == "b.f32 -> a.f32 (both dequantize, 65536 bytes saved)"


def test_derived_weights_that_differ_stay():
    module = module_with(a=("target", dense(BIG)), b=("draft", dense(BIG + 1)))
    for symbol, recipe, inputs in (
        ("ab", "concat_rows", ("a", "b")),
        ("ba", "concat_rows", ("b", "a")),
        ("a1", "dequantize", ("a",)),
        ("b1", "dequantize", ("b",)),
    ):
        module.weights.derive(symbol, recipe, inputs)
    for symbol, part in (("t.cos", "cos"), ("d.cos", "cos"), ("t.sin", "sin")):
        module.weights.derive(symbol, "rope_table", (), part=part, length=99, theta=9.0, dim=4)
    assert not run(module)


def test_a_draft_that_ships_the_targets_tensors_shares_them():
    options = PairOptions(draft_head="same", draft_embedding="same", stored=True)
    module = pair(options)
    before = storage(module)
    assert check_pass(DedupeWeights(ALL), module, pair_inputs(module, options))
    assert storage(module) == before - {DRAFT_HEAD, DRAFT_EMBEDDING}
    assert module.weights.resolve(DRAFT_HEAD) == TARGET_HEAD
    assert module.weights.resolve(DRAFT_EMBEDDING) == TARGET_EMBEDDING


def test_a_draft_with_other_tensors_keeps_them():
    options = PairOptions(draft_head="own", draft_embedding="own", stored=True)
    module = pair(options)
    before = storage(module)
    check_pass(DedupeWeights(ALL), module, pair_inputs(module, options))
    assert storage(module) == before


@FEWER
@given(pair_options())
def test_random_pairs(options):
    options = replace(options, stored=True)
    module = pair(options)
    BindSharedWeights().run(module, PassContext())
    check_pass(DedupeWeights(ALL), module, pair_inputs(module, options))
    digests: dict[str, set[str]] = {"target": set(), "draft": set()}
    for symbol, weight in module.weights.items():
        if isinstance(weight.source, Stored):
            digests[weight.source.checkpoint].add(module.weights.digest(symbol))
    assert digests["target"].isdisjoint(digests["draft"])


def test_encodings_are_taken_over():
    module = module_with(a=("target", MADE.weight), b=("draft", MADE.weight))
    assert run(module)
    assert module.weights["b"] == Weight((4, 8), MADE.encoding, Alias("a"))
    assert module.weights["b"].encoding != Dense(DType.F32)
