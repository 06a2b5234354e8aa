"""Where the cache is, and sizes as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.backends.cache import ArtifactCache, cache_directory, format_size, parse_size
from edgecc.errors import Diagnostic, UsageError
from helpers.cache_entries import key


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("EDGECC_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestDirectory:
    def test_first_wins(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert cache_directory() == home / ".cache" / "edgecc"
        monkeypatch.setenv("XDG_CACHE_HOME", "/x")
        assert cache_directory() == Path("/x/edgecc")
        monkeypatch.setenv("EDGECC_CACHE_DIR", "/y")
        assert cache_directory() == Path("/y")
        assert cache_directory("/z") == Path("/z")

    def test_relative_paths(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "x")  # the specification says: ignore it
        assert cache_directory() == home / ".cache" / "edgecc"
        monkeypatch.setenv("EDGECC_CACHE_DIR", "y")
        assert cache_directory() == home / "y"
        assert cache_directory("z") == home / "z"

    def test_empty_variables_are_unset(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("EDGECC_CACHE_DIR", "")
        assert cache_directory() == home / ".cache" / "edgecc"

    @pytest.mark.parametrize("text", ["", "a\0b"])
    def test_no_path(self, text: str) -> None:
        for use in (cache_directory, ArtifactCache.open):
            with pytest.raises(UsageError) as caught:
                use(text)
            assert caught.value.id == "usage/bad-path"

    def test_no_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", fail)
        with pytest.raises(UsageError) as caught:
            cache_directory()
        assert caught.value.id == "cache/no-home"
        reported: list[Diagnostic] = []
        cache = ArtifactCache.open(report=reported.append)
        assert cache.directory is None
        assert [(d.id, d.severity) for d in reported] == [("cache/no-home", "warning")]
        assert not cache.get(key(), tmp_path)

    def test_open_finds_it(self, home: Path) -> None:
        assert ArtifactCache.open().directory == home / ".cache" / "edgecc"
        assert not (home / ".cache").exists()


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [
            ("0", 0),
            ("17", 17),
            ("17B", 17),
            ("50G", 50 * 10**9),
            ("50g", 50 * 10**9),
            ("50GB", 50 * 10**9),
            (" 50 GB ", 50 * 10**9),
            ("500MiB", 500 * 2**20),
            ("1.5KiB", 1536),
            ("1.5K", 1500),
            ("0.1K", 100),
            ("2TiB", 2**41),
            ("2t", 2 * 10**12),
            ("0.0004K", 0),
        ],
    )
    def test_good(self, text: str, nbytes: int) -> None:
        assert parse_size(text) == nbytes

    @pytest.mark.parametrize(
        "text",
        ["", " ", "G", "-1", "+1", "1e9", "1,5G", "1_000", ".5G", "5.", "50X", "50GiX", "50iB",
         "50  G", "0x10", "nan", "inf", "٣G", "1\n", "9" * 5000, "50Gi"],
    )  # fmt: skip
    def test_bad(self, text: str) -> None:
        with pytest.raises(UsageError) as caught:
            parse_size(text)
        assert caught.value.id == "usage/size"

    @pytest.mark.parametrize(
        ("nbytes", "text"),
        [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (999_949, "999.9 KB"),
         (999_950, "1.0 MB"), (50 * 10**9, "50.0 GB"), (10**15, "1000.0 TB")],
    )  # fmt: skip
    def test_shown(self, nbytes: int, text: str) -> None:
        assert format_size(nbytes) == text

    @given(st.integers(0, 10**17))
    def test_what_is_shown_can_be_read(self, nbytes: int) -> None:
        assert abs(parse_size(format_size(nbytes)) - nbytes) <= nbytes * 0.051
