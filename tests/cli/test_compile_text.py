"""`edgecc compile` of IR text: the same bundle as from the checkpoints, and clear refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from edgecc.cli import main

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
TARGET = str(PAIRS / "tiny-qwen3-nvfp4")
DRAFT = str(PAIRS / "tiny-qwen3-dspark")
SIZES = ["--max-model-len", "96", "-k", "5"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with `pair.eir` as lifted, `opt.eir` after the default passes, and `bundle`."""
    folder = tmp_path_factory.mktemp("text")
    pair, opt = str(folder / "pair.eir"), str(folder / "opt.eir")
    assert main(["lift", TARGET, "--draft", DRAFT, *SIZES, "-o", pair, "-q"]) == 0
    assert main(["opt", pair, "--device", "cpu", "--default-pipeline", "-o", opt, "-q"]) == 0
    arguments = [TARGET, "--draft", DRAFT, *SIZES, "-o", str(folder / "bundle"), "-q"]
    assert main(["compile", *arguments]) == 0
    return folder


def contents(folder):
    files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def test_text_as_lifted_gives_the_same_bundle(made, tmp_path):
    assert main(["compile", str(made / "pair.eir"), "-o", str(tmp_path / "b"), "-q"]) == 0
    assert contents(tmp_path / "b") == contents(made / "bundle")


def test_text_with_locations_gives_the_same_bundle(made, tmp_path):
    path = tmp_path / "pair.eir"
    arguments = [TARGET, "--draft", DRAFT, *SIZES, "--locations", "-o", str(path), "-q"]
    assert main(["lift", *arguments]) == 0
    assert main(["compile", str(path), "-o", str(tmp_path / "b"), "-q", *SIZES]) == 0
    assert contents(tmp_path / "b") == contents(made / "bundle")


def test_text_after_the_passes_gives_the_same_engines_weights_and_golden_rows(made, tmp_path):
    assert main(["compile", str(made / "opt.eir"), "-o", str(tmp_path / "b"), "-q"]) == 0
    found, expected = contents(tmp_path / "b"), contents(made / "bundle")
    assert found.keys() == expected.keys()
    rows, before = load(found.pop("golden.safetensors")), load(expected.pop("golden.safetensors"))
    assert before.keys() - rows.keys() == {"draft_logits"}  # an output that passes have dropped
    assert all(np.array_equal(array, before[name]) for name, array in rows.items())
    differing = {name for name in found if found[name] != expected[name]}
    assert differing == {"bundle.json", "ir/lifted.eir", "ir/lowered.eir"}


def test_edited_text_is_compiled_as_it_is(made, tmp_path):
    """Other hints and no decisions: not what lifting gives, and still a bundle that runs."""
    text = (made / "pair.eir").read_text(encoding="utf-8").replace("%act", "%activated")
    path = tmp_path / "edited.eir"
    path.write_text(text, encoding="utf-8")
    assert main(["compile", str(path), "-o", str(tmp_path / "b"), "-q"]) == 0
    found = contents(tmp_path / "b")
    assert b"%activated" in found["ir/lifted.eir"]
    assert found["golden.safetensors"] == contents(made / "bundle")["golden.safetensors"]
    assert (
        main(["verify", str(tmp_path / "b"), "--prompts", "1", "--max-new-tokens", "4", "-q"]) == 0
    )


def test_the_default_output_is_named_after_the_file(made, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compile", str(made / "pair.eir"), "--dry-run"]) == 0
    assert "nothing written" in capsys.readouterr().err
    assert main(["compile", str(made / "pair.eir"), "-q"]) == 0
    assert (tmp_path / "pair-edgecc" / "bundle.json").is_file()


def test_a_target_alone_and_checkpoints_beside_the_text(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    shutil.copytree(TARGET, tmp_path / "here" / "t")
    monkeypatch.chdir(tmp_path / "here")
    assert main(["lift", "t", "--max-model-len", "32", "-o", "t.eir", "-q"]) == 0
    monkeypatch.chdir(tmp_path)
    assert main(["compile", "here/t.eir", "-o", "b", "-q"]) == 0


REFUSED = {
    "--draft": (["--draft", DRAFT], 2, "usage/draft-with-ir"),
    "length": (["--max-model-len", "128"], 2, "usage/lifted-size"),
    "input": (["--max-input-len", "7"], 2, "usage/lifted-size"),
    "steps": (["-k", "7"], 2, "usage/lifted-size"),
    "head": (["--lm-head", "own"], 3, "bind/no-own-head"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_contradict_the_text_are_refused(made, tmp_path, capsys, name):
    flags, code, id = REFUSED[name]
    assert main(["compile", str(made / "pair.eir"), "-o", str(tmp_path / "b"), *flags]) == code
    assert f"error[{id}]" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


EDITS = {
    "graph": ("graph @target(", "graph @other(", "ir/incomplete"),
    "limits": ("metadata limits = ", "metadata limit = ", "ir/incomplete"),
    "sizes": ('"max_model_len": 96', '"max_model_len": "96"', "ir/incomplete"),
    "draft": ("metadata draft = ", "metadata drafts = ", "ir/incomplete"),
    "checkpoint": ('checkpoint "target"', 'checkpoint "targets"', "ir/incomplete"),
    "tensor": ("#model.norm.weight", "#model.norm.weights", "checkpoint/"),
    "shape": ("#model.norm.weight", "#model.layers.0.self_attn.q_norm.weight", "ir/stored-weight"),
    "role": ('[256] = stored "target"', '[256] = stored "elsewhere"', "ir/stored-weight"),
    "syntax": ("symbol b: 1..1", "symbol b: 1..", "ir/"),
}


@pytest.mark.parametrize("name", EDITS)
def test_text_that_is_no_whole_module_is_refused(made, tmp_path, capsys, name):
    old, new, id = EDITS[name]
    text = (made / "pair.eir").read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "bad.eir"
    path.write_text(text.replace(old, new), encoding="utf-8")
    assert main(["compile", str(path), "-o", str(tmp_path / "b")]) == 3
    assert f"error[{id}" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_text_that_is_not_there_and_output_into_a_checkpoint(made, capsys):
    assert main(["compile", "missing.eir"]) == 3
    assert "missing.eir" in capsys.readouterr().err
    inside = str(Path(DRAFT) / "bundle")
    assert main(["compile", str(made / "pair.eir"), "-o", inside]) == 2
    assert "error[usage/output-in-checkpoint]" in capsys.readouterr().err


def test_steps_without_a_draft_are_refused(tmp_path, capsys):
    path = tmp_path / "t.eir"
    assert main(["lift", TARGET, "--max-model-len", "32", "-o", str(path), "-q"]) == 0
    assert main(["compile", str(path), "-o", str(tmp_path / "b"), "-k", "3"]) == 2
    assert "error[usage/" in capsys.readouterr().err
