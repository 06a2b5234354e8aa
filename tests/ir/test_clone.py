"""Copies are equal and independent; copies with smaller caches compute the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import InternalError
from edgecc.ir import Builder, DType, Module, Rewriter, Role, SymbolRange, evaluate, sym, verify
from edgecc.ir.clone import cache_rows, clone_module, with_smaller_caches
from edgecc.ir.compare import equal
from edgecc.ir.ops.shape import SliceAttributes
from edgecc.ir.printer import print_module
from edgecc.ir.random_inputs import random_inputs
from helpers.modules import modules
from helpers.ops import assert_same_bits
from helpers.pairs import FEWER, PairOptions, pair, pair_options


@given(modules(dead=True))
def test_a_copy_is_equal_and_shares_no_node(module: Module) -> None:
    made = clone_module(module)
    assert print_module(made, locations=True) == print_module(module, locations=True)
    assert verify(made) == []
    for name, graph in module.graphs.items():
        assert not set(graph.nodes) & set(made.graphs[name].nodes)
        assert not {i.value for i in graph.inputs} & {i.value for i in made.graphs[name].inputs}


def test_changing_a_copy_leaves_the_original_alone() -> None:
    module = pair()
    module.metadata["draft"] = {"block_size": 3}
    text = print_module(module, locations=True)
    made = clone_module(module)
    made.metadata["draft"]["block_size"] = 4  # type: ignore[index, call-overload]
    made.decisions.append("x")
    made.symbols["z"] = SymbolRange(1, 1)
    made.weights.remove("draft.lm_head.weight")
    made.graphs["target"].outputs.pop()
    graph = made.graphs["draft"]
    graph.outputs.clear()
    rewriter = Rewriter(made, graph, "test")
    for node in reversed(list(graph.nodes)):
        rewriter.erase(node)
    assert print_module(module, locations=True) == text
    assert verify(module) == []


def test_what_is_learned_about_bytes_holds_for_copies() -> None:
    module = pair(PairOptions(stored=True))
    made = clone_module(module)
    digest = module.weights.digest("target.lm_head.weight")
    assert made.weights.known_digest("target.lm_head.weight") == digest


@FEWER
@given(pair_options(), st.integers(0, 9))
def test_smaller_caches_change_no_value(options: PairOptions, seed: int) -> None:
    module = pair(options, draft=False)
    made = with_smaller_caches(module, 3)
    assert verify(made) == []
    assert set(cache_rows(made)) == {7}
    sizes = {"b": 1, "t": 2, "r": 2}
    small = random_inputs(made, seed, sizes)
    large = random_inputs(module, seed, sizes)
    for name, array in large["target"].items():
        if "cache." in name:
            array[:, :, :7] = small["target"][name]
        else:
            array[:] = small["target"][name]
    found, expected = evaluate(made, small), evaluate(module, large)
    for name, array in expected.items():
        assert_same_bits([found[name]], [array[:, :, :7] if "cache." in name else array])


def test_smaller_caches_of_a_pair_with_calls_and_derived_weights() -> None:
    module = pair(PairOptions(draft_head="own", draft_embedding="own"))
    module.weights.derive("wide", "dequantize", ("target.rope.cos",))
    module.weights.derive("wider", "dequantize", ("wide",))
    made = with_smaller_caches(module, 4)
    assert made.weights["wider"].shape == (6, 2)
    assert verify(made) == []
    assert equal(with_smaller_caches(module, 0), module)


def test_a_node_that_names_the_capacity_stops_it() -> None:
    module = Module("m", symbols={"b": SymbolRange(1, 1)})
    b = Builder(module, "g")
    cache = b.input("k_cache.0", DType.F32, (sym("b"), 1, 8, 4), Role.KV_CACHE)
    b.output(b.op("slice", cache, attrs=SliceAttributes(2, 0, 8)), "y", Role.ACTIVATION)
    with pytest.raises(InternalError, match=r"range 0\.\.8 is outside"):
        with_smaller_caches(module, 2)
