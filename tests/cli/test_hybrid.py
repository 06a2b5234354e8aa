"""Targets with recurrent layers at the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from edgecc.ir import parse_module, print_module
from helpers.byte_tokenizer import write_tokenizer
from helpers.checkpoints import write_draft
from helpers.command_line import Command
from helpers.hybrid import write_hybrid_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("hybrid")
    target = write_hybrid_target(folder / "t", mixed=True, multimodal=True)
    write_tokenizer(target)
    return target, write_draft(folder / "d", hidden=32, target_layer_ids=(0, 2, 3))


@pytest.mark.parametrize("device", ["cpu", "onnx"])
def test_compile_run_and_verify(
    edgecc: Command, tmp_path: Path, pair: tuple[Path, Path], device: str
) -> None:
    out = tmp_path / "bundle"
    options = ["--device", device, "--max-model-len", "96"]
    result = edgecc("compile", pair[0], "--draft", pair[1], "-o", out, *options)
    assert result.code == 0, result.err
    assert "checked target logits: ok" in result.err
    manifest = json.loads((out / "bundle.json").read_text("utf-8"))
    roles = [port["role"] for port in manifest["entries"]["target"]["inputs"]]
    assert (roles.count("state"), roles.count("state_log"), roles.count("kv_cache")) == (6, 3, 2)
    text = [
        edgecc("run", out, "--prompt", "abcdefg", "--max-new-tokens", "20", *extra).out
        for extra in ([], ["--no-speculation"])
    ]
    assert text[0] == text[1] != ""
    result = edgecc("verify", out)
    assert result.code == 0, result.err
    inspected = edgecc("inspect", out).out
    values, channels = 4 * 12, 2 * 2 * 8 + 4 * 12
    states = 4 * 3 * (values * 8 + channels * 3)
    rows = manifest["draft"]["num_speculative_tokens"] + 1
    logs = 4 * 3 * rows * (channels + 2 * 4)
    for role, count in (("state", states), ("state_log", logs)):
        assert re.search(rf"target/{role} +{count:,} bytes", inspected)
    assert (
        f"states of {states} bytes a sequence go back by replaying up to {rows} rows" in inspected
    )


def test_a_pipeline_without_replay_is_refused(
    edgecc: Command, tmp_path: Path, pair: tuple[Path, Path]
) -> None:
    passes = "bind-shared-weights,unroll-markov,fuse-cached-attention,lower-encodings,dce"
    out = tmp_path / "bundle"
    result = edgecc("compile", pair[0], "--draft", pair[1], "-o", out, "--pass-pipeline", passes)
    assert result.code == 4
    assert "error[ir/state-without-log]: nothing can take back what" in result.err
    assert "run add-state-replay" in result.err
    assert list(tmp_path.iterdir()) == []


def test_lift_and_opt(edgecc: Command, tmp_path: Path, pair: tuple[Path, Path]) -> None:
    lifted, fused = tmp_path / "lifted.eir", tmp_path / "fused.eir"
    assert edgecc("lift", pair[0], "--draft", pair[1], "-o", lifted).code == 0
    text = lifted.read_text("utf-8")
    assert print_module(parse_module(text)) == text
    assert "the vision tower (3 tensors) is left out" in text
    pipeline = "bind-shared-weights,dedupe-weights,fuse-qkv,fuse-gate-up,fuse-cached-attention,dce"
    result = edgecc("opt", lifted, "-p", pipeline, "-o", fused, "--explain")
    assert result.code == 0
    assert "fuse-cached-attention: applied at @target" in result.err
    assert "fuse-qkv: not applied at @target" in result.err  # FP8: a scale for each projection
    module = parse_module(fused.read_text("utf-8"))
    ops = {node.op.name for node in module.graphs["target"].nodes}
    assert {"gated_delta_net", "causal_conv1d", "cached_attention"} <= ops
    result = edgecc("opt", fused, "-p", "add-state-replay", "--check", "3")
    assert result.code == 0, result.err
    assert result.out.count(" = logged_delta_net(") == 3
    assert edgecc("opt", fused, "-p", "add-state-replay{rows=-1}").code == 2
