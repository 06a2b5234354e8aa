"""IR text read from Python, with the checkpoints it names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import edgecc
from edgecc import ir
from edgecc.errors import InputError
from edgecc.passes import PassContext, PassManager
from helpers.goldens import PAIRS

TARGET, DRAFT = PAIRS / "tiny-qwen3-nvfp4", PAIRS / "tiny-qwen3-dspark"


@pytest.fixture
def text() -> str:
    return ir.print_module(edgecc.lift(TARGET, DRAFT))


def test_weights_of_a_file_can_be_read(tmp_path, text):
    (tmp_path / "pair.eir").write_text(text, encoding="utf-8")
    module = edgecc.read_ir(tmp_path / "pair.eir")
    ctx = PassContext()
    PassManager(["bind-shared-weights", "fuse-qkv"]).run(module, ctx)
    assert any(r.applied and r.pass_name == "fuse-qkv" for r in ctx.remarks)


def test_checkpoints_are_found_from_the_folder_of_the_file(tmp_path, text, monkeypatch):
    near = os.path.relpath(PAIRS, tmp_path)
    file = tmp_path / "pair.eir"
    file.write_text(text.replace(str(PAIRS), near), encoding="utf-8")
    monkeypatch.chdir("/")
    module = edgecc.read_ir(str(file))
    assert module.weights.read("target.lm_head.weight", 0, 1)


def test_text_alone_has_no_bytes(text):
    with pytest.raises(InputError, match="which is not open") as caught:
        ir.parse(text).weights.read("target.lm_head.weight", 0, 1)
    assert "edgecc.read_ir" in caught.value.diagnostics[0].help


def test_a_missing_checkpoint_is_named(tmp_path, text):
    file = tmp_path / "pair.eir"
    file.write_text(text.replace(str(DRAFT), str(Path("/nowhere"))), encoding="utf-8")
    with pytest.raises(InputError, match="nowhere"):
        edgecc.read_ir(file)
