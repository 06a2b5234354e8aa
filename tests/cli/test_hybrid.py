"""Targets with recurrent layers at the command line: lifted and transformed, not yet compiled."""

from __future__ import annotations

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
@pytest.mark.parametrize("dry_run", [True, False])
def test_compile_refuses_before_anything_is_written(
    edgecc: Command, tmp_path: Path, pair: tuple[Path, Path], device: str, dry_run: bool
) -> None:
    out = tmp_path / "bundle"
    extra = ["--dry-run"] if dry_run else []
    result = edgecc("compile", pair[0], "--draft", pair[1], "-o", out, "--device", device, *extra)
    assert (result.code, result.out) == (4, "")
    assert f"error[legalize/op]: device {device} cannot run gated_delta_net" in result.err
    assert "causal_conv1d of target: model.layers.0.linear_attn.conv1d" in result.err
    assert "help: choose another device" in result.err
    assert "Traceback" not in result.err
    assert result.last.startswith("edgecc: error[legalize/op]: ")
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
