"""What a bundle says about itself is what is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import edgecc
from helpers.checkpoints import write_draft, write_target

SMALL: Mapping[str, Any] = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "intermediate": 32,
}


def compile(
    folder: Path,
    target: Mapping[str, Any] | None = None,
    draft: Mapping[str, Any] | None = None,
    **options: Any,
) -> Mapping[str, Any]:
    """The manifest of a small pair; `draft=None` compiles the target alone."""
    target_path = write_target(folder / "t", **{**SMALL, **(target or {})})
    draft_path = None
    if draft is not None:
        taps = {"target_layers": 1, "target_layer_ids": (0,)}
        draft_path = write_draft(folder / "d", **{**SMALL, **taps, **draft})
    report = edgecc.compile(target_path, draft_path, out=folder / "b", max_model_len=32, **options)
    assert report.bundle is not None
    return report.bundle.manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("manifest")


@pytest.fixture(scope="module")
def manifest(folder: Path) -> Mapping[str, Any]:
    return compile(folder, {}, {}, num_speculative_tokens=3)


def test_head(manifest: Mapping[str, Any]) -> None:
    assert manifest["format"] == "edgecc-bundle"
    assert manifest["version"] == 1
    assert manifest["producer"] == f"edgecc {edgecc.__version__}"
    assert list(manifest["artifacts"]) == ["cpu"]
    assert manifest["target"]["model_type"] == "qwen3"
    assert manifest["draft"]["num_speculative_tokens"] == 3
    assert manifest["draft"]["block_size"] == 4
    assert manifest["limits"] == {
        "max_model_len": 32,
        "max_input_len": 31,
        "prefill_chunk": 128,
        "max_batch_size": 1,
    }


def test_files(folder: Path, manifest: Mapping[str, Any]) -> None:
    found = {
        path.relative_to(folder / "b").as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in (folder / "b").rglob("*")
        if path.is_file() and path.name != "bundle.json"
    }
    assert manifest["files"] == found


def test_tokenizer_files_are_copied(folder: Path, manifest: Mapping[str, Any]) -> None:
    names = {n.removeprefix("tokenizer/") for n in manifest["files"] if n.startswith("tokenizer/")}
    assert names == {
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    for name in names:
        copied = folder / "b" / "tokenizer" / name
        assert copied.read_bytes() == (folder / "t" / name).read_bytes()


def test_provenance(folder: Path, manifest: Mapping[str, Any]) -> None:
    provenance = manifest["provenance"]
    for role, name in (("target", "t"), ("draft", "d")):
        assert provenance[role]["name"] == name
        for file, digest in provenance[role]["files"].items():
            assert hashlib.sha256((folder / name / file).read_bytes()).hexdigest() == digest
        assert {"config.json", "model.safetensors"} <= provenance[role]["files"].keys()
    assert provenance["options"]["max_model_len"] == 32
    assert provenance["options"]["max_input_len"] == 31
    assert provenance["options"]["num_speculative_tokens"] == 3
    assert provenance["options"]["device"] == "cpu"
    assert provenance["pipeline"].startswith("bind-shared-weights")


def test_entries(manifest: Mapping[str, Any]) -> None:
    assert set(manifest["entries"]) == {"target", "draft"}
    for entry in manifest["entries"].values():
        caches = {p["name"] for p in entry["inputs"] if p["role"] == "kv_cache"}
        aliases = {p["alias"] for p in entry["outputs"] if p["role"] == "kv_cache"}
        assert caches == aliases
        assert len(caches) == 2


def test_weights(manifest: Mapping[str, Any]) -> None:
    weights = manifest["weights"]
    head = weights["target.lm_head.weight"]
    assert head["encoding"].startswith("nvfp4")
    assert head["shape"] == [288, 32]
    assert head["bytes"] == 288 * 16 + 288 * 2 + 4 + 4  # codes, block scales, two scalars
    assert head["role"] == "lm_head"
    assert head["users"] == ["draft", "target"]
    assert head["file"] in manifest["files"]
    assert "lm_head.weight" in head["origin"]
    assert not [s for s in weights if s.startswith("draft.") and "lm_head" in s]
    norm = weights["target.model.norm.weight.f32"]
    assert (norm["role"], norm["users"]) == ("weight", ["target"])
    assert norm["origin"] == "dequantize of target/model.safetensors: model.norm.weight"


def roles(manifest: Mapping[str, Any]) -> dict[str, str]:
    return {s["role"]: s["symbol"] for s in manifest["shared"]}


def test_shared(manifest: Mapping[str, Any]) -> None:
    assert roles(manifest) == {
        "lm_head": "target.lm_head.weight",
        "embed_tokens": "target.model.embed_tokens.weight",
    }
    for item in manifest["shared"]:
        assert item["users"] == ["draft", "target"]
        assert item["bytes"] == manifest["weights"][item["symbol"]]["bytes"]


def test_nothing_is_shared_by_a_target_alone(tmp_path: Path) -> None:
    manifest = compile(tmp_path)
    assert manifest["shared"] == []
    assert manifest["provenance"]["draft"] is None
    assert manifest["provenance"]["options"]["num_speculative_tokens"] is None


def test_an_own_head_is_not_shared(tmp_path: Path) -> None:
    manifest = compile(tmp_path, {}, {"own_head": True})
    assert roles(manifest) == {"embed_tokens": "target.model.embed_tokens.weight"}
    head = manifest["weights"]["draft.lm_head.weight"]
    assert (head["role"], head["users"]) == ("lm_head", ["draft"])


def test_an_own_embedding_is_not_shared(tmp_path: Path) -> None:
    manifest = compile(tmp_path, {}, {"own_embedding": True})
    assert roles(manifest) == {"lm_head": "target.lm_head.weight"}
    table = manifest["weights"]["draft.embed_tokens.weight"]
    assert (table["role"], table["users"]) == ("embed_tokens", ["draft"])


def test_a_tied_head_is_one_weight(tmp_path: Path) -> None:
    manifest = compile(tmp_path, {"tied": True}, {})
    (item,) = manifest["shared"]
    assert item["symbol"] == "target.model.embed_tokens.weight"
    assert item["users"] == ["draft", "target"]
    assert "target.lm_head.weight" not in manifest["weights"]


def test_a_copied_head_is_not_shared(tmp_path: Path) -> None:
    manifest = compile(tmp_path, {}, {}, lm_head="copy")
    assert manifest["shared"] == []
