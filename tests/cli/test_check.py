"""`edgecc check` and `edgecc explain ID`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.broken_pairs import write_pair
from helpers.checkpoints import DROP, edit_json, edit_tensors
from helpers.command_line import Command


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path)


def test_a_pair(pair: tuple[Path, Path], edgecc: Command) -> None:
    result = edgecc("check", pair[0], "--draft", pair[1])
    assert result.code == 0
    head, *rows = result.out.splitlines()
    assert head.split("  ")[0] == "tensor"
    shared = [row for row in rows if "shared: target's lm_head.weight, nvfp4" in row]
    assert len(shared) == 1
    assert shared[0].startswith("draft: lm_head.weight")
    assert "draft.lm_head.weight -> target.lm_head.weight" in result.err
    assert "  why: A layer off by one costs a half of the acceptance" in result.err
    assert result.last == "edgecc: ok 0 errors, 0 warnings, 2 notes"


def test_several_faults_are_told_at_once(pair: tuple[Path, Path], edgecc: Command) -> None:
    target, draft = pair
    edit_json(draft / "config.json", hidden_act="gelu", rms_norm_eps=DROP, vocab_size="x")
    edit_json(target / "config.json", hidden_size=-1)
    result = edgecc("check", target, "--draft", draft)
    assert result.code == 3
    for what in ("hidden_size is -1", "rms_norm_eps is missing", "vocab_size is 'x'"):
        assert what in result.err
    assert result.last.startswith("edgecc: error[config/bad-value]: hidden_size is -1")
    assert "not decided" in result.out


def test_nothing_to_show(tmp_path: Path, edgecc: Command) -> None:
    result = edgecc("check", tmp_path / "missing")
    assert (result.code, result.out) == (3, "")
    assert result.last.startswith("edgecc: error[checkpoint/not-found]")


def test_strict(pair: tuple[Path, Path], edgecc: Command) -> None:
    target, draft = pair
    assert edgecc("check", target, "--draft", draft, "--strict").code == 0  # notes only
    edit_json(target / "config.json", attention_bias=True)
    assert edgecc("check", target, "--draft", draft).code == 0
    result = edgecc("check", target, "--draft", draft, "--strict")
    assert result.code == 3
    assert result.last.startswith("edgecc: error[config/bias-flag]: ")


def test_json(pair: tuple[Path, Path], edgecc: Command) -> None:
    target, draft = pair
    edit_json(draft / "config.json", sample_from_anchor=False, shift_label=True)
    result = edgecc("check", target, "--draft", draft, "--json", "-q")
    assert result.code == 3
    report = json.loads(result.out)
    assert report["ok"] is False
    assert report["exit_code"] == 3
    first = report["findings"][0]
    assert {"id", "severity", "what", "where", "notes", "why", "do", "rule"} == first.keys()
    assert first["id"] == "draft/slot-layout"
    assert first["rule"] == "block-layout"
    assert first["where"] == "draft/config.json: shift_label"
    assert "1.1 tokens" in first["why"]
    assert {"tensor", "count", "stored", "declared", "decision"} == report["tensors"][0].keys()
    assert sum(row["count"] for row in report["tensors"]) > 20


def test_compile_tells_the_same(pair: tuple[Path, Path], tmp_path: Path, edgecc: Command) -> None:
    """One mechanism: what a check finds in metadata, a compile finds."""
    target, draft = pair

    def change(tensors: dict) -> None:
        del tensors["norm.weight"]
        tensors["hidden_norm.weight"] = tensors["hidden_norm.weight"][:-1]

    edit_tensors(draft, change)
    edit_json(target / "config.json", attention_bias=True)
    checked = edgecc("check", target, "--draft", draft)
    compiled = edgecc("compile", target, "--draft", draft, "-o", tmp_path / "out")
    assert checked.code == compiled.code == 3
    assert checked.last == compiled.last
    for id in ("checkpoint/missing-tensor", "checkpoint/shape"):
        assert f"error[{id}]" in checked.err
        assert f"error[{id}]" in compiled.err
    assert not (tmp_path / "out").exists()


def test_a_compile_has_the_warnings_of_the_rules(
    pair: tuple[Path, Path], tmp_path: Path, edgecc: Command
) -> None:
    edit_json(pair[1] / "config.json", eos_token_id=5)
    flags = ("--draft", pair[1], "-o", tmp_path / "out", "--dry-run")
    result = edgecc("compile", pair[0], *flags)
    assert result.code == 0
    assert "warning[tokenizer/pair-differs]" in result.err
    assert edgecc("compile", pair[0], *flags, "--strict").code == 3


@pytest.mark.parametrize("name", ["quant/bad-scale", "scales"])
def test_explain(name: str, edgecc: Command) -> None:
    result = edgecc("explain", name)
    assert result.code == 0
    assert result.out.startswith("scales\n\n")
    assert "Why it matters" in result.out
    assert "quant/bad-scale" in result.out


def test_explain_without_a_name(pair: tuple[Path, Path], edgecc: Command) -> None:
    result = edgecc("explain", pair[0])
    assert result.code == 2
    assert f"edgecc explain {pair[0]} '@*'" in result.err


def test_explain_something_else(edgecc: Command) -> None:
    result = edgecc("explain", "quant/bad-scald")
    assert result.code == 3
    assert "did you mean 'quant/bad-scale'?" in result.err
    result = edgecc("explain", "grammar/no-token")
    assert "other errors say themselves what to do" in result.err
