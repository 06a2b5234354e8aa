"""`edgecc inspect`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from helpers.command_line import Command
from helpers.eagle3 import DRAFT_IDS, write_eagle3


def test_target(edgecc: Command, target: Path) -> None:
    result = edgecc("inspect", target)
    assert result.code == 0
    assert result.last == f"edgecc: ok target checkpoint {target}"
    for words in ("Qwen3ForCausalLM", "stop_tokens", "256, 258", "nvfp4<block=16"):
        assert words in result.out
    assert "model.norm.weight" not in result.out


def test_draft(edgecc: Command, draft: Path) -> None:
    result = edgecc("inspect", draft)
    assert result.code == 0
    for words in ("dspark", "block_size", "target_layer_ids", "borrows", "lm_head"):
        assert words in result.out


def test_eagle3_draft(edgecc: Command, tmp_path: Path) -> None:
    result = edgecc("inspect", write_eagle3(tmp_path / "d"), "--json")
    assert result.code == 0
    found = json.loads(result.out)
    assert found["draft"] == {
        "method": "eagle3",
        "layers": 1,
        "hidden_size": 32,
        "reads_outputs_of_layers": None,
        "numbered_by": "EAGLE3's default, the inputs of 2, n/2, n-3",
        "own_head": True,
        "norm_before_residual": False,
        "norm_output": False,
        "vocab_size": 288,
        "draft_vocab_size": len(DRAFT_IDS),
        "target_layers": None,
    }
    assert found["borrows"] == ["embed_tokens"]


def test_bundle(edgecc: Command, bundle: Path) -> None:
    result = edgecc("inspect", bundle)
    assert result.code == 0
    for words in ("onnxruntime", "stored once for draft and target", "max_model_len", "pipeline"):
        assert words in result.out


@pytest.mark.parametrize("fixture", ["target", "draft", "bundle"])
def test_weights(edgecc: Command, fixture: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(fixture)
    shown = edgecc("inspect", path, "--weights").out
    names = json.loads(edgecc("inspect", path, "--json").out)["weights"]
    assert len(names) > 10
    assert all(f"  {name}  " in shown for name in names)


@pytest.mark.parametrize("fixture", ["target", "draft", "bundle"])
def test_json_is_one_object(edgecc: Command, fixture: str, request: pytest.FixtureRequest) -> None:
    result = edgecc("inspect", request.getfixturevalue(fixture), "--json")
    assert result.out.count("\n") == 1
    found = json.loads(result.out)
    assert found["kind"] in ("target checkpoint", "draft checkpoint", "bundle")
    assert found["path"] == str(request.getfixturevalue(fixture))


@pytest.mark.parametrize(
    ("path", "code", "id"),
    [
        ("", 2, "usage/bad-path"),
        ("a\0b", 2, "usage/bad-path"),
        ("/nonexistent", 3, "inspect/no-such-path"),
        ("x" * 5000, 3, "inspect/no-such-path"),
        ("/dev/null/x", 3, "inspect/no-such-path"),
        ("/dev/null", 3, "checkpoint/not-a-folder"),
    ],
)
def test_no_checkpoint(edgecc: Command, path: str, code: int, id: str) -> None:
    result = edgecc("inspect", path)
    assert (result.code, result.id, result.out) == (code, id, "")


def test_an_incomplete_bundle(edgecc: Command, copy: Path) -> None:
    (copy / "tokenizer" / "tokenizer.json").unlink()
    result = edgecc("inspect", copy)
    assert (result.code, result.id) == (3, "bundle/missing-file")
    assert "tokenizer.json" in result.err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_name_that_is_no_unicode(edgecc: Command, target: Path, tmp_path: Path) -> None:
    link = tmp_path / b"t\xff".decode("utf-8", "surrogateescape")
    link.symlink_to(target)
    result = edgecc("inspect", link)
    assert result.code == 0
    result = edgecc("inspect", link, "--json")
    assert result.code == 0
