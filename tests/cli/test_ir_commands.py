"""`edgecc lift`, `opt`, `diff` and `passes`, in process."""

from __future__ import annotations

import io
import json
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import edgecc
from edgecc.cli import main
from edgecc.ir import parse_module, print_module
from edgecc.ir_source import read_ir
from edgecc.passes import PASSES, registered
from helpers.byte_tokenizer import write_tokenizer
from helpers.vision import write_vision_target

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
TARGET = str(PAIRS / "tiny-qwen3-nvfp4")
DRAFT = str(PAIRS / "tiny-qwen3-dspark")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The shipped pair as IR text."""
    path = tmp_path_factory.mktemp("ir") / "pair.eir"
    assert main(["lift", TARGET, "--draft", DRAFT, "-o", str(path), "-q"]) == 0
    return path


def test_lift_prints_what_parses_back_equal(pair):
    text = pair.read_text(encoding="utf-8")
    assert print_module(parse_module(text)) == text
    assert text == print_module(edgecc.lift(TARGET, DRAFT))


def test_lift_and_opt_take_eagle3(tmp_path, capsys):
    draft = str(PAIRS / "tiny-qwen3-eagle3")
    path = tmp_path / "pair.eir"
    assert main(["lift", TARGET, "--draft", draft, "-o", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    assert text == print_module(edgecc.lift(TARGET, draft)) == print_module(parse_module(text))
    assert main(["opt", str(path), "-p", "bind-shared-weights,dedupe-weights,dce"]) == 0
    assert "alias @target.model.embed_tokens.weight" in capsys.readouterr().out


def test_lift_with_the_vision_tower(tmp_path, capsys):
    """The text evaluates, runs through passes, and compiles with what it was lifted with."""
    target, text = write_vision_target(tmp_path / "t"), str(tmp_path / "all.eir")
    write_tokenizer(target, images=True)
    assert main(["lift", str(target), "--components", "all", "-o", text]) == 0
    assert "target, vision" in capsys.readouterr().err
    assert {"target", "vision"} == set(read_ir(text).graphs)
    assert main(["opt", text, "-p", "fuse-qkv,cse", "-o", str(tmp_path / "opt.eir")]) == 0
    capsys.readouterr()
    assert main(["compile", text, "-o", str(tmp_path / "b")]) == 0
    assert "checked image features: ok" in capsys.readouterr().err
    only = str(tmp_path / "text.eir")
    assert main(["lift", str(target), "-o", only]) == 0
    assert main(["compile", only, "--components", "all", "-o", str(tmp_path / "c")]) == 2
    assert "error[usage/lifted-components]" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_lift_to_standard_output(capsys):
    assert main(["lift", "--draft", DRAFT, "-k", "3", "--locations"]) == 0
    out, err = capsys.readouterr()
    module = parse_module(out)
    assert list(module.graphs) == ["draft"]
    assert "unbound" in out
    assert 'loc("draft: fc")' in out
    assert err.splitlines()[-1].startswith("edgecc: ok draft: ")


def test_opt_gives_what_compile_gives(pair, tmp_path, capsys):
    """The default pipeline run on text ends in the module that compile lowers."""
    out = tmp_path / "out.eir"
    dump = tmp_path / "dump"
    arguments = ["--device", "cpu", "--default-pipeline", "-o", str(out)]
    assert main(["opt", str(pair), *arguments]) == 0
    edgecc.compile(TARGET, DRAFT, out=tmp_path / "bundle", dry_run=True, dump_ir=dump)
    last = sorted(dump.glob("*.eir"))[-1]
    assert main(["diff", str(out), str(last)]) == 0
    assert "edgecc: ok equal" in capsys.readouterr().err


def test_opt_one_pass_and_diff(pair, tmp_path, capsys):
    out = tmp_path / "out.eir"
    code = main(["opt", str(pair), "-p", "bind-shared-weights", "-o", str(out), "--explain"])
    assert code == 0
    assert "bind-shared-weights: applied at @draft.lm_head.weight" in capsys.readouterr().err
    assert main(["diff", str(pair), str(out), "-U", "0"]) == 5
    shown = capsys.readouterr()
    assert "alias @target.lm_head.weight" in shown.out
    assert shown.err.splitlines()[-1].startswith("edgecc: error[ir/differ]: ")


def test_opt_reads_standard_input(pair, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(pair.read_text(encoding="utf-8")))
    assert main(["opt", "-p", "unroll-markov,dce", "-q"]) == 0
    module = parse_module(capsys.readouterr().out)
    assert not [n for n in module.graphs["draft"].nodes if n.op.name == "markov_chain"]


def test_diff_reads_standard_input(pair, capsys, monkeypatch):
    for first, second in (("-", str(pair)), (str(pair), "-")):
        monkeypatch.setattr("sys.stdin", io.StringIO(pair.read_text(encoding="utf-8")))
        assert main(["diff", first, second]) == 0
    assert main(["diff", "-", "-"]) == 2
    assert "only one of the two" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["opt", "-p", "dce"], ["diff", "-", "README.md"]])
def test_standard_input_that_is_no_text(command, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert main(command) == 3
    assert "error[ir/unreadable]: cannot read IR text" in capsys.readouterr().err


def test_opt_debug_output(pair, tmp_path, capsys):
    timing, dump = tmp_path / "t.json", tmp_path / "ir"
    flags = ["--print-ir-after-change", "--timing", "--timing-json", str(timing)]
    flags += ["--dump-ir", str(dump), "-o", str(tmp_path / "o.eir")]
    assert main(["opt", str(pair), "-p", "dce,unroll-markov", *flags]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "// ---- after 2: unroll-markov" in err
    assert "// ---- after 1: dce" not in err
    assert "peak KiB" in err
    assert [row["name"] for row in json.loads(timing.read_text())] == ["dce", "unroll-markov"]
    assert [p.name for p in sorted(dump.iterdir())] == [
        "000-input.eir",
        "001-dce.eir",
        "002-unroll-markov.eir",
    ]


def test_opt_finds_checkpoints_elsewhere(pair, tmp_path, capsys):
    text = pair.read_text(encoding="utf-8").replace(TARGET, "gone")
    moved = tmp_path / "moved.eir"
    moved.write_text(text, encoding="utf-8")
    assert main(["opt", str(moved), "-p", "dce"]) == 3
    assert "gone" in capsys.readouterr().err
    assert (
        main(["opt", str(moved), "-p", "fuse-qkv", "--checkpoint", f"target={TARGET}", "-q"]) == 0
    )
    (tmp_path / "gone").symlink_to(TARGET)  # relative to the IR file
    assert main(["opt", str(moved), "-p", "fuse-qkv", "-q"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-p", "nope"], 2, "unknown pass 'nope'"),
        (["-p", "bind-shared-weights,legalize"], 2, "legalize needs a device"),
        (["--default-pipeline"], 2, "needs a device"),
        (["--device", "gpu9"], 4, "unknown device 'gpu9'"),
        (["--checkpoint", "target"], 2, "expected ROLE=DIR"),
        (["-p", "legalize{device=cpu}"], 3, "pass legalize requires heads-bound"),
    ],
)
def test_opt_errors(pair, capsys, arguments, code, message):
    assert main(["opt", str(pair), *arguments]) == code
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_broken_text_is_reported_with_its_line(pair, tmp_path, capsys):
    bad = tmp_path / "bad.eir"
    bad.write_text(pair.read_text(encoding="utf-8").replace("rope(", "rop(", 1), encoding="utf-8")
    assert main(["opt", str(bad)]) == 3
    err = capsys.readouterr().err
    assert "unknown op 'rop'" in err
    assert f"--> {bad}:" in err
    assert "did you mean rope" in err


def test_passes_lists_and_explains(capsys):
    assert main(["passes"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()] == sorted(PASSES)
    assert main(["passes", "lower-encodings"]) == 0
    out = capsys.readouterr().out
    assert "option form: str, default auto" in out
    assert "requires: heads-bound" in out
    assert "relative error up to 0.0001" in out
    assert main(["passes", "lower-encoding"]) == 2
    assert "did you mean 'lower-encodings'" in capsys.readouterr().err


def test_a_pass_that_does_not_load_hides_no_other(monkeypatch, capsys):
    point = EntryPoint("a-strange-one", "json:nothing", "edgecc.passes")
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [point])
    registered.cache_clear()
    try:
        assert main(["passes"]) == 0
    finally:
        registered.cache_clear()
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == sorted(PASSES)
    assert "warning[pass/broken]: pass 'a-strange-one' cannot be loaded" in err


def test_where_there_is_no_text(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    for arguments, reason in (
        (["-"], "standard input is closed"),
        ([str(tmp_path / "x.eir")], "No such file or directory"),
        ([str(tmp_path)], "Is a directory"),
    ):
        assert main(["opt", *arguments]) == 3
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == f"edgecc: error[ir/unreadable]: cannot read IR text: {reason}"


def test_compile_with_a_pipeline_of_ones_own(tmp_path, capsys):
    out = tmp_path / "b"
    pipeline = (
        "bind-shared-weights,drop-outputs,unroll-markov,fuse-cached-attention,"
        "lower-encodings,outline-shared,dce"
    )
    flags = ["--max-model-len", "32", "--dump-pass-pipeline", "--print-ir-before", "dce"]
    arguments = [TARGET, "--draft", DRAFT, "-o", str(out), *flags]
    assert main(["compile", *arguments, "--pass-pipeline", pipeline]) == 0
    err = capsys.readouterr().err
    assert f"pipeline: {pipeline},legalize{{device=cpu}}" in err
    assert err.count("// ---- before 7: dce") == 1
    assert main(["run", str(out), "--token-ids", "5,6,7", "--max-new-tokens", "4", "-q"]) == 0
    assert main(["compile", *arguments, "--pass-pipeline", "bind-shared-weights"]) == 4
    assert "cannot run markov_chain" in capsys.readouterr().err
    assert main(["compile", *arguments, "--print-ir-after", "dc"]) == 2
    assert "unknown pass 'dc'" in capsys.readouterr().err
