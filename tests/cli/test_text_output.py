"""Texts that commands write to files: where they may go, and what is there if they fail."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgecc.cli.text_output import text_file, write_text
from edgecc.errors import ResourceError, UsageError
from helpers.broken_pairs import write_pair
from helpers.command_line import Command


@pytest.fixture
def pair(tmp_path: Path, edgecc: Command) -> tuple[Path, Path]:
    """A target, and IR text that names it."""
    target, _ = write_pair(tmp_path)
    text = tmp_path / "t.eir"
    assert edgecc("lift", target, "-o", text).code == 0
    return target, text


def test_never_into_a_checkpoint(pair: tuple[Path, Path], edgecc: Command) -> None:
    target, text = pair
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    for arguments in (
        ("lift", target, "-o", target / "config.json"),
        ("opt", text, "-p", "dce", "-o", target / "model.safetensors"),
        ("opt", text, "-p", "dce", "--timing-json", target / "new.json"),
        ("opt", text, "-p", "dce", "--dump-ir", target / "new"),
        ("reduce", text, "-p", "dce", "-o", target / "new.eir"),
    ):
        result = edgecc(*arguments)
        assert result.code == 2
        assert result.last.startswith("edgecc: error[usage/output-in-checkpoint]: ")
        assert str(target) in result.last
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before


@pytest.mark.parametrize("command", ["lift", "opt", "reduce"])
def test_told_before_the_work(
    pair: tuple[Path, Path], edgecc: Command, tmp_path: Path, command: str
) -> None:
    target, text = pair
    source = [target] if command == "lift" else [text, "-p", "lower-encodings"]  # which would fail
    for place, what in (
        (tmp_path / "no" / "x.eir", f"cannot be made: no folder {tmp_path / 'no'}"),
        (tmp_path, "is a folder"),
    ):
        result = edgecc(command, *source, "-o", place)
        assert (result.code, result.out) == (2, "")
        assert result.last == f"edgecc: error[usage/output]: -o {place} {what}"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_is_full() -> None:
    with pytest.raises(ResourceError, match="No space left") as caught:
        write_text(Path("/dev/full"), "x")
    assert caught.value.id == "bundle/disk-full"


def test_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, link = tmp_path / "x.eir", tmp_path / "link"
    path.write_text("before")
    path.chmod(0o640)
    link.symlink_to("x.eir")

    write_text(text_file(str(link), []), "after")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", 0o640)
    assert link.is_symlink()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "never")
    assert path.read_text() == "after"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "x.eir"]


def test_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    for name in (None, "-"):
        write_text(text_file(name, []), "a\n")
    assert capsys.readouterr().out == "a\na\n"
    with pytest.raises(UsageError, match="empty"):
        text_file("", [])
