"""The pytest plugin: one item for each case, and files that update themselves."""

from __future__ import annotations

import pytest

MODULE = """\
graph @main(
  %x: f32[2] activation
) {
  %y = silu(%x) : f32[2]
  %z = silu(%x) : f32[2]
  return
    y = %y activation
}
"""
AFTER = """\
// ---- after

graph @main(
  %x: f32[2] activation
) {
  %y = silu(%x) : f32[2]
  return
    y = %y activation
}
"""


def case(title: str, outcome: str = "") -> str:
    return f"// ---- case: {title}\n// Text.\n\n{MODULE}" + (f"\n{outcome}" if outcome else "")


GOOD, FIXED, NEW = case("good", AFTER), case("stale", AFTER), case("new")
STALE = case("stale", AFTER.replace("silu", "sigmoid"))


@pytest.fixture
def suite(pytester, monkeypatch):
    """Runs pytest in a folder with golden files; takes their texts by name and flags."""
    pytester.makeconftest('pytest_plugins = ["edgecc.testing.pytest_golden"]')

    def run(*flags, **files):
        folder = pytester.path / "golden"
        folder.mkdir(exist_ok=True)
        for name, text in files.items():
            (folder / f"{name}.eir").write_text(text, encoding="utf-8")
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *flags)

    run.read = lambda name: (pytester.path / "golden" / f"{name}.eir").read_text(encoding="utf-8")
    return run


def test_a_case_is_an_item(suite):
    result = suite("--collect-only", "-q", dce=GOOD + "\n" + STALE)
    result.stdout.fnmatch_lines(["golden/dce.eir::good", "golden/dce.eir::stale"])
    suite("golden/dce.eir::good").assert_outcomes(passed=1)


def test_a_difference_is_shown(suite):
    result = suite(dce=GOOD + "\n" + STALE + "\n" + NEW)
    result.assert_outcomes(passed=1, failed=2)
    shown = ["*stale*", "-  %y = sigmoid(%x) : f32[[]2]", "+  %y = silu(%x) : f32[[]2]"]
    result.stdout.fnmatch_lines([*shown, "*pytest --update-golden*"])
    assert suite.read("dce") == GOOD + "\n" + STALE + "\n" + NEW


def test_updating_writes_what_differs(suite):
    comment = "// Kept as it is.\n\n"
    suite("--update-golden", dce=comment + GOOD + "\n" + STALE + "\n" + NEW).assert_outcomes(
        passed=3
    )
    wanted = "\n".join([GOOD, FIXED, case("new", AFTER)])
    assert suite.read("dce") == comment + wanted
    suite().assert_outcomes(passed=3)


def test_updating_does_not_touch_files_that_agree(suite, pytester):
    suite(dce=GOOD)
    path = pytester.path / "golden" / "dce.eir"
    path.chmod(0o444)
    before = path.stat().st_mtime_ns
    suite("--update-golden").assert_outcomes(passed=1)
    assert path.stat().st_mtime_ns == before


def test_updating_does_not_hide_a_broken_law(suite, monkeypatch):
    monkeypatch.setattr("edgecc.passes.dce.Dce.run", lambda *_: True)
    result = suite("--update-golden", dce=GOOD)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*report changed=?True?, but the module is unchanged*"])


def test_updating_needs_one_process(suite):
    pytest.importorskip("xdist")
    result = suite("--update-golden", "-n", "2", dce=GOOD)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--update-golden writes files: run it without -n*"])


def test_a_malformed_file_is_a_collection_error(suite):
    result = suite(dce="// nothing\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*golden/no-case*", "*dce.eir:1*"])


def test_a_wrong_module_is_a_failure_that_names_the_line(suite):
    result = suite("--update-golden", dce=GOOD.replace("%y = silu", "%y = sillu", 1))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*unknown op 'sillu'*", "*golden/dce.eir:7:3*"])
    assert "Traceback" not in result.stdout.str()


def test_a_file_of_no_pass_fails(suite):
    result = suite(dse=GOOD)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*unknown pass 'dse'*"])


def test_other_folders_and_files_are_left_alone(suite, pytester):
    (pytester.path / "notes.eir").write_text("edgecc.module")
    (pytester.path / "golden").mkdir()
    (pytester.path / "golden" / "notes.txt").write_text("notes")
    suite().assert_outcomes()
