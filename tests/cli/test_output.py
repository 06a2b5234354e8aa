"""Writing to streams that cannot write everything."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.cli.output import Console, print_json, print_text, printable
from edgecc.errors import Diagnostic, Severity

TEXT = "aé模\U0001f600\udcff\n"


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("utf-8", "aé模\U0001f600\\udcff\n"),
        ("latin-1", "aé\\u6a21\\U0001f600\\udcff\n"),
        ("cp1252", "aé\\u6a21\\U0001f600\\udcff\n"),
        ("ascii", "aé模\U0001f600\\udcff\n"),  # click writes UTF-8 then
    ],
)
def test_text(monkeypatch: pytest.MonkeyPatch, encoding: str, expected: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, newline=""))
    assert printable(TEXT, sys.stdout) == expected
    print_text(TEXT)
    written = "utf-8" if encoding == "ascii" else encoding
    assert raw.getvalue().decode(written) == expected


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_stays_json(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, newline=""))
    for text in (TEXT, "é", "plain"):
        raw.seek(0)
        raw.truncate()
        print_json({"text": text})
        written = raw.getvalue().decode("utf-8" if encoding == "ascii" else encoding)
        assert json.loads(written) == {"text": text}


def test_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    print_text("x")
    assert printable("x", None) == "x"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_unicode_stays_as_it_is(text: str) -> None:
    assert printable(text, None) == text


class Broken(io.StringIO):
    """A stream whose reader has left."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")


def test_messages_that_nobody_reads_stop_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(1)
    for stream in (Broken(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        console.info("x")
        console.diagnostic(Diagnostic("a/b", "c", severity=Severity.NOTE))
        console.progress()("lift", 0, 1)
        assert console.failed("a/b", "c", 3) == 3


@pytest.mark.parametrize("color", [False, True])
def test_names_do_not_steer_the_terminal(capsys: pytest.CaptureFixture[str], color: bool) -> None:
    console = Console(color=color)
    console.always("a\x1b[2Kb\rc\x9bd\te\nf\x7f")
    console.diagnostic(Diagnostic("a/b", "\x1b]0;x\x07 is bad", "\x1b[31m"))

    text = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().err)
    assert text == (
        "a\\x1b[2Kb\\x0dc\\x9bd\te\nf\\x7f\nerror[a/b]: \\x1b]0;x\\x07 is bad\n  --> \\x1b[31m\n"
    )
