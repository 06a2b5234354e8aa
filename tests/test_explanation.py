from __future__ import annotations

from pathlib import Path

import pytest

import edgecc
from edgecc.cli import main
from edgecc.errors import InputError
from edgecc.explanation import explain
from edgecc.ir import print_module
from edgecc.passes import PassContext
from edgecc.passes.manager import PassManager
from edgecc.passes.pipeline import parse_pipeline

PAIRS = Path(__file__).parent / "data" / "pairs"
TARGET, DRAFT = PAIRS / "tiny-qwen3-nvfp4", PAIRS / "tiny-qwen3-dspark"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The pair after binding and fusing, with locations."""
    module = edgecc.lift(TARGET, DRAFT, max_model_len=32)
    PassManager(parse_pipeline("bind-shared-weights,fuse-qkv")).run(module, PassContext())
    path = tmp_path_factory.mktemp("ir") / "pair.eir"
    path.write_text(print_module(module, locations=True), encoding="utf-8")
    return path


def test_a_bound_weight_names_its_owner_users_and_reason(text):
    lines = explain(text, "@draft.lm_head.weight").splitlines()
    assert lines[0].startswith("weight @draft.lm_head.weight: nvfp4<block=16, input_scale>, 4096 x")
    assert lines[1] == "  is another name of @target.lm_head.weight"
    assert lines[2] == "    is stored in target/model.safetensors: lm_head.weight"
    assert any(line.startswith("  used in @draft: %base_logits = linear(%z") for line in lines)
    assert any(line.startswith("  used in @target: %logits = linear(") for line in lines)
    assert any("decided: draft.lm_head.weight -> target.lm_head.weight" in line for line in lines)


def test_a_fused_weight_shows_what_it_is_made_of(text):
    shown = explain(text, "draft.layers.1*k_proj+v_proj.weight")
    assert "is made by concat_rows from 2 weights" in shown
    assert "is stored in draft/model.safetensors: layers.1.self_attn.v_proj.weight" in shown


def test_a_value_shows_its_history(text):
    shown = explain(text, "@draft/%linear")
    assert "value %linear: f32[b, c + 7, 256] in @draft" in shown
    assert "  from     draft: layers.0.self_attn.k_proj" in shown
    assert "  passes   fuse-qkv" in shown
    assert "  reads    %rows" in shown
    assert "used in  %k_proj, %v_proj = split(%linear)" in shown
    both = explain(text, "%linear")
    assert "in @target" in both
    assert "in @draft" in both


def test_inputs_and_outputs_say_so(text):
    assert "  is an input: anchor" in explain(text, "%anchor")
    assert "  returned as proposals (proposals)" in explain(text, "%proposals")


def test_unknown_names_are_answered_with_near_ones(text):
    with pytest.raises(InputError, match=r"did you mean 'draft\.lm_head\.weight'") as caught:
        explain(text, "@draft.lm_hed.weight")
    assert "nothing is called '@draft.lm_hed.weight'" in str(caught.value)
    with pytest.raises(InputError, match="try a glob"):
        explain(text, "zzzzzzzz")


def test_bundles(tmp_path, capsys):
    edgecc.compile(TARGET, DRAFT, out=tmp_path / "b", max_model_len=32, prefill_chunk=16)
    assert main(["explain", str(tmp_path / "b"), "*lm_head*"]) == 0
    out = capsys.readouterr().out
    assert "from     target/model.safetensors: lm_head.weight" in out
    assert "used by  draft, target" in out
    assert "decided  draft.lm_head.weight -> target.lm_head.weight" in out
    # The manifest lists what is stored; the IR in the bundle knows the rest.
    assert main(["explain", str(tmp_path / "b"), "@draft.lm_head.weight"]) == 0
    out = capsys.readouterr().out
    assert "target.lm_head.weight" in out
    assert "decided  draft.lm_head.weight -> target.lm_head.weight" in out
    assert (
        main(["explain", str(tmp_path / "b"), "target.model.layers.0.self_attn.q_proj.weight"]) == 0
    )
    assert "goes into" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "b"), "nothing"]) == 3
    assert main(["explain", str(tmp_path / "missing.eir"), "x"]) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_a_recipe_of_one_weight_is_counted_as_one(tmp_path):
    path = tmp_path / "one.eir"
    path.write_text(
        'edgecc.module v1 "one"\n'
        'weight @a : dense<bf16> [2, 2] = stored "target" {weight: "model.safetensors#a"}\n'
        "weight @b : dense<f32> [2, 2] = derived dequantize(@a)\n"
    )
    assert "  is made by dequantize from 1 weight\n" in explain(path, "@b")
