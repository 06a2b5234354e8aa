"""`edgecc cache`, and the options of commands that build what is kept."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click
import pytest

from edgecc.backends.cache import ArtifactCache
from edgecc.cli.cache_options import cache_options, open_cache
from edgecc.errors import Diagnostic, UsageError
from helpers.cache_entries import Bench, key
from helpers.command_line import Command, environment, process


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A cache that the environment names, with two entries."""
    bench = Bench(tmp_path)
    monkeypatch.setenv("EDGECC_CACHE_DIR", str(tmp_path / "cache"))
    bench.put(key(name="draft", builder_version="1.7.0"), bytes(3000))
    bench.put(key(), bytes(5000))
    age(bench, key(name="draft", builder_version="1.7.0"), 3)
    return bench


def age(bench: Bench, key: Any, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(bench.store.path(key) / "key.json", (then, then))


class TestPath:
    def test_flag_and_variables(
        self, edgecc: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("EDGECC_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert edgecc("cache", "path").out == f"{tmp_path / 'xdg' / 'edgecc'}\n"
        monkeypatch.setenv("EDGECC_CACHE_DIR", str(tmp_path / "own"))
        assert edgecc("cache", "path").out == f"{tmp_path / 'own'}\n"
        result = edgecc("cache", "path", "--cache-dir", tmp_path / "flag")
        assert (result.code, result.out) == (0, f"{tmp_path / 'flag'}\n")
        assert result.last == "edgecc: ok cache directory"
        assert not list(tmp_path.iterdir())

    def test_no_home(self, edgecc: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> Path:
            raise RuntimeError

        for name in ("EDGECC_CACHE_DIR", "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(Path, "home", fail)
        result = edgecc("cache", "path")
        assert (result.code, result.id, result.out) == (2, "cache/no-home", "")

    @pytest.mark.parametrize("words", [["path"], ["ls"], ["prune"]])
    def test_empty(self, edgecc: Command, words: list[str]) -> None:
        result = edgecc("cache", *words, "--cache-dir", "")
        assert (result.code, result.id) == (2, "usage/bad-path")


class TestLs:
    def test_rows(self, edgecc: Command, bench: Bench) -> None:
        result = edgecc("cache", "ls")
        assert result.code == 0
        first, second = result.out.splitlines()
        assert first.split("  ")[0] == key(name="draft", builder_version="1.7.0").digest[:12]
        assert first.endswith("  3 days ago  engine draft for sm120, tensorrt_rtx 1.7.0")
        assert second.endswith("  just now  engine target for sm120, tensorrt_rtx 1.7.1")
        total = sum(item.bytes for item in bench.store.scan())
        assert result.last == f"edgecc: ok 2 entries, {total / 1000:.1f} KB"

    def test_json(self, edgecc: Command, bench: Bench) -> None:
        value = json.loads(edgecc("cache", "ls", "--json").out)
        assert value["directory"] == str(bench.root / "cache")
        draft, target = value["entries"]
        assert value["bytes"] == draft["bytes"] + target["bytes"]
        assert target["key"] == key().to_json()
        assert (target["entry"], target["damage"]) == (key().digest, "")
        assert target["files"] == {"engine.plan": 5000}
        assert target["last_used"].endswith("+00:00")

    def test_empty(self, edgecc: Command, tmp_path: Path) -> None:
        result = edgecc("cache", "ls", "--cache-dir", tmp_path / "missing")
        assert (result.code, result.out, result.last) == (0, "", "edgecc: ok 0 entries, 0 B")
        result = edgecc("cache", "ls", "--json", "--cache-dir", tmp_path / "missing")
        assert json.loads(result.out)["entries"] == []

    def test_damaged(self, edgecc: Command, bench: Bench) -> None:
        (bench.store.path(key()) / "key.json").write_text('{"format": 2}')
        (bench.store.path(key(name="x"))).symlink_to("/")
        rows = edgecc("cache", "ls").out.splitlines()
        assert "  damaged: key.json cannot be used: it was written by another ver" in "".join(rows)
        assert sum("  damaged: not a folder" in row for row in rows) == 1
        value = json.loads(edgecc("cache", "ls", "--json").out)
        assert [bool(e["damage"]) for e in value["entries"]] == [True, True, False]
        assert ["key" in e for e in value["entries"]] == [False, False, True]

    def test_nothing_a_terminal_would_obey(self, edgecc: Command, bench: Bench) -> None:
        bench.put(key(builder="\x1b]0;x\x07\n", name="\r", device="\x9b"))
        result = edgecc("cache", "ls")
        assert len(result.out.splitlines()) == 3
        assert result.out.replace("\n", "").isprintable()

    @pytest.mark.parametrize("when", [0, 2**33, -(2**40), 2**34])
    def test_odd_times(self, edgecc: Command, bench: Bench, when: int) -> None:
        os.utime(bench.store.path(key()) / "key.json", (when, when))
        assert edgecc("cache", "ls").code == 0
        assert edgecc("cache", "ls", "--json").code == 0

    def test_a_file(self, edgecc: Command, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for words in (["ls"], ["prune"]):
            result = edgecc("cache", *words, "--cache-dir", tmp_path / "file")
            assert (result.code, result.id) == (2, "cache/not-a-folder")

    def test_refused(self, edgecc: Command, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(path: object) -> list[str]:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(os, "listdir", fail)
        result = edgecc("cache", "ls")
        assert (result.code, result.id) == (6, "cache/unusable")
        assert str(bench.root / "cache") in result.err


class TestPrune:
    def test_by_size(self, edgecc: Command, bench: Bench) -> None:
        result = edgecc("cache", "prune", "--max-size", "6.5K", "-v")
        assert (result.code, result.out) == (0, "")
        assert "  removed engine draft for sm120\n" in result.err
        assert result.last.startswith("edgecc: ok removed 1 entry: ")
        assert "; left 1 entry, " in result.last
        assert bench.get(key()) == bytes(5000)

    def test_by_age(self, edgecc: Command, bench: Bench) -> None:
        assert "left 2 entries" in edgecc("cache", "prune", "--older-than", 3.5).last
        result = edgecc("cache", "prune", "--older-than", 2, "--json")
        (item,) = bench.store.scan()
        value = json.loads(result.out)
        assert value.pop("freed_bytes") > 3000
        assert value == {
            "directory": str(bench.root / "cache"),
            "removed": [key(name="draft", builder_version="1.7.0").digest],
            "damaged": 0,
            "leftovers": 0,
            "kept": 1,
            "kept_bytes": item.bytes,
        }

    def test_all(self, edgecc: Command, bench: Bench) -> None:
        assert edgecc("cache", "prune", "--all").last.endswith("; left 0 entries, 0 B")
        assert bench.names() == {"CACHEDIR.TAG"}

    def test_without_arguments(self, edgecc: Command, bench: Bench) -> None:
        """Only what is of no use to anybody."""
        (bench.store.path(key()) / "key.json").unlink()
        (bench.root / "cache" / f".partial-1-{'0' * 16}").mkdir()
        result = edgecc("cache", "prune")
        assert "ok removed 0 entries, 1 damaged entry, 1 leftover: 5.0 KB" in result.last
        assert "; left 1 entry, " in result.last

    def test_a_missing_cache_is_not_made(self, edgecc: Command, tmp_path: Path) -> None:
        result = edgecc("cache", "prune", "--all", "--cache-dir", tmp_path / "x" / "y")
        assert result.code == 0
        assert not (tmp_path / "x").exists()

    @pytest.mark.parametrize(
        ("words", "id"),
        [
            (["--max-size", "50X"], "usage/size"),
            (["--max-size", "-1"], "usage/size"),
            (["--max-size", ""], "usage/size"),
            (["--older-than", "-1"], "usage/older-than"),
            (["--older-than", "nan"], "usage/older-than"),
            (["--older-than", "inf"], "usage/older-than"),
            (["--older-than", "1e300"], "usage/older-than"),
            (["--older-than", "x"], "usage"),
            (["--all", "--max-size", "1G"], "usage/contradiction"),
            (["--all", "--older-than", "1"], "usage/contradiction"),
            (["x"], "usage"),
            (["--tp", "2"], "usage"),
        ],
    )
    def test_usage(self, edgecc: Command, bench: Bench, words: list[str], id: str) -> None:
        result = edgecc("cache", "prune", *words)
        assert (result.code, result.id, result.out) == (2, id, "")
        assert len(bench.store.scan()) == 2

    def test_refused(self, edgecc: Command, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(source: object, target: object) -> None:
            raise OSError(30, "Read-only file system", str(source))

        monkeypatch.setattr(os, "rename", fail)
        result = edgecc("cache", "prune", "--all")
        assert (result.code, result.id) == (6, "cache/unusable")
        assert "Read-only file system" in result.last


class TestGroup:
    def test_alone_it_shows_its_commands(self, edgecc: Command) -> None:
        result = edgecc("cache")
        assert (result.code, result.id) == (2, "usage")
        assert all(f"  {name} " in result.err for name in ("ls", "path", "prune"))

    def test_unknown(self, edgecc: Command) -> None:
        result = edgecc("cache", "rm")
        assert (result.code, result.id) == (2, "usage")
        assert "No such command 'rm'" in result.last

    def test_as_a_process(self, bench: Bench) -> None:
        env = environment(EDGECC_CACHE_DIR=str(bench.root / "cache"))
        assert process("cache", "ls", env=env).out.count("\n") == 2


class TestOptions:
    """For commands that build; none does yet, so they are tried on a command of the test."""

    def opened(self, *words: str) -> tuple[ArtifactCache, list[Diagnostic]]:
        reported: list[Diagnostic] = []

        @click.command()
        @cache_options
        def command(**flags: Any) -> ArtifactCache:
            return open_cache(flags, reported.append)

        return command.main(list(words), standalone_mode=False), reported

    def test_default(self, bench: Bench) -> None:
        cache, reported = self.opened()
        assert (cache.directory, cache.max_bytes) == (bench.root / "cache", 50 * 10**9)
        assert reported == []

    def test_flags(self, tmp_path: Path) -> None:
        cache, _ = self.opened("--cache-dir", str(tmp_path), "--cache-max-size", "1MiB")
        assert (cache.directory, cache.max_bytes) == (tmp_path, 2**20)

    def test_no_cache(self, bench: Bench) -> None:
        cache, reported = self.opened("--no-cache")
        assert not cache.get(key(), bench.into)
        assert not cache.put(key(), {"x": bench.root / "built"})
        assert (cache.directory, reported) == (None, [])

    @pytest.mark.parametrize(
        ("words", "id"),
        [
            (["--no-cache", "--cache-dir", "x"], "usage/contradiction"),
            (["--no-cache", "--cache-max-size", "1G"], "usage/contradiction"),
            (["--cache-max-size", "much"], "usage/size"),
            (["--no-cache", "--cache-max-size", "much"], "usage/size"),
            (["--cache-dir", ""], "usage/bad-path"),
        ],
    )
    def test_usage(self, words: list[str], id: str) -> None:
        with pytest.raises(UsageError) as caught:
            self.opened(*words)
        assert caught.value.id == id

    def test_reports_go_to_the_command(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        cache, reported = self.opened("--cache-dir", str(tmp_path / "file"))
        assert not cache.put(key(), {"x": tmp_path / "file"})
        assert [d.id for d in reported] == ["cache/unusable"]
