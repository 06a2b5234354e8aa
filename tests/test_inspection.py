"""What `inspect` finds out, from metadata alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import edgecc
from edgecc.errors import InputError, UnsupportedError, UsageError
from edgecc.inspection import inspect_path
from helpers.checkpoints import edit_json, write_draft, write_target

PAIRS = Path(__file__).parent / "data" / "pairs"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("inspect") / "t")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("inspect") / "d")


def test_a_target(target: Path) -> None:
    facts = inspect_path(target)
    assert facts["kind"] == "target checkpoint"
    assert facts["path"] == str(target)
    model = facts["model"]
    assert model["architecture"] == "Qwen3ForCausalLM"
    assert (model["layers"], model["hidden_size"], model["vocab_size"]) == (4, 64, 288)
    assert model["heads"] == "4 query, 2 key/value, 32 wide"
    assert model["rope"] == "default, theta 1e+06, 32 dims"
    assert model["stop_tokens"] == [256, 258]
    assert model["stop_tokens_from"] == {
        "config.json": 258,
        "generation_config.json": [258, 256],
    }
    assert facts["borrows"] == []
    assert facts["tensors"] == 134
    assert facts["tensor_bytes"] == (target / "model.safetensors").stat().st_size - header(target)
    assert sum(w["bytes"] for w in facts["weights"].values()) == facts["tensor_bytes"]
    assert set(facts["encodings"]) == {"dense<bf16>", "nvfp4<block=16, input_scale>"}
    assert json.loads(json.dumps(facts)) == facts


def header(path: Path) -> int:
    data = (path / "model.safetensors").read_bytes()
    return 8 + int.from_bytes(data[:8], "little")


def test_a_draft(draft: Path) -> None:
    facts = inspect_path(draft)
    assert facts["kind"] == "draft checkpoint"
    assert facts["draft"] == {
        "method": "dspark",
        "layers": 2,
        "hidden_size": 64,
        "block_size": 4,
        "reads_outputs_of_layers": [1, 3],
        "numbered_by": "target_layer_ids",
        "mask_token_id": 287,
        "slot_layout": "anchor-predicts, by the family",
        "markov_rank": 8,
        "confidence_head": True,
        "vocab_size": 288,
        "target_layers": 4,
    }
    assert sorted(facts["borrows"]) == ["embed_tokens", "lm_head"]
    assert set(facts["encodings"]) == {"dense<bf16>"}


def test_a_draft_without_confidence_head(tmp_path: Path) -> None:
    """The tensors decide, not the flag."""
    path = write_draft(tmp_path / "d", confidence_head=False, enable_confidence_head=True)
    assert inspect_path(path)["draft"]["confidence_head"] is False


def test_a_bundle(tmp_path: Path, target: Path, draft: Path) -> None:
    out = tmp_path / "b"
    edgecc.compile(target, draft, out=out, max_model_len=32)
    facts: Mapping[str, Any] = inspect_path(out)
    assert facts["kind"] == "bundle"
    assert list(facts["devices"]) == ["cpu"]
    assert facts["devices"]["cpu"].startswith("onnxruntime, ")
    assert facts["target"]["checkpoint"] == "t"
    assert facts["draft"]["checkpoint"] == "d"
    assert facts["draft"]["method"] == "dspark"
    assert {s.partition(":")[0] for s in facts["shared"]} == {"lm_head", "embed_tokens"}
    assert all("stored once for draft and target" in s for s in facts["shared"])
    assert facts["limits"]["max_model_len"] == 32
    assert set(facts["per_sequence"]) == {"target/kv_cache", "draft/kv_cache"}
    assert json.loads(json.dumps(facts)) == facts


def test_a_bundle_without_draft(tmp_path: Path, target: Path) -> None:
    edgecc.compile(target, out=tmp_path / "b", max_model_len=32, verify="none")
    facts = inspect_path(tmp_path / "b")
    assert facts["draft"] == "none"
    assert facts["shared"] == []


@pytest.mark.parametrize("name", ["tiny-qwen3-nvfp4", "tiny-qwen3-dspark"])
def test_the_published_layouts(name: str) -> None:
    facts = inspect_path(PAIRS / name)
    assert "cannot_compile" not in facts
    assert facts["tensor_bytes"] > 10**6


def test_windows_are_shown(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    path = write_target(tmp_path / "t", layers=2, layer_types=kinds, sliding_window=8)
    assert inspect_path(path)["model"]["sliding_window"] == "8 rows, in 1 of 2 layers"
    assert "sliding_window" not in inspect_path(PAIRS / "tiny-qwen3-nvfp4")["model"]


def test_what_cannot_be_compiled_is_still_shown(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", layers=1, hidden_act="gelu")
    facts = inspect_path(path)
    assert facts["model"]["layers"] == 1
    (reason,) = facts["cannot_compile"]
    assert "target/activation" in reason
    edit_json(path / "config.json", hidden_act="silu", model_type="phi3")
    (reason,) = inspect_path(path)["cannot_compile"]
    assert "no frontend for model_type 'phi3'" in reason


def test_a_draft_of_another_kind(tmp_path: Path) -> None:
    path = write_draft(tmp_path / "d", dflash_config={"projector_type": "domino"})
    with pytest.raises(UnsupportedError, match="domino"):
        inspect_path(path)


def test_no_such_path(tmp_path: Path) -> None:
    for path in (tmp_path / "x", tmp_path / "x" / "y", tmp_path / ("x" * 300)):
        with pytest.raises(InputError) as caught:
            inspect_path(path)
        assert caught.value.id == "inspect/no-such-path"


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_no_path(path: str) -> None:
    with pytest.raises(UsageError, match="path is"):
        inspect_path(path)


def test_something_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path, id in ((tmp_path, "checkpoint/no-config"), (tmp_path / "file", "not-a-folder")):
        with pytest.raises(InputError) as caught:
            inspect_path(path)
        assert id in caught.value.id
