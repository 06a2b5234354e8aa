"""The table and the findings of a check, for weights of every producer."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgecc.contract.report import check
from helpers.checkpoints import edit_json, write_draft, write_target
from helpers.command_line import SMALL, TAPS
from helpers.quantized_layouts import AWQ, GPTQ, LAYOUTS, requantize, tensors_config

DECLARED = {
    "compressed-tensors-nvfp4": ("nvfp4", "compressed-tensors nvfp4-pack-quantized nvfp4"),
    "compressed-tensors-int4": ("int4", "compressed-tensors pack-quantized int4"),
    "compressed-tensors-int4-zeros": ("int4", "compressed-tensors pack-quantized int4"),
    "compressed-tensors-int4-order": ("int4 ordered", "compressed-tensors pack-quantized int4"),
    "compressed-tensors-fp8-channel": (
        "fp8 channel",
        "compressed-tensors float-quantized fp8 channel",
    ),
    "compressed-tensors-fp8-tensor": (
        "fp8 tensor",
        "compressed-tensors float-quantized fp8 tensor",
    ),
    "compressed-tensors-mxfp4": ("mxfp4", "compressed-tensors mxfp4-pack-quantized mxfp4"),
    "compressed-tensors-mxfp8": ("mxfp8", "compressed-tensors mxfp8-quantized mxfp8"),
    "fp8-block": ("fp8 block", "FP8 in blocks of 128 x 128"),
    "awq": ("int4", "AWQ int4"),
    "gptq": ("int4", "GPTQ int4 v1"),
    "gptq-order": ("int4 ordered", "GPTQ int4 v2"),
    "gptq-symmetric": ("int4", "GPTQ int4 v1"),
    "modelopt-mxfp4": ("mxfp4", "MXFP4"),
    "gpt-oss-mxfp4": ("mxfp4", "MXFP4"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    sizes = {**SMALL, "hidden": 64}
    target = write_target(folder / "target", **sizes, quantized=False)
    return target, write_draft(folder / "draft", **sizes, **TAPS)


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_table(case: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    stored, declared = DECLARED[case]
    target, _ = requantize(pair[0], tmp_path / "t", LAYOUTS[case])
    draft, _ = requantize(pair[1], tmp_path / "d", LAYOUTS[case])
    report = check(target, draft)
    assert report.exit_code == 0
    found = [f.diagnostic for f in report.findings if f.diagnostic.id.startswith("quant/")]
    assert {f.id for f in found if f.where.startswith("target")} <= {"quant/unused-pattern"}
    # The draft's Markov head is left as it is, and its config does not say so.
    assert all("markov" in " ".join(f.notes) for f in found if f.id == "quant/declared-not-stored")
    rows = [row for row in report.table if "q_proj" in row.tensor]
    assert [row.tensor.partition(":")[0] for row in rows] == ["target", "draft"]
    for row in rows:
        if stored == "fp8 block":  # a single block has one scale, which may stand for a row as well
            assert row.stored.startswith("fp8")
        else:
            assert row.stored == stored
        assert (row.declared, row.decision) == (declared, "kept")
    sidecars = ("scale", "qzeros", "g_idx", "weight_shape", "zero_point", "_scales")
    assert not [row for row in report.table if row.tensor.endswith(sidecars)]
    (head,) = [row for row in report.table if row.tensor == "draft: lm_head.weight"]
    assert head.decision.startswith("shared: target's lm_head.weight")
    if LAYOUTS[case].head:
        assert head.decision.endswith(stored)


def test_a_group_size_that_is_not_the_stored_one(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = requantize(pair[0], tmp_path, LAYOUTS["awq"])
    edit_json(target / "config.json", quantization_config={**AWQ, "group_size": 128})
    report = check(target, None)
    (finding,) = [f for f in report.findings if f.diagnostic.id == "quant/group-size"]
    assert "groups of 32 columns, declared 128" in finding.diagnostic.render()
    assert report.exit_code == 0


EXCLUSIONS = {
    "a part of a name": {**AWQ, "modules_to_not_convert": ["mlp", "lm_head"]},
    "the middle of a name": {**AWQ, "modules_to_not_convert": ["layers.0.mlp"]},
    "the end of a name": {
        **AWQ,
        "modules_to_not_convert": ["gate_proj", "up_proj", "down_proj"],
    },
    "an expression": {**AWQ, "modules_to_not_convert": [r"model\.layers\.\d+\.mlp"]},
    "an expression with a mark": tensors_config("pack-quantized") | {"ignore": ["re:.*mlp.*"]},
    "dynamic": {**GPTQ, "lm_head": False, "dynamic": {r"-:.*mlp.*": {}, r"+:.*q_proj": {}}},
}


@pytest.mark.parametrize("case", EXCLUSIONS)
def test_modules_that_are_left_out(case: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """All of the attention is packed and nothing else, and the config says so."""
    config = dict(EXCLUSIONS[case])
    method = str(config["quant_method"])
    layout = {"awq": "awq", "gptq": "gptq", "compressed-tensors": "compressed-tensors-int4"}[method]
    if method == "compressed-tensors":
        config["config_groups"] = LAYOUTS[layout].config["config_groups"]
        config["ignore"] = [*config["ignore"], "lm_head"]  # type: ignore[misc]
    target, _ = requantize(pair[0], tmp_path, LAYOUTS[layout], head=False, skip="mlp")
    edit_json(target / "config.json", quantization_config=config)
    report = check(target, None)
    assert report.exit_code == 0
    assert not [f for f in report.findings if f.diagnostic.id.startswith("quant/")]
    for row in report.table:
        if "mlp" in row.tensor:
            assert (row.stored, row.declared) == ("bf16", "unquantized")
        if "q_proj" in row.tensor:
            assert row.stored == "int4"


def test_what_the_config_forgets_to_leave_out(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, _ = requantize(pair[0], tmp_path, LAYOUTS["awq"], skip="mlp")
    report = check(target, None)
    (finding,) = [f for f in report.findings if f.diagnostic.id.startswith("quant/")]
    assert finding.diagnostic.id == "quant/declared-not-stored"
    assert "mlp.down_proj" in finding.diagnostic.render()
