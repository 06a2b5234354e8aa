"""Any legal order of the passes keeps values and sharing (folding and fusing must not undo it)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Inline, Module, Stored, verify
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.canonicalize import Canonicalize
from edgecc.passes.cse import Cse
from edgecc.passes.dce import Dce
from edgecc.passes.dedupe_weights import DedupeWeights, DedupeWeightsOptions
from edgecc.passes.drop_outputs import DropOutputs
from edgecc.passes.fold_constants import FoldConstants
from edgecc.passes.fuse_cached_attention import FuseCachedAttention
from edgecc.passes.fuse_gate_up import FuseGateUp
from edgecc.passes.fuse_qkv import FuseQkv
from edgecc.passes.fuse_residual_norm import FuseResidualNorm
from edgecc.passes.fuse_rope import FuseRope
from edgecc.passes.lower_encodings import LowerEncodings, LowerEncodingsOptions
from edgecc.passes.outline_shared import OutlineShared
from edgecc.passes.stack_context_kv import StackContextKv, StackContextKvOptions
from edgecc.passes.unroll_markov import UnrollMarkov
from helpers.modules import evaluate, interface
from helpers.ops import assert_same_bits
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options

PASSES: dict[str, Pass[Any]] = {
    made.name: made
    for made in (
        BindSharedWeights(),
        DedupeWeights(DedupeWeightsOptions(0)),
        Canonicalize(),
        FoldConstants(),
        Cse(),
        Dce(),
        FuseQkv(),
        FuseGateUp(),
        FuseResidualNorm(),
        FuseRope(),
        StackContextKv(StackContextKvOptions(duplicate=True)),
        FuseCachedAttention(),
        UnrollMarkov(),
        LowerEncodings(LowerEncodingsOptions("int8-split")),
        OutlineShared(),
    )
}
NEED_HEADS = {name for name, made in PASSES.items() if "heads-bound" in made.requires}


def legal(order: Sequence[str]) -> list[str]:
    """The same order with what needs heads moved behind what binds them."""
    bind = order.index("bind-shared-weights")
    early = [p for p in order[:bind] if p in NEED_HEADS]
    return [*(p for p in order[: bind + 1] if p not in NEED_HEADS), *early, *order[bind + 1 :]]


ORDERS = st.permutations(list(PASSES)).map(legal)


def run(module: Module, order: Sequence[str]) -> None:
    for name in order:
        PASSES[name].run(module, PassContext())
        assert verify(module) == [], name


def tables(module: Module, options: PairOptions) -> set[str]:
    """Weights `[vocabulary, hidden]` with bytes of their own that some node depends on."""
    table = module.weights
    read = {
        d for g in module.graphs.values() for w in g.used_weights() for d in table.dependencies(w)
    }
    shape = (options.vocab, options.hidden)
    return {
        s for s in read if table[s].shape == shape and isinstance(table[s].source, Stored | Inline)
    }


def heads(module: Module, options: PairOptions) -> set[str]:
    """What linear layers of that shape multiply by, aliases followed."""
    table = module.weights
    shape = (options.vocab, options.hidden)
    return {
        table.resolve(n.weights[0])
        for g in module.graphs.values()
        for n in g.nodes
        if n.op.name == "linear" and table[n.weights[0]].shape == shape
    }


def check(options: PairOptions, order: Sequence[str], seed: int) -> None:
    options = replace(options, stored=True)
    module, reference = pair(options), pair(options)
    PASSES["bind-shared-weights"].run(reference, PassContext())
    inputs = pair_inputs(module, options, seed)
    interfaces = {name: interface(g) for name, g in module.graphs.items()}
    run(module, order)

    before, after = evaluate(reference, inputs), evaluate(module, inputs)
    assert list(after) == list(before)
    assert_same_bits(list(after.values()), list(before.values()))
    assert {g.name: interface(g) for g in module.entries()} == interfaces

    own_head, own_table = options.draft_head == "own", options.draft_embedding == "own"
    assert len(heads(module, options)) == 1 + own_head
    assert len(tables(module, options)) == 1 + (options.head != "tied") + own_head + own_table


@FEWER
@given(pair_options(), ORDERS, st.integers(0, 9))
def test_any_order(options, order, seed):
    check(options, order, seed)


@pytest.mark.parametrize("source", ["unbound", "same"])
@pytest.mark.parametrize("first", sorted(NEED_HEADS))
def test_sharing_found_late_still_counts(source, first):
    """Lowered or outlined before anybody looked for equal bytes."""
    rest = [p for p in PASSES if p not in (first, "bind-shared-weights")]
    options = PairOptions(draft_head=source, draft_embedding=source)
    check(options, ["bind-shared-weights", first, *rest], 0)


@FEWER
@given(pair_options(), ORDERS, st.integers(0, 9))
def test_a_second_round_changes_no_values(options, order, seed):
    check(options, [*order, *order], seed)


def test_outputs_that_are_dropped_take_nothing_else_along():
    options = PairOptions(draft_head="same", draft_embedding="same", stored=True)
    module = pair(options)
    inputs = pair_inputs(module, options)
    before = evaluate(module, inputs)
    DropOutputs().run(module, PassContext())
    run(module, [*PASSES, "dce"])
    after = evaluate(module, inputs)
    assert set(before) - set(after) == {"draft.base_logits", "draft.draft_logits"}
    assert_same_bits(list(after.values()), [before[name] for name in after])
    assert len(heads(module, options)) == 1
