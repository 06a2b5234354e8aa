"""`edgecc opt --check`, `compile --check` and `edgecc reduce`, with planted passes."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest

from edgecc.cli import main
from edgecc.ir import parse_module, print_module
from helpers import planted
from helpers.pairs import PairOptions, pair

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
TARGET = str(PAIRS / "tiny-qwen3-nvfp4")


@pytest.fixture(autouse=True)
def _planted(monkeypatch, tmp_path):
    planted.register(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "pair.eir"
    module = pair(PairOptions(draft_head="own", draft_embedding="own"))
    path.write_text(print_module(module), encoding="utf-8")
    return path


def nodes(path):
    return [
        n.op.name for g in parse_module(Path(path).read_text()).graphs.values() for n in g.nodes
    ]


def test_opt_check_finds_the_pass_and_leaves_a_file_that_shows_it(text, capsys):
    arguments = [str(text), "-p", "fuse-qkv,swap-gate,dce", "--check", "1"]
    assert main(["opt", *arguments]) == 5
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "error[check/mismatch]: pass swap-gate changed what is computed: output" in shown.err
    assert "first at [" in shown.err
    commands = re.findall(r"note: (?:reproduce|make it smaller): edgecc (.*)", shown.err)
    assert len(commands) == 2
    assert nodes("edgecc-swap-gate-1.eir") == ["swiglu"]
    assert main(shlex.split(commands[0])) == 5
    assert "swap-gate changed" in capsys.readouterr().err
    assert main(shlex.split(commands[1])) == 0
    assert nodes("edgecc-swap-gate-1.small.eir") == ["swiglu"]


def test_the_file_goes_to_the_dump_folder_if_there_is_one(text, tmp_path):
    arguments = [str(text), "-p", "swap-gate", "--check", "1", "--dump-ir", "dump", "-q"]
    assert main(["opt", *arguments]) == 5
    assert (tmp_path / "dump" / "edgecc-swap-gate-1.eir").is_file()
    assert not list(tmp_path.glob("edgecc-*"))


def test_opt_check_of_right_passes_tells_seconds_and_what_was_not_compared(capsys, tmp_path):
    path = tmp_path / "unbound.eir"
    path.write_text(print_module(pair()), encoding="utf-8")
    arguments = [str(path), "-p", "bind-shared-weights,dce", "--check", "1", "--timing", "-v"]
    assert main(["opt", *arguments]) == 0
    shown = capsys.readouterr().err
    assert "check ms" in shown
    assert "check 1: bind-shared-weights: not compared: draft." in shown
    assert main(["opt", *arguments[:3], "--timing"]) == 0
    assert "check ms" not in capsys.readouterr().err


def test_compile_check_writes_no_bundle_of_a_wrong_pass(capsys, tmp_path):
    flags = ["--max-model-len", "64", "--pass-pipeline"]
    passes = "swap-gate,lower-encodings"
    assert main(["compile", TARGET, *flags, passes, "--check", "1", "-o", "b"]) == 5
    assert "pass swap-gate changed what is computed" in capsys.readouterr().err
    assert nodes("edgecc-swap-gate-1.eir") == ["swiglu"]
    assert not (tmp_path / "b").exists()


def test_compile_check_changes_no_byte_of_the_bundle(tmp_path):
    common = [TARGET, "--max-model-len", "64", "-q", "-o"]
    assert main(["compile", *common, "plain"]) == 0
    assert main(["compile", *common, "checked", "--check", "1"]) == 0
    files = [p.relative_to(tmp_path / "plain") for p in (tmp_path / "plain").rglob("*")]
    assert files
    for file in files:
        plain, checked = tmp_path / "plain" / file, tmp_path / "checked" / file
        assert plain.is_dir() or plain.read_bytes() == checked.read_bytes()


def test_reduce_shrinks_text_and_pipeline(text, capsys):
    assert main(["reduce", str(text), "-p", "dce,crash-on-add,fuse-qkv", "-o", "small.eir"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "still fails: pass/crash in crash-on-add\n" in shown.err
    assert "reproduce: edgecc opt small.eir -p crash-on-add\n" in shown.err
    assert re.search(r"edgecc: ok \d+ -> 2 nodes, 3 -> 1 pass$", shown.err)
    assert nodes("small.eir")[-1] == "add"
    assert main(["opt", "small.eir", "-p", "crash-on-add"]) == 1


def test_reduce_reads_standard_input_and_writes_standard_output(text, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(text.read_text(encoding="utf-8")))
    assert main(["reduce", "-p", "lose-use", "-v"]) == 0
    shown = capsys.readouterr()
    module = parse_module(shown.out)
    assert [n.op.name for g in module.graphs.values() for n in g.nodes] == ["rms_norm"]
    assert "edgecc: reduce\n" in shown.err
    assert re.search(r"\d+ tried: \d+ nodes, \d+ weights", shown.err)


def test_reduce_without_a_failure_is_a_usage_error(text, capsys):
    assert main(["reduce", str(text), "-p", "fuse-qkv,dce"]) == 2
    shown = capsys.readouterr().err
    assert "error[reduce/nothing]: nothing to reduce: 2 passes ran without an error" in shown
    assert "wrong values only show with --check N" in shown
    assert main(["reduce", str(text), "-p", "fuse-qkv,dce", "--check", "1"]) == 2
    assert "wrong values only show" not in capsys.readouterr().err


def test_reduce_wants_a_pipeline(text, capsys):
    assert main(["reduce", str(text)]) == 2
    assert "say which passes fail" in capsys.readouterr().err
    assert main(["reduce", str(text), "--default-pipeline"]) == 2
    shown = capsys.readouterr().err
    assert "--default-pipeline needs a device" in shown
    assert "add --device NAME, one of cpu" in shown
    assert main(["reduce", str(text), "--default-pipeline", "--device", "cpu", "-p", "dce"]) == 2
    assert "--default-pipeline and --pass-pipeline are both given" in capsys.readouterr().err


def test_reduce_takes_the_default_pipeline_of_a_device(text, capsys):
    module = parse_module(text.read_text())
    del module.graphs["target"]
    path = text.with_name("draft.eir")
    path.write_text(print_module(pair(target=False)))
    assert main(["reduce", str(path), "--default-pipeline", "--device", "cpu"]) == 0
    shown = capsys.readouterr()
    assert "still fails: bind/no-target in bind-shared-weights" in shown.err
    assert "-p bind-shared-weights --device cpu" in shown.err
