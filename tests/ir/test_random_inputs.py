"""Random inputs evaluate: on random modules, decoder pairs, and the lifted test pair."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import edgecc
from edgecc.errors import InputError
from edgecc.ir import (
    Builder,
    DType,
    Module,
    Role,
    SymbolRange,
    evaluate,
    sym,
)
from edgecc.ir.random_inputs import random_inputs, random_sizes
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.manager import PassManager
from helpers.modules import modules
from helpers.pairs import FEWER, PairOptions, pair, pair_options

DATA = Path(__file__).parents[1] / "data" / "pairs"


@given(modules(), st.integers(0, 99))
def test_random_modules_evaluate(module: Module, seed: int) -> None:
    inputs = random_inputs(module, seed)
    assert list(inputs) == [g.name for g in module.entries()]
    evaluate(module, inputs)


@FEWER
@given(pair_options(), st.integers(0, 99))
def test_pairs_evaluate(options: PairOptions, seed: int) -> None:
    module = pair(options)
    BindSharedWeights().run(module, PassContext())
    evaluate(module, random_inputs(module, seed))


@pytest.mark.parametrize("seed", range(4))
def test_the_lifted_pair_evaluates(seed: int) -> None:
    module = edgecc.lift(DATA / "tiny-qwen3-nvfp4", DATA / "tiny-qwen3-dspark", max_model_len=64)
    PassManager(["bind-shared-weights"]).run(module)
    inputs = random_inputs(module, seed)
    assert inputs["target"]["cache_length"].max() + inputs["target"]["token_ids"].shape[1] <= 65
    outputs = evaluate(module, inputs)
    assert {"target.logits", "draft.proposals", "draft.k_cache.1"} <= set(outputs)
    assert all(np.isfinite(a).all() for a in outputs.values())


def test_one_seed_gives_one_set_of_arrays() -> None:
    module = pair(PairOptions(draft_head="own", draft_embedding="own"))
    first, again, other = (random_inputs(module, seed) for seed in (3, 3, 4))
    for graph, arrays in first.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, again[graph][name])
    assert any(
        array.shape != other[graph][name].shape or (array != other[graph][name]).any()
        for graph, arrays in first.items()
        for name, array in arrays.items()
    )


def test_arrays_do_not_depend_on_other_graphs_and_inputs() -> None:
    sizes = {"b": 1, "t": 2, "r": 2, "c": 2}
    whole = random_inputs(pair(), 5, sizes)
    alone = random_inputs(pair(target=False), 5, sizes)
    assert list(alone) == ["draft"]
    for name, array in alone["draft"].items():
        np.testing.assert_array_equal(array, whole["draft"][name])


def test_sizes_override_the_drawn_ones() -> None:
    inputs = random_inputs(pair(), 0, {"b": 2, "t": 7})
    assert inputs["target"]["token_ids"].shape == (2, 7)


def test_sizes_are_small_and_in_range() -> None:
    module = Module(
        "m",
        symbols={"a": SymbolRange(0, 99), "b": SymbolRange(50, 60), "c": SymbolRange(1, 2)},
    )
    b = Builder(module, "g")
    b.output(b.input("x", DType.F32, (sym("free"),), Role.ACTIVATION), "y", Role.ACTIVATION)
    seen: dict[str, set[int]] = {s: set() for s in ("a", "b", "c", "free")}
    rng = np.random.default_rng(0)
    for _ in range(100):
        for symbol, size in random_sizes(module, rng).items():
            seen[symbol].add(size)
    assert seen == {"a": {0, 1, 2, 3, 4}, "b": {50}, "c": {1, 2}, "free": {1, 2, 3, 4}}


def test_smaller_sizes_are_tried_where_large_ones_do_not_fit() -> None:
    """A cache of two rows: most drawn numbers of rows do not fit."""
    module = pair(PairOptions(capacity=2, rope=False), draft=False)
    for seed in range(20):
        evaluate(module, random_inputs(module, seed))


def test_no_valid_input_is_an_error() -> None:
    module = pair(PairOptions(capacity=2, rope=False), draft=False)
    with pytest.raises(InputError, match="cache_length of graph @target is valid"):
        random_inputs(module, 0, {"t": 5})


@pytest.mark.parametrize("dtype", [DType.BOOL, DType.U8, DType.I4, DType.I32, DType.U64])
def test_integers_nobody_indexes_with_fit_their_type(dtype: DType) -> None:
    module = Module("m")
    b = Builder(module, "g")
    b.output(b.input("x", dtype, (64,), Role.ACTIVATION), "y", Role.ACTIVATION)
    array = random_inputs(module)["g"]["x"]
    assert array.dtype == dtype.numpy
    assert len(np.unique(array.astype(np.int64))) > 1


def test_inputs_that_fit_nowhere_are_told():
    module = Module("m", symbols={"t": SymbolRange(10**20, 10**24)})
    b = Builder(module, "main")
    b.output(b.input("x", DType.F32, (sym("t"), 4), Role.ACTIVATION), "y", Role.ACTIVATION)
    with pytest.raises(InputError, match="input %x of graph @main has 4"):
        random_inputs(module)
