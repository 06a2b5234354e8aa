"""The format of golden files."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import InputError
from edgecc.testing.golden import Case, GoldenFile, Kind, Outcome, parse_golden, read_golden

GOLDEN = Path(__file__).parents[1] / "golden"

TEXT = """\
// Cases of a pass.

// ---- case: first
// It shows one thing,
// and another: this.
// pipeline: dce,fuse-qkv
// device: cpu

graph @main(  // a comment
) {
}

// ---- after
// dce: applied at @main: x
//   --> indented

graph @main(
) {
}

// ---- case: second
// It stays.

graph @main(
) {
}

// ---- unchanged

// ---- case: third
// Not run yet.

graph @main(
) {
}
"""


def test_parts():
    first, second, third = parse_golden(TEXT, "dce").cases
    assert first.title == "first"
    assert first.description == "It shows one thing, and another: this."
    assert (first.pipeline, first.device) == ("dce,fuse-qkv", "cpu")
    assert first.before == "graph @main(  // a comment\n) {\n}"
    assert TEXT.splitlines()[first.line - 1] == "graph @main(  // a comment"
    notes = ("dce: applied at @main: x", "  --> indented")
    assert first.outcome == Outcome(Kind.AFTER, notes, "graph @main(\n) {\n}")
    assert (second.pipeline, second.device) == ("dce", "")
    assert second.outcome == Outcome(Kind.UNCHANGED)
    assert third.outcome is None


def test_printing_gives_the_text_back():
    assert str(parse_golden(TEXT, "dce")) == TEXT


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.eir")), ids=lambda p: p.name)
def test_files_are_written_as_updating_writes_them(path):
    assert str(read_golden(path)) == path.read_text(encoding="utf-8")


def test_another_outcome_changes_one_section():
    golden = parse_golden(TEXT, "dce")
    changed = golden.with_outcome("second", Outcome(Kind.ERROR, ("error[a/b]: no",)))
    assert str(changed) == TEXT.replace("// ---- unchanged", "// ---- error\n// error[a/b]: no")
    added = golden.with_outcome("third", Outcome(Kind.UNCHANGED))
    assert str(added) == TEXT + "\n// ---- unchanged\n"


LINE = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=20).map(str.rstrip)
NOTES = st.lists(LINE.filter(bool), max_size=3).map(tuple)
OUTCOMES = st.one_of(
    st.builds(Outcome, st.sampled_from([Kind.UNCHANGED, Kind.ERROR]), NOTES),
    st.builds(Outcome, st.just(Kind.AFTER), NOTES, st.just("graph @g(\n) {\n}")),
)


@given(st.lists(st.none() | OUTCOMES, min_size=1, max_size=4))
def test_any_outcomes_round_trip(outcomes):
    cases = [
        Case(
            title=f"case {i}",
            description="Text.",
            pipeline="dce",
            device="",
            before="graph @g(\n) {\n}",
            line=0,
            head=f"// ---- case: case {i}\n// Text.\n\ngraph @g(\n) {{\n}}",
            outcome=outcome,
        )
        for i, outcome in enumerate(outcomes)
    ]
    text = str(GoldenFile("", tuple(cases)))
    parsed = parse_golden(text, "dce")
    assert [c.outcome for c in parsed.cases] == outcomes
    assert str(parsed) == text


HEAD = "// ---- case: a\n// Text.\n\ngraph\n\n"


@pytest.mark.parametrize(
    ("text", "id_", "line", "message"),
    [
        ("", "golden/no-case", 1, "no line"),
        ("// a comment\n", "golden/no-case", 1, "no line"),
        ("graph\n" + HEAD, "golden/stray-text", 1, "expected"),
        ("// ---- after\n" + HEAD, "golden/stray-text", 1, "expected"),
        ("// ---- case\n// Text.\n\ngraph\n", "golden/title", 1, "TITLE"),
        ("// ---- case:\n// Text.\n\ngraph\n", "golden/title", 1, "TITLE"),
        ("// ---- case: a::b\n// Text.\n\ngraph\n", "golden/title", 1, "without `::`"),
        (HEAD + HEAD, "golden/duplicate-title", 6, "two cases 'a'"),
        ("// ---- case: a\n\ngraph\n", "golden/description", 1, "does not say"),
        ("// ---- case: a\n// Text.\n", "golden/no-module", 1, "no module"),
        ("// ---- case: a\n// Text.\n\n// ---- unchanged\n", "golden/no-module", 1, "no module"),
        ("// ---- case: a\n// pipelin: dce\n\ngraph\n", "golden/directive", 2, "pipeline, device"),
        (HEAD + "// ---- afterwards\n", "golden/section", 6, "valid: after, unchanged, error"),
        (HEAD + "// ---- error: a/b\n", "golden/section", 6, "unknown section"),
        (HEAD + "// ---- after\n// note\n", "golden/section", 6, "after has no module"),
        (HEAD + "// ---- unchanged\ngraph\n", "golden/section", 6, "comments only"),
        (HEAD + "// ---- unchanged\n\n// ---- error\n", "golden/section", 8, "second outcome"),
    ],
)
def test_malformed(text, id_, line, message):
    with pytest.raises(InputError, match=message) as caught:
        parse_golden(text, "dce", file="dce.eir")
    assert caught.value.id == id_
    assert caught.value.diagnostics[0].where == f"dce.eir:{line}"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_unreadable(tmp_path, content):
    path = tmp_path / "dce.eir"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="cannot read golden cases") as caught:
        read_golden(path)
    assert caught.value.id == "golden/unreadable"
