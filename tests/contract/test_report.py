"""What a check of real and of small pairs tells."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from benchmarks.checkpoints.architectures import parameters
from benchmarks.checkpoints.presets import PRESETS
from benchmarks.checkpoints.quantization import Scheme
from hypothesis import given
from hypothesis import strategies as st

from edgecc.contract.report import CheckReport, check
from edgecc.errors import UsageError
from edgecc.frontends.checkpoint import Checkpoint
from helpers.broken_pairs import QUANT, write_pair
from helpers.checkpoints import (
    DROP,
    MASK_ID,
    edit_json,
    edit_tensors,
    hub_layout,
    write_draft,
    write_target,
)
from helpers.command_line import SMALL, TAPS
from helpers.headers import write_headers


def ids(report: CheckReport) -> list[str]:
    return [f.diagnostic.id for f in report.findings]


def decisions(report: CheckReport) -> dict[str, tuple[int, str, str, str]]:
    return {r.tensor: (r.count, r.stored, r.declared, r.decision) for r in report.table}


# --- a pair of full size --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair_27b(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("27b")
    paths = {}
    for role, preset in (("target", "qwen3.8-27b"), ("draft", "qwen3.8-27b-dspark")):
        config = PRESETS[preset]()
        scheme = Scheme(config)
        specs = {
            t.spec.name: (str(t.spec.dtype), tuple(t.spec.shape))
            for parameter in parameters(config)
            for t in scheme.stored(parameter)
        }
        paths[role] = write_headers(folder / role, config, specs)
    return paths


def test_27b_without_reading_weights(
    pair_27b: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty gigabytes that are not there: single scales are all that is read."""
    read = []
    original = Checkpoint.read

    def watched(self: Checkpoint, key: str, *rows: Any) -> Any:
        read.append(self.info(key).nbytes)
        return original(self, key, *rows)

    monkeypatch.setattr(Checkpoint, "read", watched)
    report = check(pair_27b["target"], pair_27b["draft"])
    assert report.exit_code == 0
    assert ids(report) == ["quant/kv-cache"]
    assert set(read) == {4}
    rows = decisions(report)
    layers = "target: model.language_model.layers.*"
    assert rows[f"{layers}.mlp.gate_proj.weight"] == (64, "nvfp4", "NVFP4", "kept")
    assert rows[f"{layers}.self_attn.q_proj.weight"] == (16, "fp8 tensor", "FP8", "kept")
    assert rows["target: model.visual.*"] == (333, "bf16", "", "not read")
    assert rows["draft: fc.weight"] == (1, "bf16", "nothing", "kept")
    head = (1, "not stored", "", "shared: target's lm_head.weight, nvfp4")
    assert rows["draft: lm_head.weight"] == head
    assert len(report.table) < 60


def test_a_block_longer_than_a_call_takes_by_default(tmp_path: Path) -> None:
    """How many rows that is, a compile chooses."""
    target = write_target(tmp_path / "t", layers=4, quantized=False)
    draft = write_draft(tmp_path / "d", block_size=200)
    report = check(target, draft)
    assert report.exit_code == 0
    assert any(row.tensor.startswith("draft: ") for row in report.table)


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["ignore", "exclude_modules", "modules_to_not_convert"])
@pytest.mark.parametrize(
    "pattern", ["lm_head", "*lm_head*", "re:.*lm_head", "model.lm_head", "lm_head*"]
)
def test_exclusions_in_every_dialect(tmp_path: Path, key: str, pattern: str) -> None:
    target = write_target(tmp_path / "t", **SMALL, quantized_head=False)
    (target / "hf_quant_config.json").unlink()
    block = {k: v for k, v in QUANT.items() if k != "ignore"} | {key: [pattern]}
    edit_json(target / "config.json", quantization_config=block)
    report = check(target)
    assert decisions(report)["target: lm_head.weight"] == (1, "bf16", "unquantized", "kept")
    assert "quant/declared-not-stored" not in ids(report)
    assert "quant/unused-pattern" not in ids(report)


def test_an_override_matches_whole_paths_only(tmp_path: Path) -> None:
    """`model.layers.0.*` is not `mtp.layers.0.*`."""
    target = write_target(tmp_path / "t", **SMALL, quantized=False)
    layers = {"mtp.layers.0.*": {"quant_algo": "NVFP4"}}
    block = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    edit_json(target / "config.json", quantization_config=block)
    rows = decisions(check(target))
    row = rows["target: model.layers.0.mlp.up_proj.weight"]
    assert row == (1, "bf16", "unquantized", "kept")


def test_tensors_count_where_the_config_says_otherwise(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", **SMALL)
    (target / "hf_quant_config.json").unlink()
    edit_json(target / "config.json", quantization_config={**QUANT, "quant_algo": "FP8"})
    row = decisions(check(target))["target: lm_head.weight"]
    assert row == (1, "nvfp4", "FP8", "kept as stored, against the config")


def test_a_draft_inherits_nothing(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    rows = decisions(check(target, draft))
    assert rows["target: lm_head.weight"][1:3] == ("nvfp4", "NVFP4")
    linear = {r[1:3] for name, r in rows.items() if name.startswith("draft: ") and "_proj" in name}
    assert linear == {("bf16", "nothing")}


def test_a_packed_head_is_never_taken_by_its_shape(tmp_path: Path) -> None:
    """A draft as wide as the packed head has bytes in a row."""
    target = write_target(tmp_path / "t", **{**SMALL, "hidden": 64})
    draft = write_draft(tmp_path / "d", **SMALL, **TAPS, target_hidden=64)
    report = check(target, draft)
    assert report.exit_code == 3
    assert "bind/hidden-mismatch" in ids(report)


# --- heads ----------------------------------------------------------------------------------------


def test_a_tied_head(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", **SMALL, quantized=False, tied=True)
    report = check(target, write_draft(tmp_path / "d", **SMALL, **TAPS))
    assert report.exit_code == 0
    shared = "shared: target's model.embed_tokens.weight, bf16"
    assert decisions(report)["draft: lm_head.weight"][3] == shared


def test_a_tied_and_quantized_head_is_no_alias(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", **SMALL, tie_word_embeddings=True)
    report = check(target)
    assert report.exit_code == 0
    assert any("is used although tie_word_embeddings is true" in d for d in report.decisions)


def test_a_draft_keeps_its_own_head(tmp_path: Path) -> None:
    draft = write_draft(tmp_path / "d", **SMALL, **TAPS, own_head=True)
    rows = decisions(check(write_target(tmp_path / "t", **SMALL), draft))
    assert rows["draft: lm_head.weight"] == (1, "bf16", "nothing", "kept")


@pytest.mark.parametrize("where", ["config", "tensor"])
def test_a_rotated_target(tmp_path: Path, where: str) -> None:
    target, draft = write_pair(tmp_path)
    for path in (target, draft):
        if where == "config":
            edit_json(path / "config.json", spinquant=True)
        else:
            matrix = {"rotary_emb.hadamard": read(path)}
            edit_tensors(path, lambda tensors, extra=matrix: tensors.update(extra))
        report = check(target, draft)
        if path is target:
            assert report.exit_code == 4
            assert ids(report)[0] == "head/rotated"
            assert "head/rotated" in ids(check(target))
            assert check(target).exit_code == 0
    assert report.exit_code == 0  # both have the mark
    assert "head/rotated" not in ids(report)


def read(path: Path) -> Any:
    with Checkpoint.open(path, role="target") as checkpoint:
        name = next(n for n in checkpoint.tensors if n.endswith("layernorm.weight"))
        return checkpoint.read(name).copy()


@pytest.mark.parametrize(
    "changes", [{"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, {"rotary": 1}]
)
def test_rotary_embeddings_are_no_rotation(tmp_path: Path, changes: dict[str, Any]) -> None:
    target, draft = write_pair(tmp_path)
    edit_json(target / "config.json", **changes, quantization_config={**QUANT, "rotate": False})
    assert check(target, draft).exit_code == 0


# --- draft and target -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "listed"), [("target_layer_ids", [1, 3]), ("aux_hidden_state_layer_ids", [2, 4])]
)
def test_both_conventions_of_layer_numbers(tmp_path: Path, key: str, listed: list[int]) -> None:
    """The same layers: one list counts outputs, the other inputs."""
    target = write_target(tmp_path / "t", **{**SMALL, "layers": 5})
    draft = write_draft(
        tmp_path / "d", **SMALL, target_layers=5, target_layer_ids=(1, 3), mask_token_id=MASK_ID
    )
    edit_json(draft / "config.json", target_layer_ids=DROP)
    edit_json(draft / "config.json", **{key: listed})
    report = check(target, draft)
    assert report.exit_code == 0
    assert any(f"target layers [1, 3] (from 0; read from {key})" in d for d in report.decisions)


def test_one_side_that_cannot_be_opened_does_not_hide_the_other(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    (target / "config.json").unlink()
    edit_tensors(draft, lambda tensors: {n: a for n, a in tensors.items() if n != "norm.weight"})
    report = check(target, draft)
    assert report.exit_code == 3
    assert ids(report)[:2] == ["checkpoint/no-config", "checkpoint/missing-tensor"]
    assert {row.decision for row in report.table} == {"not decided"}


def test_faults_of_many_layers_are_one_finding(tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", **{**SMALL, "layers": 6})
    edit_json(target / "config.json", intermediate_size=48)
    report = check(target)
    shapes = [f.diagnostic for f in report.findings if f.diagnostic.id == "quant/bad-shape"]
    assert len(shapes) == 3  # gate, up and down
    assert all("the same in 5 more" in d.notes[-1] for d in shapes)


# --- folders --------------------------------------------------------------------------------------


def test_odd_and_write_protected_folders(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path / "modèle 模型 (v1)")
    files = [p for p in target.rglob("*") if p.is_file()]
    before = {p: p.stat().st_mtime_ns for p in files}
    for path in (*files, target):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    assert check(target, draft).exit_code == 0
    assert {p: p.stat().st_mtime_ns for p in target.iterdir()} == before


def test_a_hub_cache(tmp_path: Path) -> None:
    target, draft = write_pair(tmp_path)
    caches = [hub_layout(p, tmp_path / f"models--{p.name}") for p in (target, draft)]
    assert check(*caches).exit_code == 0
    assert "checkpoint/no-config" in ids(check(caches[0].parent.parent))


def test_no_path() -> None:
    with pytest.raises(UsageError):
        check("")


# --- any value of any key -------------------------------------------------------------------------

VALUES = (
    *(None, "x", -1, 0, 3, 10**30, 1.5, float("nan"), True, [], {}, [None], "\ud800"),
    *([1, 2], {"a": {"b": 1}}, {"rope_type": "yarn"}, "FP8"),
)


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("any"))


@given(data=st.data())
def test_any_values_of_any_keys(
    shared_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A check always ends with a report, and every error in it says where and what to do."""
    work = tmp_path_factory.mktemp("changed")
    paths = [Path(shutil.copytree(path, work / path.name)) for path in shared_pair]
    names = ("config.json", "generation_config.json", "hf_quant_config.json", "tokenizer.json")
    more = ["has_lm_head", "group_size", "is_causal", "dflash_config", "quantization_config"]
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        path = data.draw(st.sampled_from(paths))
        files = [path / n for n in names if (path / n).exists()]
        file = data.draw(st.sampled_from(files))
        keys = [*json.loads(file.read_text()), *more]
        edit_json(file, **{data.draw(st.sampled_from(keys)): data.draw(st.sampled_from(VALUES))})
    report = check(*paths)
    assert report.exit_code in (0, 3, 4)
    errors = [f for f in report.findings if f.diagnostic.severity == "error"]
    assert bool(errors) is (report.exit_code != 0)
    for finding in report.findings:
        assert finding.rule is not None, finding.diagnostic
        assert finding.diagnostic.where, finding.diagnostic
        assert finding.action, finding.diagnostic
    shutil.rmtree(work)
