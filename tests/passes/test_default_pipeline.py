from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.devices import ONNX_DEVICES, get_device
from edgecc.errors import InputError
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import Module, print_module, verify
from edgecc.ir.verifier import check_property
from edgecc.passes import PASSES
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.modules import evaluate, interface, storage
from helpers.ops import assert_same_bits
from helpers.pairs import (
    DRAFT_HEAD,
    FEWER,
    TARGET_EMBEDDING,
    TARGET_HEAD,
    PairOptions,
    pair,
    pair_inputs,
    pair_options,
)

DATA = Path(__file__).parents[1] / "data" / "pairs"
DROPPED = {"base_logits", "draft_logits"}


def compiled(module: Module, device: str, **options: object) -> PassManager:
    made = get_device(device)
    manager = PassManager(default_pipeline(made, **options))
    manager.run(module, PassContext(made))
    assert verify(module) == []
    return manager


def bound(module: Module) -> Module:
    BindSharedWeights().run(module, PassContext())
    return module


def names(device: str, **options: object) -> list[str]:
    return [p.name for p in default_pipeline(get_device(device), **options)]


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_phases_stand_in_order(device):
    """Binding comes before all that needs heads, fusion before the encodings are lowered, and the
    check of the result last.
    """
    found = names(device)
    assert set(found) <= set(PASSES)
    for earlier, later in (
        ("bind-shared-weights", "dedupe-weights"),
        ("dedupe-weights", "drop-outputs"),
        ("drop-outputs", "unroll-markov"),
        ("unroll-markov", "canonicalize"),
        ("canonicalize", "fold-constants"),
        ("fold-constants", "cse"),
        ("cse", "fuse-qkv"),
        ("fuse-qkv", "lower-encodings"),
        ("fuse-gate-up", "lower-encodings"),
        ("lower-encodings", "outline-shared"),
        ("outline-shared", "legalize"),
    ):
        assert found.index(earlier) < found.index(later)
    assert found[-1] == "legalize"
    fused = "fuse-cached-attention" in found
    assert fused is get_device(device).fused_attention
    if fused:
        assert found.index("fuse-qkv") < found.index("fuse-cached-attention")


def test_options_choose_passes():
    usual = names("cpu")
    assert [n for n in usual if n not in names("cpu", copy_head=True)] == ["dedupe-weights"]
    kept = names("cpu", keep_draft_logits=True)
    assert [n for n in usual if n not in kept] == ["drop-outputs"]
    pipeline = ",".join(map(str, default_pipeline(get_device("cpu"), linear_form="int8-split")))
    assert "lower-encodings{form=int8-split" in pipeline


@pytest.mark.parametrize("form", ["auto", "dense", "int8-split"])
@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("logits", [True, False])
def test_values_stay(device, form, logits):
    options = PairOptions(layers=2)
    module, reference = pair(options), bound(pair(options))
    inputs = pair_inputs(module, options, batch=2)
    before = evaluate(reference, inputs)
    compiled(module, device, linear_form=form, keep_draft_logits=logits)
    after = evaluate(module, inputs)
    dropped = set() if logits else {f"draft.{name}" for name in DROPPED}
    assert set(before) - set(after) == dropped
    assert_same_bits(list(after.values()), [before[name] for name in after])


@FEWER
@given(pair_options(), st.sampled_from(sorted(ONNX_DEVICES)), st.integers(0, 9))
def test_random_pairs(options, device, seed):
    module, reference = pair(options), bound(pair(options))
    inputs = pair_inputs(module, options, seed)
    before = evaluate(reference, inputs)
    compiled(module, device)
    after = evaluate(module, inputs)
    assert_same_bits(list(after.values()), [before[name] for name in after])


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_interfaces_stay(device):
    module = pair()
    before = {name: interface(g) for name, g in module.graphs.items()}
    compiled(module, device)
    assert {g.name: interface(g) for g in module.entries()} == {
        name: [x for x in facts if x[0] not in DROPPED] for name, facts in before.items()
    }


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_properties_hold_and_decisions_are_told(device):
    module = pair()
    compiled(module, device)
    assert check_property(module, "heads-bound") == []
    assert check_property(module, "markov-unrolled") == []
    told = "\n".join(module.decisions)
    assert f"{DRAFT_HEAD} -> {TARGET_HEAD}" in told
    assert "runs as its own graph lm_head" in told


@pytest.mark.parametrize("device", ONNX_DEVICES)
@pytest.mark.parametrize("source", ["unbound", "same"])
def test_the_head_is_there_once(device, source):
    """A head that was borrowed, and one that was shipped twice (large enough to be looked at)."""
    options = PairOptions(
        vocab=8200, hidden=8, draft_head=source, draft_embedding=source, stored=True, head="bf16"
    )
    module = pair(options)
    compiled(module, device)
    tables = {s for s in storage(module) if module.weights[s].shape == (8200, 8)}
    assert tables == {TARGET_HEAD, f"{TARGET_HEAD}.f32", TARGET_EMBEDDING}
    users = module.weight_users()
    assert users[f"{TARGET_HEAD}.f32"] == ["lm_head"]
    assert all(list(g.callees()).count("lm_head") == 1 for g in module.entries())


def test_a_copied_head_is_there_twice():
    module, shared = pair(), pair()
    compiled(module, "cpu", copy_head=True)
    compiled(shared, "cpu")
    assert f"{DRAFT_HEAD}.copy" in storage(module)
    assert "lm_head" not in module.graphs
    inputs = pair_inputs(module)
    assert_same_bits(
        list(evaluate(module, inputs).values()), list(evaluate(shared, inputs).values())
    )


def test_the_same_module_gives_the_same_text():
    texts = set()
    for _ in range(2):
        module = pair(PairOptions(stored=True))
        compiled(module, "cpu")
        texts.add(print_module(module, locations=True))
    assert len(texts) == 1


def test_a_target_alone():
    module = pair(draft=False)
    inputs = pair_inputs(module)
    before = evaluate(module, inputs)
    compiled(module, "cpu")
    assert list(module.graphs) == ["target"]
    assert_same_bits(list(evaluate(module, inputs).values()), list(before.values()))


def test_a_draft_alone_needs_its_target():
    with pytest.raises(InputError, match="there is no target to take it from") as caught:
        compiled(pair(target=False), "cpu")
    assert caught.value.id == "bind/no-target"
    assert caught.value.__notes__ == ["in pass bind-shared-weights"]


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_a_real_pair(device):
    """Bit for bit the same before and after, on four tokens of a real checkpoint pair."""
    options = LiftOptions(max_model_len=32, prefill_chunk=8)
    paths = (DATA / "tiny-qwen3-nvfp4", DATA / "tiny-qwen3-dspark")
    module, reference = lift(*paths, options), bound(lift(*paths, options))
    ids, rng = np.array([[464, 2068, 758, 13]]), np.random.default_rng(0)
    inputs: dict[str, dict[str, np.ndarray]] = {
        "target": {"token_ids": ids, "logit_rows": np.array([3])},
        "draft": {"anchor": np.array([11]), "features": rng.standard_normal((1, 2, 768))},
    }
    for name, arrays in inputs.items():
        arrays["cache_length"] = np.array([3])
        for item in reference.graphs[name].inputs:
            if item.name not in arrays:
                arrays[item.name] = rng.standard_normal((1, *item.value.type.shape[1:]))
    before = evaluate(reference, inputs)
    compiled(module, device)
    after = evaluate(module, inputs)
    assert set(before) - set(after) == {f"draft.{name}" for name in DROPPED}
    assert_same_bits(list(after.values()), [before[name] for name in after])
