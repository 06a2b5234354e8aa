from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from edgecc.errors import Diagnostic, InputError
from edgecc.ir import (
    NVFP4,
    Alias,
    Dense,
    DType,
    Module,
    Role,
    Unbound,
    Weight,
    verify,
)
from edgecc.ir.verifier import check_property
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import (
    BindSharedWeights,
    BindSharedWeightsOptions,
    embedding_of,
    head_of,
)
from helpers.modules import evaluate, module_text, storage
from helpers.ops import assert_same_bits
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
from helpers.weights import ForbiddenReader, dense


def bind(module: Module, *, copy: bool = False) -> tuple[bool, PassContext]:
    ctx = PassContext()
    changed = BindSharedWeights(BindSharedWeightsOptions(copy)).run(module, ctx)
    assert verify(module) == []
    return changed, ctx


def refused(module: Module) -> Diagnostic:
    text = module_text(module)
    with pytest.raises(InputError) as caught:
        BindSharedWeights().run(module, PassContext())
    assert caught.value.exit_code == 3
    assert module_text(module) == text
    return caught.value.diagnostics[0]


def test_binds_to_what_the_target_uses_in_its_precision():
    module = pair(PairOptions(head="nvfp4", embedding="bf16", stored=True))
    module.weights.readers = {"target": ForbiddenReader(), "draft": ForbiddenReader()}
    changed, ctx = bind(module)
    assert changed
    table = module.weights
    assert table[DRAFT_HEAD] == Weight((13, 8), NVFP4(4), Alias(TARGET_HEAD))
    assert table[DRAFT_EMBEDDING] == Weight((13, 8), Dense(DType.BF16), Alias(TARGET_EMBEDDING))
    assert check_property(module, "heads-bound") == []
    assert module.decisions == [
        f"{DRAFT_EMBEDDING} -> {TARGET_EMBEDDING} "
        "(embed_tokens, dense<bf16>, shared, 0 bytes copied)",
        f"{DRAFT_HEAD} -> {TARGET_HEAD} (lm_head, nvfp4<block=4>, shared, 0 bytes copied)",
    ]
    assert [str(r) for r in ctx.remarks] == [
        f"bind-shared-weights: applied at @{DRAFT_EMBEDDING}: bound to @{TARGET_EMBEDDING}",
        f"bind-shared-weights: applied at @{DRAFT_HEAD}: bound to @{TARGET_HEAD}",
    ]


def test_both_graphs_read_one_buffer():
    module = pair()
    before = storage(module) - {DRAFT_HEAD, DRAFT_EMBEDDING}
    bind(module)
    assert storage(module) == before
    users = module.weight_users()
    assert users[TARGET_HEAD] == users[TARGET_EMBEDDING] == ["target", "draft"]


def test_a_second_run_changes_nothing():
    module = pair()
    bind(module)
    text = module_text(module)
    changed, ctx = bind(module)
    assert (changed, ctx.remarks) == (False, [])
    assert module_text(module) == text


def test_the_target_is_not_touched():
    module = pair()
    inputs = {"target": pair_inputs(module)["target"]}
    before = evaluate(module, inputs)
    bind(module)
    assert_same_bits(list(evaluate(module, inputs).values()), list(before.values()))


@pytest.mark.parametrize("embedding", ["f32", "bf16", "nvfp4"])
def test_a_tied_head_is_the_embedding(embedding):
    module = pair(PairOptions(head="tied", embedding=embedding))
    bind(module)
    assert module.weights.resolve(DRAFT_HEAD) == TARGET_EMBEDDING
    assert module.weights.resolve(DRAFT_EMBEDDING) == TARGET_EMBEDDING
    assert module.weights[DRAFT_HEAD].encoding == module.weights[TARGET_EMBEDDING].encoding


def test_a_head_that_is_an_alias_is_followed_to_its_end():
    module = pair()
    module.weights.alias(TARGET_HEAD, TARGET_EMBEDDING)
    bind(module)
    assert module.weights[DRAFT_HEAD].source == Alias(TARGET_EMBEDDING)


def test_the_order_of_the_graphs_does_not_matter():
    module = pair()
    module.graphs = dict(reversed(module.graphs.items()))
    bind(module)
    assert module.weights.resolve(DRAFT_HEAD) == TARGET_HEAD


def test_a_draft_with_its_own_tensors_is_unchanged():
    for source in ("own", "same"):
        module = pair(PairOptions(draft_head=source, draft_embedding=source))
        text = module_text(module)
        changed, ctx = bind(module)
        assert (changed, ctx.remarks) == (False, [])
        assert module_text(module) == text


@pytest.mark.parametrize(
    ("own", "kept"), [("draft_head", DRAFT_HEAD), ("draft_embedding", DRAFT_EMBEDDING)]
)
def test_only_what_is_missing_is_bound(own, kept):
    module = pair(PairOptions(**{own: "own"}))
    before = module.weights[kept]
    changed, ctx = bind(module)
    assert changed
    assert module.weights[kept] == before
    assert len(ctx.remarks) == len(module.decisions) == 1


def test_copies_are_tensors_of_their_own():
    module, shared = pair(), pair()
    changed, _ = bind(module, copy=True)
    bind(shared)
    assert changed
    assert storage(module) == storage(shared) | {f"{DRAFT_HEAD}.copy", f"{DRAFT_EMBEDDING}.copy"}
    assert module.weights.resolve(DRAFT_HEAD) == f"{DRAFT_HEAD}.copy"
    assert module.weights[DRAFT_HEAD].encoding == module.weights[TARGET_HEAD].encoding
    assert module.weights.digest(DRAFT_HEAD) == module.weights.digest(TARGET_HEAD)
    assert module.decisions[1].endswith("(lm_head, nvfp4<block=4>, copied)")
    inputs = pair_inputs(module)
    assert_same_bits(
        list(evaluate(module, inputs).values()), list(evaluate(shared, inputs).values())
    )
    assert not bind(module, copy=True)[0]


def test_spelling():
    assert str(BindSharedWeights()) == "bind-shared-weights"
    assert str(BindSharedWeights(BindSharedWeightsOptions(copy=True))).lower() == (
        "bind-shared-weights{copy=true}"
    )


def test_no_target():
    found = refused(pair(target=False))
    assert found.id == "bind/no-target"
    assert found.message == "the draft has no embed_tokens and there is no target to take it from"
    assert found.where == f"weight @{DRAFT_EMBEDDING}"
    assert found.notes == ("looked for draft/model.safetensors: embed_tokens.weight",)
    assert "this draft needs a target" in found.help


def test_no_head_anywhere():
    """The target's logits do not come from a linear layer."""
    module = pair(PairOptions(draft_embedding="own"))
    target = module.graphs["target"]
    target.outputs = [o for o in target.outputs if o.role is not Role.LOGITS]
    found = refused(module)
    assert found.id == "bind/no-lm-head"
    assert found.message == "neither the draft nor the target has the tensor lm_head"
    assert found.where == f"weight @{DRAFT_HEAD}"
    assert found.notes == ("looked for draft/model.safetensors: lm_head.weight",)
    assert "with its head included" in found.help


def test_no_embedding_anywhere():
    module = pair()
    target = module.graphs["target"]
    target.inputs[0].role = Role.HIDDEN
    found = refused(module)
    assert found.id == "bind/no-embed-tokens"
    assert found.message == "neither the draft nor the target has the tensor embed_tokens"


@pytest.mark.parametrize("hidden", [4, 16])
def test_hidden_sizes_differ(hidden):
    """Four is also the packed width of the target's head: shapes that agree by accident."""
    module = pair(PairOptions(draft_embedding="own"), draft=False)
    module.weights.add(
        DRAFT_HEAD, Weight((13, hidden), Dense(DType.BF16), Unbound("lm_head", ("d: lm_head",)))
    )
    found = refused(module)
    assert found.id == "bind/hidden-mismatch"
    assert found.message == (
        f"the draft works on hidden size {hidden}, the target's tensor has 8 columns"
    )
    assert found.where == f"weight @{DRAFT_HEAD}"
    assert found.notes == ("the target's tensor is inline, nvfp4<block=4> [13, 8]",)
    assert found.help == "use the target this draft was trained for"


@pytest.mark.parametrize("vocab", [12, 14])
@pytest.mark.parametrize(("symbol", "role"), [(DRAFT_HEAD, "lm_head"), ("e", "embed_tokens")])
def test_vocabularies_differ(vocab, symbol, role):
    module = pair(draft=False)
    module.weights.add(symbol, Weight((vocab, 8), Dense(DType.BF16), Unbound(role)))
    found = refused(module)
    assert found.id == "bind/vocab-mismatch"
    assert found.message == (
        f"the draft expects a vocabulary of {vocab} rows, the target's tensor has 13"
    )
    assert found.where == f"weight @{symbol}"
    assert "reduced draft vocabulary" in found.help


def test_the_targets_own_head_is_unbound():
    module = pair(draft=False)
    module.weights.rebind(
        TARGET_HEAD, Weight((13, 8), NVFP4(4), Unbound("lm_head", ("t: lm_head.weight",)))
    )
    found = refused(module)
    assert found.id == "bind/target-unbound"
    assert found.message == "the target's lm_head is unbound"


def test_weights_of_other_roles_are_left_alone():
    module = pair(draft=False)
    module.weights.add("norm", Weight((13, 8), Dense(DType.BF16), Unbound("norm")))
    text = module_text(module)
    assert bind(module) == (False, PassContext())
    assert module_text(module) == text
    assert [d.where for d in check_property(module, "heads-bound")] == ["weight @norm"]


def test_finding_head_and_embedding():
    module = pair()
    assert head_of(module.graphs["target"]) == TARGET_HEAD
    assert embedding_of(module.graphs["target"]) == TARGET_EMBEDDING
    assert head_of(module.graphs["draft"]) is None
    assert embedding_of(module.graphs["draft"]) is None


@FEWER
@given(pair_options())
def test_bound_drafts_compute_what_drafts_with_copies_compute(options):
    """Any pair: borrowing gives the bits of shipping the same tensors."""
    borrowed = pair(replace(options, draft_head="unbound", draft_embedding="unbound"))
    own = pair(replace(options, draft_head="same", draft_embedding="same"))
    bind(borrowed)
    assert storage(borrowed) == storage(own) - {DRAFT_HEAD, DRAFT_EMBEDDING}
    inputs = pair_inputs(own)
    assert_same_bits(
        list(evaluate(borrowed, inputs).values()), list(evaluate(own, inputs).values())
    )


def test_small_modules_without_anything_to_bind():
    module = Module("m")
    module.weights.add("w", dense(np.ones(2)))
    assert not bind(module)[0]


def test_what_is_no_matrix_is_refused():
    module = pair()
    symbol, weight = next(
        (s, w) for s, w in module.weights.items() if isinstance(w.source, Unbound)
    )
    module.weights.rebind(symbol, replace(weight, shape=weight.shape[:1]))
    with pytest.raises(InputError, match="is no matrix"):
        BindSharedWeights().run(module, PassContext())
