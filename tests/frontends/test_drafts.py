"""Telling drafts apart: by their tensors, whatever their config calls them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.drafts import SUPPORTED, detect_draft, is_draft
from edgecc.frontends.drafts.names import canonical_name, canonical_names
from edgecc.frontends.lift import lift
from helpers.checkpoints import DROP, Tensors, edit_json, edit_tensors, write_draft, write_target


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return write_draft(tmp_path / "d")


def kind(path: Path) -> str:
    with Checkpoint.open(path, role="draft") as checkpoint:
        return detect_draft(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen3DSparkModel"]},
        {"architectures": ["DSparkDraftModel"]},
        {"architectures": ["DSparkSpeculator"], "speculators_model_type": "dspark"},
        {"architectures": DROP},
        {"architectures": ["Something"], "model_type": "something"},
        {"architectures": ["DFlashDraftModel"]},
    ],
)
def test_dspark_by_its_tensors(draft: Path, changes: dict[str, object]) -> None:
    edit_json(draft / "config.json", **changes)
    assert kind(draft) == "dspark"
    assert "draft" in lift(None, draft).graphs


def without_markov(tensors: Tensors) -> Tensors:
    return {n: a for n, a in tensors.items() if "markov" not in n and "confidence" not in n}


def plus(*names: str) -> Callable[[Tensors], Tensors]:
    extra = {name: np.zeros((4, 4), dtype=np.float32) for name in names}
    return lambda tensors: {**without_markov(tensors), **extra}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (plus("candidate_selector.hidden_projection"), "dflash2"),
        (plus("domino_gru.weight_ih"), "domino"),
        (plus("mtp.0.hc_mult.weight"), "deepseek-v4"),
    ],
)
def test_other_kinds_by_their_tensors(
    draft: Path, change: Callable[[Tensors], Tensors], expected: str
) -> None:
    edit_tensors(draft, change)
    edit_json(draft / "config.json", markov_rank=DROP)
    with pytest.raises(UnsupportedError, match=f"^error.draft/kind.: {expected} drafts") as caught:
        kind(draft)
    assert "supported: dspark, dflash, eagle3" in caught.value.diagnostics[0].help


@pytest.mark.parametrize(
    "name", ["midlayer.self_attn.q_proj.weight", "layers.0.hidden_norm.weight"]
)
@pytest.mark.parametrize("architecture", ["Qwen3DSparkModel", "LlamaForCausalLM", "Something"])
def test_eagle3_by_its_tensors(draft: Path, name: str, architecture: str) -> None:
    edit_tensors(draft, plus(name))
    edit_json(draft / "config.json", architectures=[architecture])
    assert kind(draft) == "eagle3"


def test_a_map_alone_means_eagle3(draft: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        found = plus("d2t")(tensors)
        del found["hidden_norm.weight"]
        return found

    edit_tensors(draft, change)
    assert kind(draft) == "eagle3"


def test_a_map_beside_a_norm_before_the_layers_means_dflash(draft: Path) -> None:
    edit_tensors(draft, plus("d2t", "t2d"))
    edit_json(draft / "config.json", markov_rank=DROP)
    assert kind(draft) == "dflash"


@pytest.mark.parametrize("rank", [0, DROP])
@pytest.mark.parametrize("architecture", ["DFlashDraftModel", "Qwen3DSparkModel", "Something"])
def test_dflash_by_its_tensors(draft: Path, architecture: str, rank: object) -> None:
    edit_tensors(draft, without_markov)
    edit_json(draft / "config.json", architectures=[architecture], markov_rank=rank)
    assert kind(draft) == "dflash"


def test_a_rank_without_tensors_is_an_incomplete_draft(draft: Path) -> None:
    edit_tensors(draft, without_markov)
    with pytest.raises(InputError, match="markov_rank is 8, but no markov_head") as caught:
        kind(draft)
    assert caught.value.id == "draft/markov-missing"


def test_a_complete_language_model(tmp_path: Path) -> None:
    assert kind(write_target(tmp_path / "t", quantized=False)) == "draft_model"


def test_a_layer_of_a_target(draft: Path) -> None:
    edit_tensors(draft, lambda tensors: {"mtp.fc.weight": tensors["fc.weight"]})
    with pytest.raises(UnsupportedError, match="mtp drafts are not supported"):
        kind(draft)


def test_no_draft_at_all(draft: Path) -> None:
    edit_tensors(draft, lambda tensors: {"x.weight": tensors["fc.weight"]})
    with pytest.raises(InputError, match="no draft edgecc knows") as caught:
        kind(draft)
    assert caught.value.id == "draft/unknown"


def test_a_draft_in_the_place_of_the_target(tmp_path: Path, draft: Path) -> None:
    with pytest.raises(InputError, match="d is a draft") as caught:
        lift(draft)
    assert caught.value.id == "draft/needs-target"
    assert "edgecc compile TARGET --draft DRAFT" in caught.value.diagnostics[0].help


def test_is_draft(tmp_path: Path, draft: Path) -> None:
    target = write_target(tmp_path / "t", quantized=False, tokenizer=False)
    for path, expected in ((target, False), (draft, True)):
        with Checkpoint.open(path, role="x") as checkpoint:
            assert is_draft(checkpoint) is expected


def test_supported_kinds_are_listed() -> None:
    assert SUPPORTED == ("dspark", "dflash", "eagle3", "draft_model")


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("fc.weight", "fc.weight"),
        ("model.fc.weight", "fc.weight"),
        ("model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("logit_head.markov_head.markov_w1.weight", "markov_head.markov_w1.weight"),
        ("model.logit_head.confidence_head.proj.bias", "confidence_head.proj.bias"),
        ("encoder.fc.bias", "fc.bias"),
        ("encoder.output_norm_enc.weight", "hidden_norm.weight"),
        ("context_proj.weight_scale", "fc.weight_scale"),
        ("context_norm.weight", "hidden_norm.weight"),
        ("final_norm.weight", "norm.weight"),
        ("midlayer.input_layernorm.weight", "layers.0.input_layernorm.weight"),
        ("midlayer.self_attn.qkv_proj.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        (
            "layers.0.self_attn.qkv_proj.v_proj.weight_scale",
            "layers.0.self_attn.v_proj.weight_scale",
        ),
        ("layers.0.self_attn.qkv_proj.weight", "layers.0.self_attn.qkv_proj.weight"),
        ("layers.0.final_norm.weight", "layers.0.final_norm.weight"),
        ("my_model.fc.weight", "my_model.fc.weight"),
    ],
)
def test_canonical_name(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical
    assert canonical_name(canonical) == canonical


def test_two_names_of_one_tensor() -> None:
    assert canonical_names(["fc.weight", "norm.weight"]) == {
        "fc.weight": "fc.weight",
        "norm.weight": "norm.weight",
    }
    with pytest.raises(InputError, match=r"fc.weight and context_proj.weight are both fc.weight"):
        canonical_names(["fc.weight", "context_proj.weight"])
