"""`edgecc.compile`: what it makes, what it refuses, and that it makes all or nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

import edgecc
from edgecc import device_artifact
from edgecc.backends.bundle import Bundle
from edgecc.backends.runtime.verify import verify_bundle
from edgecc.compile_options import CompileOptions
from edgecc.driver import CompileReport
from edgecc.errors import (
    EdgeccError,
    InputError,
    MismatchError,
    RequestError,
    Severity,
    UnsupportedError,
    UsageError,
)
from edgecc.ir import Unbound, parse_module
from edgecc.roles import Role
from helpers.checkpoints import (
    Tensors,
    edit_json,
    edit_tensors,
    read_tensors,
    write_draft,
    write_target,
)

SMALL: Mapping[str, Any] = {
    "layers": 1,
    "hidden": 32,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "intermediate": 32,
}
LENGTH = 48


def small_target(path: Path, **changes: Any) -> Path:
    return write_target(path, **{**SMALL, **changes})


def small_draft(path: Path, **changes: Any) -> Path:
    one_layer = {"target_layers": 1, "target_layer_ids": (0,)}
    return write_draft(path, **{**SMALL, **one_layer, **changes})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_target(tmp_path_factory.mktemp("driver") / "t")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_draft(tmp_path_factory.mktemp("driver") / "d")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, target: Path, draft: Path) -> CompileReport:
    """The pair, compiled once; not to be changed."""
    out = tmp_path_factory.mktemp("driver") / "bundle"
    return edgecc.compile(target, draft, out=out, max_model_len=LENGTH)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with a head of its own."""
    return small_draft(tmp_path_factory.mktemp("driver") / "own", own_head=True)


def tree(folder: Path) -> dict[str, str]:
    """Every file below a folder with its digest."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def text_of(bundle: Path, **options: Any) -> list[int]:
    """Greedy tokens of a fixed prompt."""
    with edgecc.load(bundle) as generator:
        return generator.generate(
            "def f(x):", max_new_tokens=12, ignore_eos=True, **options
        ).token_ids


class TestReport:
    def test_what_it_tells(self, compiled: CompileReport) -> None:
        assert compiled.bundle is not None
        assert [t.name for t in compiled.timings][:2] == ["bind-shared-weights", "dedupe-weights"]
        assert compiled.pipeline.startswith("bind-shared-weights,dedupe-weights,")
        assert [t.name for t in compiled.timings] == [
            part.partition("{")[0] for part in compiled.pipeline.split(",")
        ]
        assert all(t.seconds >= 0 and t.nodes > 0 for t in compiled.timings)
        assert any(r.pass_name == "fuse-qkv" and r.applied for r in compiled.remarks)
        assert not [f for f in compiled.findings if f.severity is not Severity.NOTE]
        (head,) = [d for d in compiled.decisions if d.startswith("draft.lm_head.weight ->")]
        assert "target.lm_head.weight" in head
        assert "nvfp4" in head
        assert "shared, 0 bytes copied" in head

    def test_the_bundle_is_there(self, compiled: CompileReport) -> None:
        assert compiled.bundle is not None
        path = compiled.bundle.path
        assert Bundle.open(path).manifest == compiled.bundle.manifest
        weights = path / compiled.bundle.manifest["weights"]["target.lm_head.weight"]["file"]
        assert weights.stat().st_size == compiled.weight_bytes
        assert verify_bundle(path, prompts=2, max_new_tokens=8).passed

    def test_the_bundle_has_the_ir(self, compiled: CompileReport) -> None:
        """Before and after the passes, with the checkpoints by name."""
        assert compiled.bundle is not None
        lifted, lowered = (
            parse_module(compiled.bundle.file(f"ir/{name}.eir").read_text("utf-8"))
            for name in ("lifted", "lowered")
        )
        names = {
            r: c["name"] for r, c in compiled.bundle.manifest["provenance"].items() if "name" in c
        }
        assert dict(lifted.checkpoints) == dict(lowered.checkpoints) == names
        assert any(isinstance(w.source, Unbound) for w in lifted.weights.values())
        assert not any(isinstance(w.source, Unbound) for w in lowered.weights.values())
        assert set(compiled.bundle.manifest["weights"]) <= set(lowered.weights)

    def test_the_engine_was_compared(self, compiled: CompileReport) -> None:
        assert compiled.checks
        assert any("logits" in line for line in compiled.checks)

    def test_speculation_changes_nothing(self, compiled: CompileReport) -> None:
        assert compiled.bundle is not None
        path = compiled.bundle.path
        assert text_of(path) == text_of(path, speculation=False)

    def test_progress(self, tmp_path: Path, target: Path, draft: Path) -> None:
        seen: list[tuple[str, int, int]] = []
        edgecc.compile(
            target,
            draft,
            out=tmp_path / "b",
            max_model_len=LENGTH,
            progress=lambda *call: seen.append(call),
        )
        stages = list(dict.fromkeys(stage.split(" ")[0] for stage, _, _ in seen))
        assert stages == ["lift", "check", "pass", "weights", "golden"]
        assert all(0 <= done <= total for _, done, total in seen)

    def test_target_alone(self, tmp_path: Path, target: Path) -> None:
        report = edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH)
        assert report.bundle is not None
        assert report.bundle.manifest["draft"] is None
        assert list(report.bundle.manifest["entries"]) == ["target"]
        assert len(text_of(tmp_path / "b")) == 12
        with edgecc.load(tmp_path / "b") as generator, pytest.raises(RequestError):
            generator.generate("x", num_speculative_tokens=1)

    def test_default_output(
        self, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        report = edgecc.compile(target, max_model_len=LENGTH, verify="none")
        assert report.bundle is not None
        assert report.bundle.path == tmp_path / "t-edgecc"

    def test_checkpoints_are_given_back(self, compiled: CompileReport, target: Path) -> None:
        assert compiled.bundle is not None
        maps = Path("/proc/self/maps")
        if not maps.exists():
            pytest.skip("needs /proc")
        assert str(target) not in maps.read_text()


class TestDryRun:
    def test_nothing_is_written(
        self, tmp_path: Path, target: Path, draft: Path, compiled: CompileReport
    ) -> None:
        before = tree(target), tree(draft)
        report = edgecc.compile(
            target, draft, out=tmp_path / "a" / "b", max_model_len=LENGTH, dry_run=True
        )
        assert report.bundle is None
        assert list(tmp_path.iterdir()) == []
        assert (tree(target), tree(draft)) == before
        assert report.pipeline == compiled.pipeline
        assert report.weight_bytes == compiled.weight_bytes
        assert report.checks == ()
        assert report.decisions[: len(compiled.decisions)] == compiled.decisions

    def test_a_bundle_in_the_way_stays(self, tmp_path: Path, target: Path) -> None:
        edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH, verify="none")
        before = tree(tmp_path)
        edgecc.compile(target, out=tmp_path / "b", max_model_len=20, dry_run=True)
        assert tree(tmp_path) == before


REFUSED: Mapping[str, tuple[dict[str, Any], type[EdgeccError], str]] = {
    "no length": ({"max_model_len": 0}, UsageError, "usage/not-positive"),
    "negative": ({"max_input_len": -4}, UsageError, "usage/not-positive"),
    "no tokens": ({"num_speculative_tokens": 0}, UsageError, "usage/not-positive"),
    "a fraction": ({"max_model_len": 64.0}, UsageError, "usage/not-positive"),
    "a string": ({"max_model_len": "64"}, UsageError, "usage/not-positive"),
    "a boolean": ({"num_speculative_tokens": True}, UsageError, "usage/not-positive"),
    "no chunk": ({"prefill_chunk": None}, UsageError, "usage/not-positive"),
    "one token": ({"max_model_len": 1}, UsageError, "usage/max-model-len"),
    "longer than trained": ({"max_model_len": 513}, UsageError, "usage/max-model-len"),
    "absurdly long": ({"max_model_len": 10**30}, UsageError, "usage/max-model-len"),
    "prompt fills all": (
        {"max_model_len": 48, "max_input_len": 48},
        UsageError,
        "usage/max-input-len",
    ),
    "prompt longer than all": ({"max_input_len": 4096}, UsageError, "usage/max-input-len"),
    "beyond the block": ({"num_speculative_tokens": 5}, UsageError, "usage/speculative-tokens"),
    "chunk below the block": ({"prefill_chunk": 4}, UsageError, "usage/prefill-chunk"),
    "unknown option": ({"max_len": 64}, UsageError, "usage/unknown-option"),
    "unknown head": ({"lm_head": "borrow"}, UsageError, "usage/bad-choice"),
    "unknown check": ({"verify": "maybe"}, UsageError, "usage/bad-choice"),
    "unknown form": ({"linear_form": "int3"}, UsageError, "usage/bad-choice"),
    "unknown device": ({"device": "abacus"}, UnsupportedError, "device/unknown"),
    "unknown format": ({"quantization": "int3"}, UsageError, "usage/bad-choice"),
    "unknown format of the draft": ({"draft_quantization": "x"}, UsageError, "usage/bad-choice"),
    "head without a format": ({"quantize_head": True}, UsageError, "usage/quantize-head"),
    "quantized already": ({"quantization": "fp8"}, UsageError, "usage/nothing-to-quantize"),
    "no own head": ({"lm_head": "own"}, InputError, "bind/no-own-head"),
}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_refused_options(
    tmp_path: Path, target: Path, draft: Path, name: str, dry_run: bool
) -> None:
    options, error, id = REFUSED[name]
    with pytest.raises(error) as caught:
        edgecc.compile(target, draft, out=tmp_path / "new" / "b", dry_run=dry_run, **options)
    assert caught.value.id == id
    assert list(tmp_path.iterdir()) == []


def test_unknown_options_list_the_known_ones(target: Path) -> None:
    with pytest.raises(UsageError) as caught:
        edgecc.compile(target, max_len=64)
    for name in CompileOptions.__dataclass_fields__:
        assert name in caught.value.diagnostics[0].help


@pytest.mark.parametrize(
    ("options", "id"),
    [
        ({"lm_head": "share"}, "usage/lm-head"),
        ({"lm_head": "copy"}, "usage/lm-head"),
        ({"lm_head": "own"}, "usage/lm-head"),
        ({"num_speculative_tokens": 2}, "usage/speculative-tokens"),
        ({"draft_quantization": "fp8"}, "usage/draft-quantization"),
    ],
)
def test_options_that_need_a_draft(
    tmp_path: Path, target: Path, options: dict[str, Any], id: str
) -> None:
    with pytest.raises(UsageError) as caught:
        edgecc.compile(target, out=tmp_path / "b", **options)
    assert caught.value.id == id


class TestHead:
    """`lm_head`: where the draft's head comes from."""

    def compile(self, target: Path, draft: Path, out: Path, lm_head: str) -> CompileReport:
        return edgecc.compile(target, draft, out=out, max_model_len=LENGTH, lm_head=lm_head)

    def test_sharing_and_copying_give_the_same_text(
        self, tmp_path: Path, target: Path, draft: Path
    ) -> None:
        reports = {
            choice: self.compile(target, draft, tmp_path / choice, choice)
            for choice in ("auto", "share", "copy")
        }
        texts = [text_of(tmp_path / choice) for choice in reports]
        assert texts[0] == texts[1] == texts[2]
        assert reports["auto"].weight_bytes == reports["share"].weight_bytes
        manifest = json.loads((tmp_path / "auto" / "bundle.json").read_text())
        head = manifest["weights"]["target.lm_head.weight"]
        embedding = manifest["weights"]["target.model.embed_tokens.weight"]
        extra = reports["copy"].weight_bytes - reports["share"].weight_bytes
        assert extra >= head["bytes"] + embedding["bytes"]

    def test_an_own_head_is_kept(self, tmp_path: Path, target: Path, own: Path) -> None:
        for choice in ("auto", "own"):
            self.compile(target, own, tmp_path / choice, choice)
            manifest = json.loads((tmp_path / choice / "bundle.json").read_text())
            assert manifest["weights"]["draft.lm_head.weight"]["users"] == ["draft"]
            assert manifest["weights"]["target.lm_head.weight"]["users"] == ["target"]

    @pytest.mark.parametrize("choice", ["share", "copy"])
    def test_an_own_head_is_never_replaced(
        self, tmp_path: Path, target: Path, own: Path, choice: str
    ) -> None:
        with pytest.raises(InputError, match="ships its own lm_head") as caught:
            self.compile(target, own, tmp_path / "b", choice)
        assert caught.value.id == "bind/has-own-head"

    def test_equal_bytes_are_stored_once(self, tmp_path: Path) -> None:
        """A frozen copy that a draft ships costs nothing."""
        target = small_target(tmp_path / "t", hidden=128, quantized=False)
        draft = small_draft(tmp_path / "d", hidden=128)
        borrowed = edgecc.compile(target, draft, out=tmp_path / "a", max_model_len=LENGTH)
        tables = read_tensors(target)

        def ship(tensors: Tensors) -> None:
            tensors["lm_head.weight"] = tables["lm_head.weight"]
            tensors["embed_tokens.weight"] = tables["model.embed_tokens.weight"]

        edit_tensors(draft, ship)
        shipped = edgecc.compile(target, draft, out=tmp_path / "b", max_model_len=LENGTH)
        assert shipped.weight_bytes == borrowed.weight_bytes
        assert text_of(tmp_path / "a") == text_of(tmp_path / "b")


class TestSizes:
    """Sizes at the edge of what a model and an engine can do."""

    @pytest.mark.parametrize("length", [2, 3, 5, 6])
    def test_the_shortest_models(
        self, tmp_path: Path, target: Path, draft: Path, length: int
    ) -> None:
        edgecc.compile(target, draft, out=tmp_path / "b", max_model_len=length)
        with edgecc.load(tmp_path / "b") as generator:
            result = generator.generate(token_ids=[7], max_new_tokens=50, ignore_eos=True)
            assert len(result.token_ids) == length - 1
            plain = generator.generate(
                token_ids=[7], max_new_tokens=50, ignore_eos=True, speculation=False
            )
            assert result.token_ids == plain.token_ids

    def test_a_model_trained_for_few_positions(self, tmp_path: Path, draft: Path) -> None:
        target = small_target(tmp_path / "t", max_position_embeddings=4)
        report = edgecc.compile(target, draft, out=tmp_path / "b")
        assert report.bundle is not None
        assert report.bundle.manifest["limits"]["max_model_len"] == 4
        assert report.bundle.manifest["limits"]["max_input_len"] == 3

    @pytest.mark.parametrize("chunk", [1, 3])
    def test_prefill_chunks(
        self, tmp_path: Path, target: Path, compiled: CompileReport, chunk: int
    ) -> None:
        assert compiled.bundle is not None
        edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH, prefill_chunk=chunk)
        assert text_of(tmp_path / "b") == text_of(compiled.bundle.path)

    def test_the_smallest_chunk_of_a_pair(
        self, tmp_path: Path, target: Path, draft: Path, compiled: CompileReport
    ) -> None:
        assert compiled.bundle is not None
        out = tmp_path / "b"
        edgecc.compile(target, draft, out=out, max_model_len=LENGTH, prefill_chunk=5)
        assert text_of(out) == text_of(compiled.bundle.path)

    @pytest.mark.parametrize("steps", [1, 3])
    def test_fewer_proposals(
        self, tmp_path: Path, target: Path, draft: Path, compiled: CompileReport, steps: int
    ) -> None:
        assert compiled.bundle is not None
        out = tmp_path / "b"
        edgecc.compile(target, draft, out=out, max_model_len=LENGTH, num_speculative_tokens=steps)
        assert text_of(out) == text_of(compiled.bundle.path)
        with edgecc.load(out) as generator:
            stats = generator.generate("x", max_new_tokens=9, ignore_eos=True).stats
            assert max(stats.proposed_by_round) == steps
            with pytest.raises(RequestError):
                generator.generate("x", num_speculative_tokens=steps + 1)

    @pytest.mark.parametrize("head_dim", [2, 8, 24])
    def test_heads_the_fused_kernel_does_not_take(
        self, tmp_path: Path, target: Path, draft: Path, head_dim: int
    ) -> None:
        """On either side: the other one still uses the fused kernel."""
        odd_target = small_target(tmp_path / "t", head_dim=head_dim, quantized=False)
        odd_draft = small_draft(tmp_path / "d", head_dim=head_dim, block_size=3)
        for pair in ((odd_target, draft), (target, odd_draft)):
            out = tmp_path / "b"
            edgecc.compile(*pair, out=out, max_model_len=LENGTH, verify="full")
            assert verify_bundle(out, prompts=2, max_new_tokens=8).passed

    def test_a_block_of_one_and_a_vocabulary_of_one(self, tmp_path: Path) -> None:
        target = small_target(
            tmp_path / "t", vocab=1, tokenizer=False, bos_token_id=0, eos_token_id=0
        )
        draft = small_draft(tmp_path / "d", vocab=1, mask_token_id=0, block_size=1, markov_rank=1)
        edit_json(draft / "config.json", bos_token_id=0, eos_token_id=0)
        edgecc.compile(target, draft, out=tmp_path / "b", max_model_len=LENGTH)
        with edgecc.load(tmp_path / "b") as generator:
            result = generator.generate(token_ids=[0], max_new_tokens=5, ignore_eos=True)
            assert result.token_ids == [0] * 5
            assert generator.generate(token_ids=[0]).finish_reason == "stop"

    def test_a_draft_that_ends_before_its_block_fits(self, tmp_path: Path, target: Path) -> None:
        draft = small_draft(tmp_path / "d", max_position_embeddings=3)
        edgecc.compile(target, draft, out=tmp_path / "b", max_model_len=LENGTH)
        with edgecc.load(tmp_path / "b") as generator:
            result = generator.generate("abc", max_new_tokens=9, ignore_eos=True)
        assert set(result.stats.proposed_by_round) == {0}


class TestPaddingRows:
    """Rows of the vocabulary that no token has."""

    def test_they_are_never_chosen(self, tmp_path: Path) -> None:
        target = small_target(tmp_path / "t", quantized=False)
        draft = small_draft(tmp_path / "d")

        def loud(tensors: Tensors) -> None:
            """Three padding rows with the largest logits, whatever comes in."""
            head = tensors["lm_head.weight"]
            head[270] = head[258] * 40
            head[271] = -head[270]
            head[287] = head[0] * 40

        edit_tensors(target, loud)
        edgecc.compile(target, draft, out=tmp_path / "b", max_model_len=LENGTH)
        with edgecc.load(tmp_path / "b") as generator:
            logits = generator.engine.entry("target").run(
                {
                    Role.TOKEN_IDS: np.array([[1, 2, 3]]),
                    Role.CACHE_LENGTH: np.zeros(1, dtype=np.int64),
                    Role.LOGIT_ROWS: np.arange(3),
                },
                [Role.LOGITS],
            )[Role.LOGITS]
            assert logits[0].argmax(axis=-1).min() >= 259
            for speculation in (True, False):
                result = generator.generate(
                    "abc", max_new_tokens=30, ignore_eos=True, speculation=speculation
                )
                assert max(result.token_ids) < 259


class TestOutput:
    """Where a bundle goes, and that nothing else is ever touched."""

    def test_new_parents(self, tmp_path: Path, target: Path) -> None:
        out = tmp_path / "a" / "b" / "c"
        edgecc.compile(target, out=out, max_model_len=LENGTH, verify="none")
        assert Bundle.open(out).path == out

    def test_parents_of_nothing_go_away_again(self, tmp_path: Path, target: Path) -> None:
        with pytest.raises(UsageError):
            edgecc.compile(target, out=tmp_path / "a" / "b" / "c", max_model_len=1)
        assert list(tmp_path.iterdir()) == []

    def test_names_that_are_not_ascii(self, tmp_path: Path) -> None:
        folder = tmp_path / "modèle 模型 (v1)"
        target = small_target(folder / "t é")
        edgecc.compile(target, out=folder / "b ü", max_model_len=LENGTH)
        assert len(text_of(folder / "b ü")) == 12

    @pytest.mark.parametrize("force", [False, True])
    @pytest.mark.parametrize("dry_run", [False, True])
    def test_a_foreign_directory(
        self, tmp_path: Path, target: Path, force: bool, dry_run: bool
    ) -> None:
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "thesis.tex").write_text("precious")
        with pytest.raises(UsageError) as caught:
            edgecc.compile(
                target, out=tmp_path / "b", max_model_len=LENGTH, force=force, dry_run=dry_run
            )
        assert caught.value.id == "bundle/foreign-directory"
        assert (tmp_path / "b" / "thesis.tex").read_text() == "precious"

    def test_a_bundle_with_foreign_files(self, tmp_path: Path, target: Path) -> None:
        out = tmp_path / "b"
        edgecc.compile(target, out=out, max_model_len=LENGTH, verify="none")
        (out / "notes.txt").write_text("mine")
        before = tree(out)
        with pytest.raises(UsageError, match="1 file that edgecc did not make"):
            edgecc.compile(target, out=out, max_model_len=LENGTH, verify="none")
        assert tree(out) == before
        edgecc.compile(target, out=out, max_model_len=LENGTH, verify="none", force=True)
        assert not (out / "notes.txt").exists()

    @pytest.mark.parametrize("dry_run", [False, True])
    @pytest.mark.parametrize(
        "where", ["target", "target/out", "target/a/b", "draft", "draft/b", "link/b"]
    )
    def test_nothing_goes_into_a_checkpoint(
        self, tmp_path: Path, where: str, dry_run: bool
    ) -> None:
        target, draft = small_target(tmp_path / "target"), small_draft(tmp_path / "draft")
        (tmp_path / "link").symlink_to(target)
        before = tree(tmp_path)
        with pytest.raises(UsageError, match="lies in the checkpoint folder") as caught:
            edgecc.compile(target, draft, out=tmp_path / where, dry_run=dry_run)
        assert caught.value.id == "usage/output-in-checkpoint"
        with pytest.raises(UsageError, match="--dump-ir"):
            edgecc.compile(
                target, draft, out=tmp_path / "b", dump_ir=tmp_path / where, dry_run=dry_run
            )
        assert tree(tmp_path) == before

    def test_the_parent_of_a_checkpoint(self, tmp_path: Path) -> None:
        target = small_target(tmp_path / "models" / "t")
        with pytest.raises(UsageError) as caught:
            edgecc.compile(target, out=tmp_path / "models", force=True)
        assert caught.value.id == "bundle/foreign-directory"
        assert target.is_dir()

    def test_inside_of_a_bundle(self, tmp_path: Path, target: Path) -> None:
        out = tmp_path / "b"
        edgecc.compile(target, out=out, max_model_len=LENGTH, verify="none")
        before = tree(out)
        for options in ({"out": out / "c"}, {"out": tmp_path / "c", "dump_ir": out / "ir"}):
            with pytest.raises(UsageError, match="lies in the bundle"):
                edgecc.compile(target, max_model_len=LENGTH, **options)
        assert tree(out) == before

    @pytest.mark.parametrize("below", ["", "b", "b/c"])
    def test_a_file_in_the_way(self, tmp_path: Path, target: Path, below: str) -> None:
        (tmp_path / "file").write_text("x")
        for options in (
            {"out": tmp_path / "file" / below},
            {"out": tmp_path / "b", "dump_ir": tmp_path / "file" / below},
        ):
            with pytest.raises(UsageError, match="file"):
                edgecc.compile(target, max_model_len=LENGTH, **options)
        assert (tmp_path / "file").read_text() == "x"
        assert not (tmp_path / "b").exists()

    @pytest.mark.parametrize("bad", ["", "a\0b", "a\udcffb"])
    def test_no_path(
        self, tmp_path: Path, target: Path, bad: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError) as caught:
            edgecc.compile(target, out=bad, max_model_len=LENGTH)
        assert caught.value.id == "usage/bad-path"
        if bad != "a\udcffb":
            for paths in ((bad, target), (target, bad)):
                with pytest.raises(UsageError, match="path is"):
                    edgecc.compile(*paths, out="b", max_model_len=LENGTH)
            with pytest.raises(UsageError, match="IR dump path"):
                edgecc.compile(target, out="b", max_model_len=LENGTH, dump_ir=bad)
        assert list(tmp_path.iterdir()) == []

    def test_through_a_link(self, tmp_path: Path, target: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        edgecc.compile(target, out=tmp_path / "link", max_model_len=LENGTH, verify="none")
        assert (tmp_path / "link").is_symlink()
        assert Bundle.open(tmp_path / "real").manifest["draft"] is None

    def test_dump_ir(self, tmp_path: Path, target: Path, draft: Path) -> None:
        report = edgecc.compile(
            target,
            draft,
            out=tmp_path / "b",
            max_model_len=LENGTH,
            dump_ir=tmp_path / "x" / "ir",
            dry_run=True,
        )
        names = sorted(p.name for p in (tmp_path / "x" / "ir").iterdir())
        assert names[0] == "000-input.eir"
        assert [n[4:-4] for n in names[1:]] == [t.name for t in report.timings]
        assert not (tmp_path / "b").exists()


class TestInterrupted:
    """All or nothing."""

    STAGES = ("lift", "check", "pass", "weights", "golden")

    def stopping_at(self, name: str, error: type[BaseException]) -> Callable[[str, int, int], None]:
        def progress(stage: str, done: int, total: int) -> None:
            if stage.startswith(name):
                raise error

        return progress

    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
    def test_nothing_is_left(
        self, tmp_path: Path, target: Path, draft: Path, stage: str, error: type[BaseException]
    ) -> None:
        with pytest.raises(error):
            edgecc.compile(
                target,
                draft,
                out=tmp_path / "new" / "b",
                max_model_len=LENGTH,
                progress=self.stopping_at(stage, error),
            )
        assert list(tmp_path.iterdir()) == []

    def test_an_old_bundle_stays(self, tmp_path: Path, target: Path, draft: Path) -> None:
        out = tmp_path / "b"
        edgecc.compile(target, out=out, max_model_len=LENGTH)
        before = tree(tmp_path)
        for stage in self.STAGES:
            with pytest.raises(KeyboardInterrupt):
                edgecc.compile(
                    target,
                    draft,
                    out=out,
                    max_model_len=LENGTH,
                    progress=self.stopping_at(stage, KeyboardInterrupt),
                )
            assert tree(tmp_path) == before
        edgecc.compile(target, draft, out=out, max_model_len=LENGTH)
        assert Bundle.open(out).manifest["draft"] is not None

    def test_a_signal(self, tmp_path: Path, target: Path) -> None:
        """A process that is told to end while it writes."""
        program = (
            "import os, signal, sys, edgecc\n"
            "def progress(stage, done, total):\n"
            "    if stage == 'golden':\n"
            "        os.kill(os.getpid(), signal.SIGTERM)\n"
            "edgecc.compile(sys.argv[1], out=sys.argv[2], max_model_len=48, progress=progress)\n"
        )
        out = tmp_path / "b"
        edgecc.compile(target, out=out, max_model_len=20, verify="none")
        before = tree(tmp_path)
        ended = subprocess.run(
            [sys.executable, "-c", program, str(target), str(out)],
            capture_output=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert ended.returncode == 143, ended.stderr.decode()
        assert tree(tmp_path) == before

    def test_two_at_once(self, tmp_path: Path, target: Path, draft: Path) -> None:
        """The last to finish wins, and both succeed."""
        errors: list[BaseException] = []

        def run(length: int) -> None:
            try:
                edgecc.compile(target, draft, out=tmp_path / "b", max_model_len=length)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(length,)) for length in (30, 40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert [p.name for p in tmp_path.iterdir()] == ["b"]
        assert Bundle.open(tmp_path / "b").manifest["limits"]["max_model_len"] in (30, 40)
        assert verify_bundle(tmp_path / "b", prompts=1, max_new_tokens=4).passed


class TestVerify:
    def perturb(self, name: str, change: float) -> Callable[..., bytes]:
        def make(*arguments: Any) -> bytes:
            golden = load(real(*arguments))
            golden[name] = (golden[name] + np.asarray(change)).astype(golden[name].dtype)
            return bytes(save(golden))

        real = device_artifact.golden_rows
        return make

    @pytest.mark.parametrize(
        ("name", "change", "words"),
        [
            ("logits", 1.0, "target logits: FAILED"),
            ("hidden_tap", 1.0, "target hidden states: FAILED"),
            ("proposals", 1.0, "draft proposals: FAILED"),
        ],
    )
    def test_an_engine_that_differs(
        self,
        tmp_path: Path,
        target: Path,
        draft: Path,
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        change: float,
        words: str,
    ) -> None:
        out = tmp_path / "b"
        edgecc.compile(target, draft, out=out, max_model_len=20, verify="none")
        before = tree(tmp_path)
        monkeypatch.setattr(device_artifact, "golden_rows", self.perturb(name, change))
        with pytest.raises(MismatchError) as caught:
            edgecc.compile(target, draft, out=out, max_model_len=LENGTH)
        assert caught.value.exit_code == 5
        assert any(words in note for note in caught.value.diagnostics[0].notes)
        assert tree(tmp_path) == before

    def test_large_bundles_are_checked_on_request(
        self, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(device_artifact, "ENGINE_CHECK_BYTES", 0)
        monkeypatch.setattr(device_artifact, "golden_rows", self.perturb("logits", 1.0))
        report = edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH)
        assert "edgecc verify" in report.decisions[-1]
        with pytest.raises(MismatchError):
            edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH, verify="full")

    def test_without_golden_rows(self, tmp_path: Path, target: Path) -> None:
        report = edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH, verify="none")
        assert report.bundle is not None
        assert "golden.safetensors" not in report.bundle.manifest["files"]
        assert verify_bundle(tmp_path / "b", prompts=1).passed


class TestValues:
    """Damage that has the right shape."""

    @pytest.mark.parametrize("dry_run", [False, True])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize(
        ("side", "name"),
        [
            ("target", "model.norm.weight"),
            ("target", "model.embed_tokens.weight"),
            ("draft", "markov_head.markov_w2.weight"),
            ("draft", "layers.0.self_attn.k_norm.weight"),
        ],
    )
    def test_a_value_that_is_no_number(
        self, tmp_path: Path, side: str, name: str, value: float, dry_run: bool
    ) -> None:
        paths = {"target": small_target(tmp_path / "t"), "draft": small_draft(tmp_path / "d")}

        def damage(tensors: Tensors) -> None:
            tensors[name].reshape(-1)[-1] = value

        edit_tensors(paths[side], damage)
        with pytest.raises(InputError) as caught:
            edgecc.compile(paths["target"], paths["draft"], out=tmp_path / "b", dry_run=dry_run)
        assert caught.value.id == "checkpoint/not-finite"
        assert caught.value.diagnostics[0].where == f"{side}/model.safetensors: {name}"

    def test_values_that_overflow(self, tmp_path: Path) -> None:
        target = small_target(tmp_path / "t", quantized=False)

        def scale(tensors: Tensors) -> None:
            tensors["lm_head.weight"] = np.full((288, 32), 3e38, dtype=np.float32)

        with pytest.raises(InputError, match="overflow float32") as caught:
            edgecc.compile(edit_tensors(target, scale), out=tmp_path / "b", max_model_len=LENGTH)
        assert caught.value.id == "golden/not-finite"
        assert not (tmp_path / "b").exists()


class TestTokenizer:
    def test_none(self, tmp_path: Path) -> None:
        target = small_target(tmp_path / "t", tokenizer=False)
        report = edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH)
        (note,) = [f for f in report.findings if f.id == "tokenizer/missing"]
        assert note.severity is Severity.NOTE
        with edgecc.load(tmp_path / "b") as generator:
            assert len(generator.generate(token_ids=[1], max_new_tokens=3).token_ids) == 3
            with pytest.raises(RequestError, match="no tokenizer"):
                generator.generate("x")

    @pytest.mark.parametrize("dry_run", [False, True])
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("tokenizer.json", '{"model": {"vocab": {"a": 0}}}'),
            ("tokenizer.json", '{"version": "1.0"}'),
            ("tokenizer.json", '{"model": {"type": "Nonsense", "vocab": {"a": 0}}}'),
            ("tokenizer_config.json", "[]"),
            ("tokenizer_config.json", "{"),
            ("tokenizer_config.json", "[" * 100_000),
            ("tokenizer_config.json", '{"chat_template": [1, 2]}'),
        ],
        ids=range(7),
    )
    def test_one_the_runtime_could_not_open(
        self, tmp_path: Path, name: str, text: str, dry_run: bool
    ) -> None:
        target = small_target(tmp_path / "t")
        (target / "chat_template.jinja").unlink()
        (target / name).write_text(text)
        with pytest.raises(InputError) as caught:
            edgecc.compile(target, out=tmp_path / "b", dry_run=dry_run)
        assert caught.value.diagnostics[0].where.startswith(f"target/{name}")
        assert not (tmp_path / "b").exists()

    def test_a_template_that_is_not_jinja_only_stops_chats(self, tmp_path: Path) -> None:
        target = small_target(tmp_path / "t")
        (target / "chat_template.jinja").write_text("{% for m in %}")
        report = edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH)
        (warning,) = [f for f in report.findings if f.id == "chat/template-syntax"]
        assert warning.severity is Severity.WARNING
        assert len(text_of(tmp_path / "b")) == 12
        with pytest.raises(InputError) as caught:
            edgecc.compile(target, out=tmp_path / "c", max_model_len=LENGTH, strict=True)
        assert caught.value.id == "chat/template-syntax"
        assert not (tmp_path / "c").exists()

    @staticmethod
    def add(target: Path, ids: Iterable[int]) -> Path:
        tokenizer = json.loads((target / "tokenizer.json").read_text())
        special = tokenizer["added_tokens"][0]
        tokenizer["added_tokens"] += [{**special, "id": i, "content": f"<{i}>"} for i in ids]
        (target / "tokenizer.json").write_text(json.dumps(tokenizer))
        return target

    def test_tokens_without_a_row(self, tmp_path: Path) -> None:
        target = self.add(small_target(tmp_path / "t"), range(259, 290))
        report = edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH)
        (finding,) = [f for f in report.findings if f.id == "tokenizer/tokens-without-row"]
        assert finding.notes == ("'<288>' is 288", "'<289>' is 289")
        with edgecc.load(tmp_path / "b") as generator:
            assert generator.model.num_tokens == 288
            assert generator.generate("a<287>b", max_new_tokens=2).token_ids
            with pytest.raises(RequestError, match="token id 288 at position 1"):
                generator.generate("a<288>b")

    def test_tokens_that_would_get_other_ids(self, tmp_path: Path) -> None:
        """The tokenizers library numbers added tokens itself where the file leaves a gap."""
        target = self.add(small_target(tmp_path / "t"), [270, 271])
        report = edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH)
        (finding,) = [f for f in report.findings if f.id == "tokenizer/other-ids"]
        assert finding.severity is Severity.WARNING
        assert finding.notes == ("'<270>' is declared as 270", "'<271>' is declared as 271")


class TestStrict:
    def test_warnings_become_errors(self, tmp_path: Path) -> None:
        target = small_target(tmp_path / "t", attention_bias=True)
        report = edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH)
        assert [f.id for f in report.findings if f.severity is Severity.WARNING] == [
            "config/bias-flag"
        ]
        for dry_run in (False, True):
            with pytest.raises(InputError, match="attention_bias is true") as caught:
                edgecc.compile(target, out=tmp_path / "c", strict=True, dry_run=dry_run)
            assert caught.value.diagnostics[0].severity is Severity.ERROR

    def test_a_missing_frequency_base(self, tmp_path: Path) -> None:
        target = small_target(tmp_path / "t", rope_parameters={"rope_type": "default"})
        report = edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH)
        assert "rope/default-theta" in [f.id for f in report.findings]

    def test_notes_stay_notes(self, tmp_path: Path) -> None:
        target = small_target(tmp_path / "t", tokenizer=False)
        edgecc.compile(target, out=tmp_path / "b", max_model_len=LENGTH, strict=True)


class TestDeterminism:
    def test_equal_inputs_give_equal_bytes(
        self, tmp_path: Path, target: Path, draft: Path, compiled: CompileReport
    ) -> None:
        """Other folder, other process, other hash seed, other working directory, other locale."""
        assert compiled.bundle is not None
        program = (
            "import sys, edgecc; edgecc.compile(*sys.argv[1:3], out='again', max_model_len=48)"
        )
        subprocess.run(
            [sys.executable, "-c", program, str(target), str(draft)],
            check=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTHONHASHSEED": "77",
                "LC_ALL": "C",
                "TZ": "Asia/Tokyo",
            },
        )
        assert tree(tmp_path / "again") == tree(compiled.bundle.path)

    def test_no_time_and_no_place(self, compiled: CompileReport, target: Path) -> None:
        assert compiled.bundle is not None
        text = (compiled.bundle.path / "bundle.json").read_text()
        for word in (str(target.parent), str(compiled.bundle.path), os.path.expanduser("~")):
            assert word not in text

    def test_other_options_give_another_bundle(
        self, tmp_path: Path, target: Path, draft: Path, compiled: CompileReport
    ) -> None:
        assert compiled.bundle is not None
        edgecc.compile(target, draft, out=tmp_path / "b", max_model_len=LENGTH - 1)
        assert tree(tmp_path / "b") != tree(compiled.bundle.path)


def test_lift_is_the_frontends_lift(target: Path, draft: Path) -> None:
    module = edgecc.lift(target, draft, max_model_len=20, num_speculative_tokens=2)
    assert list(module.graphs) == ["target", "draft"]
    limits = module.metadata["limits"]
    assert isinstance(limits, dict)
    assert limits["max_model_len"] == 20


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_checkpoint_whose_name_is_no_unicode(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 can be in names of folders; they get into the bundle's own texts."""
    plain = small_target(tmp_path / "t")
    odd = plain.rename(tmp_path / b"t\xff".decode("utf-8", "surrogateescape"))
    report = edgecc.compile(odd, out=tmp_path / "b", max_model_len=LENGTH, dump_ir=tmp_path / "ir")
    assert report.bundle is not None
    assert Bundle.open(tmp_path / "b").manifest["provenance"]["target"]["name"] == odd.name
    assert len(text_of(tmp_path / "b")) == 12
    text = (tmp_path / "ir" / "000-input.eir").read_text("utf-8")
    assert parse_module(text).name == odd.name
