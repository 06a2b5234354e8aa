"""`edgecc compile`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from edgecc.backends.bundle import Bundle
from edgecc.cli import main
from helpers.checkpoints import edit_tensors, write_draft, write_target
from helpers.command_line import SMALL, TAPS, Command
from helpers.eagle3 import write_eagle3
from helpers.hybrid import write_hybrid_target

FAST = ("--max-model-len", 24, "--verify", "none")


class TestOk:
    def test_pair(self, edgecc: Command, tmp_path: Path, target: Path, draft: Path) -> None:
        out = tmp_path / "b"
        result = edgecc("compile", target, "--draft", draft, "-o", out, "--max-model-len", 24)
        assert (result.code, result.out) == (0, "")
        assert result.last.startswith(f"edgecc: ok {out}: ")
        assert result.last.endswith(" MB of weights")
        stages = [line for line in result.err.splitlines() if line.startswith("edgecc: ")][:-1]
        assert stages == [f"edgecc: {s}" for s in ("lift", "check", "pass", "weights", "golden")]
        assert "  draft.lm_head.weight -> target.lm_head.weight (lm_head, nvfp4" in result.err
        assert Bundle.open(out).manifest["draft"]["num_speculative_tokens"] == 4

    def test_json(self, edgecc: Command, tmp_path: Path, target: Path, draft: Path) -> None:
        out = tmp_path / "b"
        result = edgecc("compile", target, "--draft", draft, "-o", out, *FAST, "--json")
        assert result.out.count("\n") == 1
        found = json.loads(result.out)
        names = {"bundle", "weight_bytes", "pipeline", "decisions", "findings", "engines"}
        assert set(found) == {*names, "memory"}
        assert [m["device"] for m in found["memory"]] == ["cpu"]
        assert found["engines"] == []  # those that a builder makes
        assert found["bundle"] == str(out)
        assert found["weight_bytes"] > 0
        assert found["findings"] == []

    def test_quiet(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        result = edgecc("compile", target, "-o", tmp_path / "b", *FAST, "-q")
        assert (result.code, result.out, result.err) == (0, "", "")

    def test_no_progress(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        result = edgecc("compile", target, "-o", tmp_path / "b", *FAST, "--progress", "none")
        assert "edgecc: lift" not in result.err

    def test_remarks(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        result = edgecc("compile", target, "-o", tmp_path / "b", *FAST, "-vv")
        assert "  fuse-qkv: applied at @target" in result.err

    def test_warnings_are_shown(self, edgecc: Command, tmp_path: Path) -> None:
        target = write_target(tmp_path / "t", **SMALL, attention_bias=True)
        result = edgecc("compile", target, "-o", tmp_path / "b", *FAST)
        assert result.code == 0
        assert "warning[config/bias-flag]: attention_bias is true" in result.err
        strict = edgecc("compile", target, "-o", tmp_path / "c", *FAST, "--strict")
        assert (strict.code, strict.id) == (3, "config/bias-flag")
        assert not (tmp_path / "c").exists()

    def test_default_output(
        self, edgecc: Command, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert edgecc("compile", target, *FAST).code == 0
        assert Bundle.open(tmp_path / "target-edgecc").path

    def test_dry_run(self, edgecc: Command, tmp_path: Path, target: Path, draft: Path) -> None:
        flags = ("--draft", draft, "-o", tmp_path / "b", "--dry-run", "--json")
        result = edgecc("compile", target, *flags)
        assert result.code == 0
        assert json.loads(result.out)["bundle"] is None
        assert result.last.endswith("nothing written")
        assert list(tmp_path.iterdir()) == []

    def test_timings(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        file = tmp_path / "t.json"
        flags = ("-o", tmp_path / "b", "--dry-run", "--timing-json", file)
        assert edgecc("compile", target, *flags).code == 0
        rows = json.loads(file.read_text())
        assert rows[0]["name"] == "bind-shared-weights"
        keys = {"name", "seconds", "peak_bytes", "nodes", "weights", "changed", "check_seconds"}
        assert set(rows[0]) == keys

    def test_dump_ir(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        flags = ("-o", tmp_path / "b", "--dry-run", "--dump-ir", tmp_path / "ir")
        assert edgecc("compile", target, *flags).code == 0
        assert (tmp_path / "ir" / "000-input.eir").is_file()

    @pytest.mark.parametrize("flag", ["--model", "--model-dir", "--model-path"])
    def test_other_names_of_target(
        self, edgecc: Command, tmp_path: Path, target: Path, flag: str
    ) -> None:
        assert edgecc("compile", flag, target, "-o", tmp_path / "b", "--dry-run").code == 0
        assert edgecc("compile", target, flag, target, "-o", tmp_path / "b", "--dry-run").code == 0

    @pytest.mark.parametrize(
        ("flag", "value", "key"),
        [
            ("--max-seq-len", 33, "max_model_len"),
            ("--max-kv-cache-capacity", 33, "max_model_len"),
            ("--max-input-len", 20, "max_input_len"),
        ],
    )
    def test_limits(
        self, edgecc: Command, tmp_path: Path, target: Path, flag: str, value: int, key: str
    ) -> None:
        flags = ("-o", tmp_path / "b", "--verify", "none", flag, value)
        assert edgecc("compile", target, *flags).code == 0
        assert Bundle.open(tmp_path / "b").manifest["limits"][key] == value

    @pytest.mark.parametrize("device", ["cpu", "onnx"])
    def test_devices(
        self, edgecc: Command, tmp_path: Path, target: Path, draft: Path, device: str
    ) -> None:
        flags = ("--draft", draft, "-o", tmp_path / "b", "--max-model-len", 24)
        assert edgecc("compile", target, *flags, "--device", device).code == 0
        assert list(Bundle.open(tmp_path / "b").manifest["artifacts"]) == [device]
        assert edgecc("verify", tmp_path / "b", "--prompts", 1, "--max-new-tokens", 4).code == 0

    def test_force(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        out = tmp_path / "b"
        assert edgecc("compile", target, "-o", out, *FAST).code == 0
        assert edgecc("compile", target, "-o", out, *FAST).code == 0
        (out / "notes").write_text("mine")
        result = edgecc("compile", target, "-o", out, *FAST)
        assert (result.code, result.id) == (2, "bundle/foreign-files")
        assert edgecc("compile", target, "-o", out, *FAST, "--force").code == 0


class TestSpeculativeConfig:
    def test_as_flags(self, edgecc: Command, tmp_path: Path, target: Path, draft: Path) -> None:
        config = {"method": "dspark", "model": str(draft), "num_speculative_tokens": 2}
        text = json.dumps(config)
        (tmp_path / "c.json").write_text(text)
        for value in (text, f"@{tmp_path / 'c.json'}"):
            out = tmp_path / "b"
            flags = ("-o", out, *FAST, "--speculative-config", value)
            assert edgecc("compile", target, *flags).code == 0
            assert Bundle.open(out).manifest["draft"]["num_speculative_tokens"] == 2
        same = ("--draft", draft, "-k", 2, "--spec-method", "dspark", "--dry-run")
        assert edgecc("compile", target, *flags, *same).code == 0

    def test_a_block_of_the_target(self, edgecc: Command, tmp_path: Path, draft: Path) -> None:
        """As flags and as JSON; the text of such a module says so itself."""
        target = write_hybrid_target(tmp_path / "t", mtp=1)
        text = '{"method": "mtp", "num_speculative_tokens": 2}'
        flags = ("--speculative-config", text)
        for way in (flags, ("--spec-method", "mtp", "-k", 2)):
            out = tmp_path / "b"
            result = edgecc("compile", target, "-o", out, *FAST, *way)
            assert result.code == 0
            assert "speculation by method mtp: it was asked for" in result.err
            assert Bundle.open(out).manifest["draft"]["num_speculative_tokens"] == 2
        lifted = tmp_path / "t.eir"
        assert edgecc("lift", target, "--spec-method", "mtp", "-k", 2, "-o", lifted).code == 0
        again = edgecc("compile", lifted, "-o", tmp_path / "c", "--dry-run", "--spec-method", "mtp")
        assert again.code == 0
        other = edgecc("compile", lifted, "-o", tmp_path / "d", "--spec-method", "eagle3")
        assert (other.code, other.id) == (2, "usage/lifted-method")
        both = edgecc("compile", target, *flags, "--draft", draft, "-o", tmp_path / "e")
        assert (both.code, both.id) == (2, "usage/spec-method")

    def test_nulls_are_nothing(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        text = '{"method": null, "model": null, "num_speculative_tokens": null}'
        flags = ("-o", tmp_path / "b", "--dry-run", "--speculative-config", text)
        assert edgecc("compile", target, *flags).code == 0

    @pytest.mark.parametrize(
        ("text", "id", "words"),
        [
            ("", "usage/json", "not usable as JSON"),
            ("{", "usage/json", "not usable as JSON"),
            ("[]", "usage/json", "expected a JSON object"),
            ("3", "usage/json", "expected a JSON object"),
            ("[" * 100_000, "usage/json", "not usable as JSON"),
            ('{"model": "a", "model": "b"}', "usage/json", "occurs twice"),
            ('{"modle": "a"}', "usage/speculative-config", "did you mean 'model'?"),
            ('{"revision": "a"}', "usage/speculative-config", "goes with a model of the hub"),
            ('{"quantization": "fp8"}', "usage/speculative-config", "known from vLLM"),
            ('{"model": 3}', "usage/speculative-config", "model must be a string"),
            ('{"model": "\\ud800"}', "usage/bad-path", "ud800"),
            ('{"method": []}', "usage/speculative-config", "method must be a string"),
            ('{"num_speculative_tokens": 0}', "usage/speculative-config", "is 0"),
            ('{"num_speculative_tokens": true}', "usage/speculative-config", "is True"),
            ('{"num_speculative_tokens": 2.0}', "usage/speculative-config", "is 2.0"),
            ('{"num_speculative_tokens": "2"}', "usage/speculative-config", "is '2'"),
            ('{"num_speculative_tokens": 2}', "usage/speculative-tokens", "need a draft"),
            (
                '{"method": "dspark", "num_speculative_tokens": 2}',
                "usage/spec-method",
                "--spec-method dspark needs a draft",
            ),
            ("@/nonexistent", "usage/speculative-config", "No such file"),
            ("@/", "usage/speculative-config", "directory"),
            ("@", "usage/speculative-config", "directory"),
        ],
    )
    def test_refused(
        self, edgecc: Command, tmp_path: Path, target: Path, text: str, id: str, words: str
    ) -> None:
        flags = ("-o", tmp_path / "b", "--speculative-config", text)
        result = edgecc("compile", target, *flags)
        assert (result.code, result.id) == (2, id)
        assert words in result.err
        assert list(tmp_path.iterdir()) == []

    def test_unknown_method(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        """The method is what is wrong, with a number of proposals as without."""
        config = '{"method": "deepseek_mtp", "num_speculative_tokens": 2}'
        flags = ("-o", tmp_path / "b", "--speculative-config", config)
        result = edgecc("compile", target, *flags)
        assert (result.code, result.id) == (4, "draft/kind")
        assert "method 'deepseek_mtp' is not supported" in result.err
        assert "supported: auto, dspark, dflash, eagle3, draft_model, mtp, ngram" in result.err

    def test_a_file_that_is_no_text(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        (tmp_path / "c.json").write_bytes(b"\xff\xfe{}")
        result = edgecc("compile", target, "--speculative-config", f"@{tmp_path / 'c.json'}")
        assert (result.code, result.id) == (2, "usage/json")

    @pytest.mark.parametrize(
        ("config", "flags"),
        [
            ({"model": "a"}, ["--draft", "b"]),
            ({"num_speculative_tokens": 2}, ["-k", "3"]),
            ({"method": "dspark"}, ["--spec-method", "eagle3"]),
        ],
        ids=["draft", "steps", "method"],
    )
    def test_contradictions(
        self, edgecc: Command, target: Path, config: dict[str, Any], flags: list[str]
    ) -> None:
        result = edgecc("compile", target, "--speculative-config", json.dumps(config), *flags)
        assert (result.code, result.id) == (2, "usage/contradiction")
        assert flags[0].replace("-k", "--num-speculative-tokens") in result.last


@pytest.mark.parametrize("form", ["auto", "dense", "int8-split", "int8-block"])
def test_linear_forms(edgecc: Command, tmp_path: Path, target: Path, form: str) -> None:
    """The words of the reference are those that the flag takes."""
    flags = ("-o", tmp_path / "b", "--max-model-len", 24, "--linear-form", form)
    result = edgecc("compile", target, *flags)
    assert result.code == 0, result.err
    assert "checked target logits: ok" in result.err
    lowered = (tmp_path / "b" / "ir" / "lowered.eir").read_text("utf-8")
    assert ("int8" in lowered) == form.startswith("int8")


class TestQuantization:
    def encodings(self, path: Path) -> dict[str, str]:
        return {s: w["encoding"] for s, w in Bundle.open(path).manifest["weights"].items()}

    def test_target_and_draft_have_flags_of_their_own(
        self, edgecc: Command, tmp_path: Path, dense: Path, draft: Path
    ) -> None:
        flags = ("--quantization", "nvfp4", "--quantize-head", "--draft-quantization", "int8")
        out = tmp_path / "b"
        result = edgecc("compile", dense, "--draft", draft, "-o", out, *flags)
        assert result.code == 0, result.err
        assert "linear weights quantized to nvfp4<block=16>" in result.err
        assert "  checked draft proposals: ok" in result.err
        found = self.encodings(out)
        assert found["target.lm_head-nvfp4.weight"] == "nvfp4<block=16>"
        assert found["target.model.embed_tokens.weight"] == "dense<bf16>"
        assert found["draft.fc-int8.weight"] == "int8<channel>"
        options = Bundle.open(out).manifest["provenance"]["options"]
        assert (options["quantization"], options["draft_quantization"]) == ("nvfp4", "int8")

    def test_a_draft_does_not_inherit(
        self, edgecc: Command, tmp_path: Path, dense: Path, draft: Path
    ) -> None:
        out = tmp_path / "b"
        flags = ("--draft", draft, "-o", out, "--quantize", "fp8-channel", *FAST)
        assert edgecc("compile", dense, *flags).code == 0
        found = self.encodings(out)
        assert not any("fp8" in s for s in found if s.startswith("draft."))
        assert any(e == "fp8<channel>" for e in found.values())
        assert found["target.lm_head.weight"] == "dense<bf16>"

    def test_config_names_the_precision_of_the_draft(
        self, edgecc: Command, tmp_path: Path, target: Path, draft: Path
    ) -> None:
        config = {"model": str(draft), "draft_quantization": "fp8"}
        flags = ("--speculative-config", json.dumps(config), "-o", tmp_path / "b", *FAST)
        assert edgecc("compile", target, *flags).code == 0
        assert self.encodings(tmp_path / "b")["draft.fc-fp8.weight"] == "fp8<tensor>"
        result = edgecc("compile", target, *flags, "--draft-quantization", "int8")
        assert (result.code, result.id) == (2, "usage/contradiction")

    def test_a_draft_is_needed_for_its_flag(
        self, edgecc: Command, tmp_path: Path, dense: Path
    ) -> None:
        result = edgecc("compile", dense, "-o", tmp_path / "b", "--draft-quantization", "fp8")
        assert (result.code, result.id) == (2, "usage/draft-quantization")

    def test_what_did_not_fit_is_said(self, edgecc: Command, tmp_path: Path, dense: Path) -> None:
        result = edgecc("compile", dense, "-o", tmp_path / "b", "--quantization", "int4")
        assert (result.code, result.id) == (2, "usage/nothing-to-quantize")
        assert "K a multiple of 128" in result.err


class TestRefused:
    @pytest.mark.parametrize(
        ("flags", "code", "id"),
        [
            (["-k", "0"], 2, "usage"),
            (["-k", "5"], 2, "usage/speculative-tokens"),
            (["-k", "x"], 2, "usage"),
            (["--max-model-len", "0"], 2, "usage"),
            (["--max-model-len", "1"], 2, "usage/max-model-len"),
            (["--max-model-len", str(10**30)], 2, "usage/max-model-len"),
            (["--max-model-len", "20", "--max-input-len", "20"], 2, "usage/max-input-len"),
            (["--lm-head", "own"], 3, "bind/no-own-head"),
            (["--lm-head", "borrow"], 2, "usage"),
            (["--verify", "later"], 2, "usage"),
            (["--device", "abacus"], 4, "device/unknown"),
            (["--device", "cpu", "--device", "cpu"], 2, "usage/device-twice"),
            (
                ["--device", "cpu", "--device", "onnx", "--pass-pipeline", "dce"],
                2,
                "usage/pipeline-devices",
            ),
            (["--weights", "bind"], 2, "usage/weights"),
            (["--weights", "mixed"], 2, "usage"),
            (["--dtype", "fp16"], 4, "usage/dtype"),
            (["--quantization", "int3"], 2, "usage"),
            (["--quantization", "fp8"], 2, "usage/nothing-to-quantize"),
            (["--quantize-head"], 2, "usage/quantize-head"),
            (["--quantize", "fp8", "--pass-pipeline", "dce"], 2, "usage/contradiction"),
            (["--max-batch-size", "65"], 2, "usage/max-batch-size"),
            (["--spec-method", "eagle3"], 2, "usage/spec-method"),
            (["--tensor-parallel-size", "2"], 2, "usage"),
            (["--trust-remote-code"], 2, "usage"),
            (["--dump-ir", ""], 2, "usage/bad-path"),
            (["--timing-json", "/nonexistent/t.json"], 2, "usage/timing-json"),
            (["--timing-json", "/"], 2, "usage/timing-json"),
            (["--timing-json", ""], 2, "usage/bad-path"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else None,
    )
    def test_flags(
        self,
        edgecc: Command,
        tmp_path: Path,
        target: Path,
        draft: Path,
        flags: list[str],
        code: int,
        id: str,
    ) -> None:
        """A dry run says the same."""
        for more in ([], ["--dry-run"]):
            result = edgecc(
                "compile", target, "--draft", draft, "-o", tmp_path / "b", *flags, *more
            )
            assert (result.code, result.id, result.out) == (code, id, "")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("flags", [[], ["--dry-run"], ["--device", "onnx"]], ids=" ".join)
    def test_drafts_the_runtime_does_not_drive(
        self, edgecc: Command, tmp_path: Path, foreign: Path, flags: list[str]
    ) -> None:
        out = tmp_path / "out"
        out.mkdir()
        dump = ["--dump-ir", tmp_path / "ir"]
        result = edgecc("compile", foreign, "-o", out / "b", *flags, *dump)
        assert (result.code, result.id, result.out) == (4, "draft/no-runtime", "")
        assert "medusa: lifting and evaluating work, the runtime does not drive it" in result.err
        assert list(out.iterdir()) == []
        assert list(tmp_path.glob("ir/*")) == []

    def test_engines_for_drafts_the_runtime_does_not_drive(
        self, edgecc: Command, tmp_path: Path, foreign: Path
    ) -> None:
        """They are built from evaluated graphs, and the report says what is missing."""
        flags = ["--device", "sm120", "--dry-run", "-o", tmp_path / "b"]
        result = edgecc("compile", foreign, *flags)
        assert result.code == 0
        assert "engines only: the runtime does not drive method medusa yet" in result.err

    @pytest.fixture
    def foreign(self, edgecc: Command, tmp_path: Path, target: Path) -> Path:
        """IR text of a pair whose draft is of a method from elsewhere."""
        draft = write_eagle3(tmp_path / "d", hidden=SMALL["hidden"], taps=1, target_layer_ids=[0])
        path = tmp_path / "pair.eir"
        assert edgecc("lift", target, "--draft", draft, "-o", path).code == 0
        path.write_text(path.read_text().replace('"method": "eagle3"', '"method": "medusa"'))
        assert "medusa" in path.read_text()
        return path

    def test_flags_of_other_tools_are_named(self, edgecc: Command, target: Path) -> None:
        for flag, tool in (("--tp", "SGLang"), ("--enforce-eager", "vLLM")):
            result = edgecc("compile", target, flag)
            assert f"{flag} is known from {tool}" in result.last

    @pytest.mark.parametrize("arguments", [[], [""], ["--model", ""]], ids=str)
    def test_no_target(self, edgecc: Command, arguments: list[str]) -> None:
        result = edgecc("compile", *arguments)
        assert (result.code, result.id) == (2, "usage/target")

    def test_two_targets(self, edgecc: Command, target: Path, draft: Path) -> None:
        assert edgecc("compile", target, "--model", draft).id == "usage/target"
        assert edgecc("compile", target, target).code == 2

    def test_roles_swapped(self, edgecc: Command, target: Path, draft: Path) -> None:
        result = edgecc("compile", draft, "--draft", target)
        assert (result.code, result.id) == (3, "draft/needs-target")
        result = edgecc("compile", draft)
        assert (result.code, result.id) == (3, "draft/needs-target")

    def test_a_target_as_its_own_draft(self, edgecc: Command, tmp_path: Path, target: Path) -> None:
        """A language model may draft for another, and for itself; it is no DSpark draft."""
        asked = ("compile", target, "--draft", target, "-o", tmp_path / "b", "--dry-run")
        assert edgecc(*asked).code == 0
        result = edgecc(*asked, "--spec-method", "dspark")
        assert (result.code, result.id) == (2, "usage/spec-method")

    @pytest.mark.parametrize("path", ["./org/model", "/nonexistent", "x" * 5000])
    def test_no_such_target(self, edgecc: Command, tmp_path: Path, path: str) -> None:
        result = edgecc("compile", path, "-o", tmp_path / "b")
        assert (result.code, result.id) == (3, "checkpoint/not-found")

    def test_no_such_model(self, edgecc: Command, tmp_path: Path) -> None:
        """What could be an id of the hub is one if there is no such folder."""
        result = edgecc("compile", "org/no-such-model", "--offline", "-o", tmp_path / "b")
        assert (result.code, result.id) == (7, "hub/offline")
        assert "there is no folder org/no-such-model either" in result.err

    def test_the_working_directory(
        self, edgecc: Command, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        result = edgecc("compile", target, "-o", ".")
        assert (result.code, result.id) == (2, "bundle/output-in-use")
        monkeypatch.chdir(target)
        result = edgecc("compile", ".")
        assert (result.code, result.id) == (2, "usage/output-in-checkpoint")
        assert "-o" in result.err

    def test_timings_stay_out_of_checkpoints(self, edgecc: Command, target: Path) -> None:
        result = edgecc("compile", target, "--timing-json", target / "t.json", "--dry-run")
        assert (result.code, result.id) == (2, "usage/output-in-checkpoint")
        assert not (target / "t.json").exists()


@contextmanager
def unprivileged() -> Iterator[None]:
    """Root may write everywhere, so be somebody else for a moment."""
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
class TestPermissions:
    @pytest.fixture
    def place(self) -> Iterator[Path]:
        """A pair that others may read, in a folder that they may write to."""
        folder = Path(tempfile.mkdtemp(prefix="edgecc-"))  # those of pytest are private
        folder.chmod(0o777)
        write_target(folder / "t", **SMALL)
        write_draft(folder / "d", **SMALL, **TAPS)
        for path in folder.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            with unprivileged():
                if not os.path.exists(folder / "t" / "config.json"):
                    pytest.skip("the folder for temporary files is private")
            yield folder
        finally:
            for path in [folder, *folder.rglob("*")]:
                path.chmod(0o777)
            shutil.rmtree(folder)

    def run(self, edgecc: Command, place: Path, *flags: object) -> Any:
        # Everything that is imported late has to be there before: it lies in a private folder.
        edgecc("compile", place / "t", "-o", place / "warm", *FAST)
        edgecc("run", place / "warm", "--prompt", "a", "--max-new-tokens", 1)
        with unprivileged():
            return edgecc("compile", place / "t", *flags, *FAST)

    def test_a_write_protected_checkpoint(self, edgecc: Command, place: Path) -> None:
        for folder in (place / "t", place / "d"):
            for path in folder.iterdir():
                path.chmod(0o444)
            folder.chmod(0o555)
        result = self.run(edgecc, place, "--draft", place / "d", "-o", place / "b")
        assert result.code == 0, result.err
        assert Bundle.open(place / "b").path

    @pytest.mark.parametrize("out", ["ro", "ro/b", "ro/a/b"])
    def test_a_write_protected_output(self, edgecc: Command, place: Path, out: str) -> None:
        (place / "ro").mkdir(mode=0o555)
        result = self.run(edgecc, place, "-o", place / out)
        assert (result.code, result.id) == (6, "bundle/no-permission")
        assert list((place / "ro").iterdir()) == []

    def test_write_protected_side_outputs(self, edgecc: Command, place: Path) -> None:
        (place / "ro").mkdir(mode=0o555)
        for flag in ("--dump-ir", "--timing-json"):
            result = self.run(edgecc, place, "-o", place / "b", flag, place / "ro" / "x")
            assert result.code == 6, flag
            assert not (place / "b").exists()

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", ""])
    def test_an_unreadable_checkpoint(self, edgecc: Command, place: Path, name: str) -> None:
        self.run(edgecc, place, "-o", place / "x")
        (place / "t" / name).chmod(0)
        with unprivileged():
            result = edgecc("compile", place / "t", "-o", place / "b", *FAST)
            assert (result.code, result.id) == (6, "checkpoint/unreadable")
            assert edgecc("inspect", place / "t").code in ((6, 0) if "token" in name else (6,))
        assert not (place / "b").exists()


FLAGS = st.lists(
    st.one_of(
        st.tuples(st.just("-k"), st.sampled_from(["0", "1", "4", "5", "x", "-3", "999999999999"])),
        st.tuples(
            st.sampled_from(["--max-model-len", "--max-input-len", "--max-seq-len"]),
            st.one_of(
                st.integers(-2, 600).map(str), st.sampled_from(["1e3", "", "٣", str(10**40)])
            ),
        ),
        st.tuples(st.just("--lm-head"), st.sampled_from(["auto", "share", "own", "copy", "x"])),
        st.tuples(st.just("--device"), st.sampled_from(["cpu", "onnx", "", "gpu"])),
        st.tuples(st.just("--spec-method"), st.sampled_from(["auto", "dspark", "mtp"])),
        st.tuples(st.just("--max-batch-size"), st.sampled_from(["1", "2", "0"])),
        st.tuples(st.just("--dtype"), st.sampled_from(["auto", "bf16"])),
        st.tuples(st.just("--verify"), st.sampled_from(["none", "fast", "never"])),
        st.tuples(st.just("--speculative-config"), st.one_of(st.text(max_size=8), st.just("{}"))),
        st.tuples(st.sampled_from(["--strict", "--json", "-v", "-vv", "-q", "--debug", "--force"])),
        st.tuples(st.text(min_size=1, max_size=6)),
    ),
    max_size=4,
).map(lambda pairs: [part for pair in pairs for part in pair])


@given(FLAGS)
@example(["--speculative-config", "@"])
@example(["--speculative-config", "\udc80"])
@example(["\0"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flags(
    target: Path,
    draft: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    """Whatever is asked for, there is an exit code with a reason, and no traceback."""
    out = tmp_path_factory.getbasetemp() / "never"
    arguments = ["compile", str(target), "--draft", str(draft), "-o", str(out), "--dry-run", *flags]
    code = main(arguments)
    stdout, stderr = capsys.readouterr()
    assert code in (0, 2, 3, 4), (code, stderr)
    help_asked = "-h" in flags or "--help" in flags
    if code:
        assert stderr.splitlines()[-1].startswith("edgecc: error[")
        assert stdout == ""
        assert "Traceback" not in stderr or "--debug" in flags
    elif "-q" not in flags and not help_asked:
        assert stderr.splitlines()[-1].startswith("edgecc: ok ")
    if code == 0 and "--json" in flags and not help_asked:
        json.loads(stdout)
    assert not out.exists()


def test_an_engine_that_differs(
    edgecc: Command, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgecc import device_artifact, lift

    real = device_artifact.golden_rows
    other = write_target(tmp_path / "other", **SMALL, seed=7)
    monkeypatch.setattr(
        device_artifact, "golden_rows", lambda module, passes: real(lift(other), passes)
    )
    result = edgecc("compile", target, "-o", tmp_path / "b", "--max-model-len", 24)
    assert (result.code, result.id) == (5, "verify/mismatch")
    assert "target logits: FAILED" in result.err
    assert not (tmp_path / "b").exists()


def test_damaged_values(edgecc: Command, tmp_path: Path) -> None:
    target = write_target(tmp_path / "t", **SMALL)

    def damage(tensors: Any) -> None:
        tensors["model.norm.weight"][3] = float("nan")

    edit_tensors(target, damage)
    result = edgecc("compile", target, "-o", tmp_path / "b")
    assert (result.code, result.id) == (3, "checkpoint/not-finite")
    assert "[3] is NaN" in result.last
