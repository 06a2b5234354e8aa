"""Where a compile may write."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import UsageError
from edgecc.paths import check_outputs, ir_folder, local_path, refuse_inside, writable_path


@given(st.text(min_size=1))
def test_any_text_is_a_path_or_a_usage_error(text: str) -> None:
    if "\0" in text:
        with pytest.raises(UsageError, match="the x path is"):
            local_path(text, "x")
    else:
        assert local_path(text, "x") == Path(text)


def test_empty_is_no_path() -> None:
    with pytest.raises(UsageError, match="the output path is empty") as caught:
        local_path("", "output")
    assert ". is the working directory" in caught.value.diagnostics[0].help


def test_bytes_that_are_no_unicode_can_be_read_but_not_written() -> None:
    name = b"t\xff".decode("utf-8", "surrogateescape")
    assert local_path(name, "target") == Path(name)
    with pytest.raises(UsageError, match=r"not Unicode: 't\\udcff'"):
        writable_path(name, "output")


def test_half_a_character_is_no_path() -> None:
    """JSON may have it, and the file system has no bytes for it."""
    with pytest.raises(UsageError, match=r"the draft path is 'a\\ud800'") as caught:
        local_path("a\ud800", "draft")
    assert caught.value.id == "usage/bad-path"


@pytest.mark.parametrize("inside", ["c", "c/x", "c/x/y", "c/../c/x", "link", "link/x", "./c"])
def test_inside(tmp_path: Path, inside: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "link").symlink_to("c")
    monkeypatch.chdir(tmp_path)
    for checkpoint in (Path("c"), tmp_path / "c", tmp_path / "link"):
        for path in (Path(inside), tmp_path / inside):
            with pytest.raises(UsageError, match="lies in the checkpoint folder"):
                refuse_inside(path, checkpoint, "-o")


@pytest.mark.parametrize("outside", ["d", "cc", "c.x", "..", "c/../d", "d/c"])
def test_outside(tmp_path: Path, outside: str) -> None:
    (tmp_path / "c").mkdir()
    refuse_inside(tmp_path / outside, tmp_path / "c", "-o")


def test_ir_beside_the_bundle_or_above_it(tmp_path: Path) -> None:
    for dump in ("ir", ".", "b.ir"):
        check_outputs([], tmp_path / "b", tmp_path / dump)
    for dump in ("b", "b/ir"):
        with pytest.raises(UsageError, match="lies in the bundle") as caught:
            check_outputs([], tmp_path / "b", tmp_path / dump)
        assert caught.value.id == "usage/output-overlap"


def test_the_cache_is_no_part_of_a_bundle_or_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for cache in ("cache", ".", "b.cache"):
        check_outputs([tmp_path / "t"], tmp_path / "b", None, tmp_path / cache)
    for cache in ("b", "b/c"):
        with pytest.raises(UsageError, match=r"--cache-dir .* lies in the bundle"):
            check_outputs([tmp_path / "t"], tmp_path / "b", None, tmp_path / cache)
    with pytest.raises(UsageError, match=r"--cache-dir .* lies in the checkpoint folder"):
        check_outputs([tmp_path / "t"], tmp_path / "b", None, tmp_path / "t" / "cache")


def test_a_folder_for_ir(tmp_path: Path) -> None:
    assert ir_folder(tmp_path / "new" / "ir") == tmp_path / "new" / "ir"
    assert ir_folder(tmp_path) == tmp_path
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(UsageError, match="is a file") as caught:
            ir_folder(tmp_path / name)
        assert caught.value.id == "usage/not-a-folder"
    with pytest.raises(UsageError, match="the IR dump path is empty"):
        ir_folder("")


def test_missing_checkpoints_are_for_others_to_report(tmp_path: Path) -> None:
    check_outputs([tmp_path / "none"], tmp_path / "b", None)
