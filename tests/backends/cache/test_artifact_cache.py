"""What backends see: hits, misses and their reasons, and a cache that cannot be used."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgecc.backends.cache.entry as entry_module
from edgecc.backends.cache import ArtifactCache, CacheKey
from edgecc.errors import InternalError, ResourceError
from helpers.cache_entries import Bench, key

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes and locks of POSIX")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


class TestHitsAndMisses:
    def test_there_and_back(self, bench: Bench) -> None:
        assert bench.get(key()) is None
        assert bench.put(key(), b"\0" * (9 << 20) + b"end")
        assert bench.get(key()) == b"\0" * (9 << 20) + b"end"
        assert bench.reported == []

    def test_empty_files(self, bench: Bench) -> None:
        assert bench.put(key(), b"")
        assert bench.get(key()) == b""

    def test_several_files(self, bench: Bench, tmp_path: Path) -> None:
        files = {name: tmp_path / name for name in ("engine.plan", "timing.cache", "log_1+x")}
        for name, path in files.items():
            path.write_text(name)
        assert bench.cache.put(key(), files)
        found = bench.cache.get(key(), bench.into)
        assert (bool(found), set(found.files)) == (True, set(files))
        assert {p.name: p.read_text() for p in bench.into.iterdir()} == {n: n for n in files}

    def test_a_hit_replaces_files(self, bench: Bench) -> None:
        bench.put(key(), b"new")
        (bench.into / "engine.plan").write_bytes(b"old and longer")
        (bench.into / "other").touch()
        assert bench.cache.get(key(), bench.into)
        assert (bench.into / "engine.plan").read_bytes() == b"new"
        assert {p.name for p in bench.into.iterdir()} == {"engine.plan", "other"}

    def test_what_was_copied_is_independent(self, bench: Bench) -> None:
        bench.put(key())
        bench.cache.get(key(), bench.into)
        (bench.into / "engine.plan").write_bytes(b"changed")
        assert bench.get(key()) == b"engine"

    def test_the_first_build_stays(self, bench: Bench) -> None:
        """Builders need not give the same bytes twice; either is right."""
        assert bench.put(key(), b"first")
        assert bench.put(key(), b"second")
        assert bench.get(key()) == b"first"
        assert bench.names() == {"CACHEDIR.TAG", key().digest}

    @pytest.mark.parametrize(
        ("built", "why"),
        [
            ([], "none is in the cache yet"),
            ([key(name="draft"), key(kind="timing")], "none is in the cache yet"),
            ([key(builder_version="1.7.0")], "builder version 1.7.0 -> 1.7.1"),
            (
                [key(device="sm89", ir="0"), key(ir="0"), key(name="draft"), key(ir="0", flags={})],
                "the graph changed",
            ),
            (
                [key(flags={"weights": "bind"}, ir="0")],
                "flag weights bind -> embed; the graph changed",
            ),
            ([key(device="sm86"), key(device="sm89")], "device sm89 -> sm120"),  # the newest
        ],
    )
    def test_reasons(self, bench: Bench, built: list[CacheKey], why: str) -> None:
        for each in built:
            assert bench.put(each)
        found = bench.cache.get(key(), bench.into)
        assert found.reason == f"engine target for sm120 built anew: {why}"
        bench.put(key())
        found = bench.cache.get(key(), bench.into)
        assert found.reason == "engine target for sm120 taken from the cache"

    @pytest.mark.parametrize(
        "name", ["", ".", "..", "../x", "a/b", "/x", ".hidden", "-x", "a\0", "é", "x" * 129]
    )
    def test_names_are_names(self, bench: Bench, name: str) -> None:
        with pytest.raises(InternalError) as caught:
            bench.put(key(), name=name)
        assert caught.value.id == "cache/bad-name"
        assert not (bench.root / "cache").exists()

    def test_no_files(self, bench: Bench) -> None:
        with pytest.raises(InternalError):
            bench.cache.put(key(), {})

    def test_no_cache(self, bench: Bench, tmp_path: Path) -> None:
        bench.cache = ArtifactCache(None)
        assert not bench.put(key())
        found = bench.cache.get(key(), bench.into)
        assert found.reason == "engine target for sm120 built anew: no cache is used"


def test_every_use_is_noted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """By our own clock: that of a file system may tick too slowly to tell two uses apart."""

    def used() -> int:
        (item,) = bench.store.scan()
        assert item.entry is not None
        return item.entry.used_ns

    for now, use in enumerate([bench.put, bench.put, bench.get, bench.put], start=1):
        monkeypatch.setattr(entry_module.time, "time_ns", lambda now=now: now * 10**9)
        assert use(key())
        assert used() == now * 10**9


class TestLimit:
    def test_the_one_not_used_for_longest_goes(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, max_bytes=12_000)
        a, b, c, d = (key(name=name) for name in "abcd")
        for each in (a, b, c):
            assert bench.put(each, bytes(3000))
        assert bench.get(a)
        assert bench.put(d, bytes(3000))
        assert [bench.get(k) is not None for k in (a, b, c, d)] == [True, False, True, True]
        assert bench.reported == []

    def test_too_large(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, max_bytes=9999)
        assert bench.put(key(name="small"), bytes(100))
        assert not bench.put(key(), bytes(10_000))
        (said,) = bench.reported
        assert (said.id, said.severity) == ("cache/too-large", "note")
        assert "10.0 KB is over the limit 10.0 KB" in said.message
        assert bench.get(key(name="small")) is not None

    def test_zero_keeps_nothing(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path, max_bytes=0)
        bench.put(key(), b"")
        assert bench.get(key()) is None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def removed(path: Path) -> None:
    path.unlink() if not path.is_dir() else os.rename(path, path.with_name("gone"))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(content, encoding="utf-8")

    write.__name__ = f"text {content[:12]}"
    return write


def edit(old: str, new: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        before = path.read_text()
        assert old in before
        path.write_text(before.replace(old, new))

    write.__name__ = f"{old} to {new}"
    return write


PLAN = "files/engine.plan"
DAMAGE: list[tuple[str, Callable[[Path], Any], str]] = [
    (PLAN, flip, "the content of engine.plan changed"),
    (PLAN, truncated, "engine.plan has 5 bytes, not 6"),
    (PLAN, longer, "engine.plan has 7 bytes, not 6"),
    (PLAN, removed, "engine.plan is missing"),
    (PLAN, replaced_by_link, "engine.plan is not a file"),
    (PLAN, pipe, "engine.plan is not a file"),
    (PLAN, folder, "engine.plan is not a file"),
    ("files", replaced_by_link, "files/ is missing"),
    ("files", removed, "files/ is missing"),
    ("key.json", truncated, "key.json cannot be used"),
    ("key.json", removed, "key.json is missing"),
    ("key.json", replaced_by_link, "key.json is not a file"),
    ("key.json", pipe, "key.json is not a file"),
    ("key.json", folder, "key.json is not a file"),
    ("key.json", text(""), "key.json cannot be used"),
    ("key.json", text("{"), "key.json cannot be used"),
    ("key.json", text("[" * 100_000), "key.json cannot be used"),
    ("key.json", text("[]"), "another version"),
    ("key.json", text("null"), "another version"),
    ("key.json", text("9" * 9999), "key.json cannot be used"),
    ("key.json", text('{"format": 1}'), "key.json cannot be used"),
    ("key.json", edit('"format": 1', '"format": 2'), "another version"),
    ("key.json", edit("1.7.1", "1.7.2"), "key.json belongs to another entry"),
    ("key.json", edit('"engine.plan"', '"../../secret"'), "is no name of a file"),
    ("key.json", edit('"engine.plan"', '"/etc/passwd"'), "is no name of a file"),
    ("key.json", edit('"engine.plan"', '".."'), "is no name of a file"),
    ("key.json", edit('"engine.plan"', '"missing.plan"'), "missing.plan is missing"),
    ("key.json", edit('"bytes": 6', '"bytes": 7'), "engine.plan has 6 bytes, not 7"),
    ("key.json", edit('"bytes": 6', '"bytes": -6'), "engine.plan has no size"),
    ("key.json", edit('"bytes": 6', '"bytes": 6.0'), "engine.plan has no size"),
    ("key.json", edit('"bytes": 6', '"bytes": true'), "engine.plan has no size"),
    ("key.json", edit('"bytes": 6', '"size": 6'), "needs bytes and sha256"),
    ("key.json", edit('"sha256": "', '"sha256": "x'), "engine.plan has no hash"),
    ("key.json", edit('"files": {', '"files": {}, "x": {'), "it lists no files"),
    ("", replaced_by_link, "not a folder"),
]


class TestDamage:
    @pytest.mark.parametrize(
        ("place", "damage", "words"), DAMAGE, ids=[f"{p}-{d.__name__}" for p, d, _ in DAMAGE]
    )
    def test_is_a_miss_and_is_mended(
        self, bench: Bench, place: str, damage: Callable[[Path], Any], words: str
    ) -> None:
        (bench.root / "secret").write_bytes(b"engine")
        bench.put(key())
        entry = bench.root / "cache" / key().digest
        damage(entry / place if place else entry)
        found = bench.cache.get(key(), bench.into)
        assert not found
        assert "the cached one is damaged" in found.reason
        assert words in found.reason
        (said,) = bench.reported
        assert (said.id, said.severity, said.where) == ("cache/damaged", "note", str(entry))
        assert said.message.endswith("; it was removed")
        assert not list(bench.into.iterdir())
        assert not os.path.lexists(entry)
        assert (bench.root / "secret").read_bytes() == b"engine"
        assert bench.put(key(), b"again!")
        assert bench.get(key()) == b"again!"

    def test_links_are_removed_and_not_followed(self, bench: Bench, tmp_path: Path) -> None:
        bench.put(key())
        entry = bench.root / "cache" / key().digest
        entry.rename(tmp_path / "outside")
        entry.symlink_to(tmp_path / "outside")
        assert bench.get(key()) is None
        assert (tmp_path / "outside" / PLAN).read_bytes() == b"engine"

    @pytest.mark.parametrize("damage", ["file", "empty", "link", "dangling", "other"])
    def test_put_replaces_what_lies_there(self, bench: Bench, tmp_path: Path, damage: str) -> None:
        bench.put(key(name="other"))
        entry = bench.root / "cache" / key().digest
        (tmp_path / "x").mkdir()
        if damage == "file":
            entry.touch()
        elif damage == "empty":
            entry.mkdir()
        elif damage == "other":
            (bench.root / "cache" / key(name="other").digest).rename(entry)
        else:
            entry.symlink_to(tmp_path / ("x" if damage == "link" else "nothing"))
        assert bench.put(key())
        assert bench.get(key()) == b"engine"
        assert bench.reported == []

    def test_foreign_files_in_an_entry_do_no_harm(self, bench: Bench) -> None:
        bench.put(key())
        entry = bench.root / "cache" / key().digest
        (entry / "notes").touch()
        (entry / "files" / "link").symlink_to("/")
        assert bench.get(key()) == b"engine"

    def test_damaged_neighbours_do_not_hide_the_reason(self, bench: Bench) -> None:
        bench.put(key(ir="0"))
        bench.put(key(device="sm89"))
        (bench.root / "cache" / key(ir="0").digest / "key.json").write_text("{")
        assert "device sm89 -> sm120" in bench.cache.get(key(), bench.into).reason


class TestUnusable:
    @pytest.fixture(params=["file", "below a file", "dangling link"])
    def blocked(self, request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
        bench = Bench(tmp_path)
        place = tmp_path / "cache"
        if request.param == "file":
            place.touch()
        elif request.param == "below a file":
            place.touch()
            bench.cache = ArtifactCache(place / "cache", report=bench.reported.append)
        else:
            place.symlink_to(tmp_path / "nowhere" / "x")
        return bench

    def test_put_warns(self, blocked: Bench) -> None:
        assert not blocked.put(key())
        (said,) = blocked.reported
        assert (said.id, said.severity) == ("cache/unusable", "warning")
        assert said.message.startswith("the cache cannot be written: ")
        assert "EDGECC_CACHE_DIR" in said.help

    def test_get_misses(self, blocked: Bench) -> None:
        assert blocked.get(key()) is None
        assert set(blocked.ids()) <= {"cache/unusable"}

    def refuse(self, monkeypatch: pytest.MonkeyPatch, call: str, code: int) -> None:
        """Let a call of the system fail, which also tests what root is allowed to do."""

        def fail(*arguments: object, **options: object) -> Any:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, call, fail)

    @pytest.mark.parametrize("call", ["mkdir", "fsync", "rename"])
    @pytest.mark.parametrize(
        ("code", "id"),
        [
            (errno.ENOSPC, "cache/disk-full"),
            (errno.EDQUOT, "cache/disk-full"),
            (errno.EACCES, "cache/unusable"),
            (errno.EROFS, "cache/unusable"),
        ],
    )
    def test_refusals(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str, code: int, id: str
    ) -> None:
        with monkeypatch.context() as patch:
            self.refuse(patch, call, code)
            assert not bench.put(key())
        (said,) = bench.reported
        assert (said.id, said.severity) == (id, "warning")
        assert os.strerror(code) in said.message
        if (bench.root / "cache").exists():
            assert bench.names() <= {"CACHEDIR.TAG"}
        assert bench.put(key())

    def test_pruning_that_fails_after_all(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.cache.max_bytes = 9000
        bench.put(key(name="old"), bytes(7000))
        with monkeypatch.context() as patch:
            self.refuse(patch, "unlink", errno.EACCES)
            assert bench.put(key(), bytes(7000))
        assert [d.message for d in bench.reported] == [
            "the cache cannot be pruned: Permission denied"
        ]
        assert bench.get(key()) == bytes(7000)

    def test_read_only_serves(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.put(key())
        before = (bench.root / "cache" / key().digest / "key.json").stat().st_mtime_ns
        self.refuse(monkeypatch, "utime", errno.EROFS)
        assert bench.get(key()) == b"engine"
        assert bench.reported == []
        assert (bench.root / "cache" / key().digest / "key.json").stat().st_mtime_ns == before

    def test_damage_that_cannot_be_removed(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.put(key())
        flip(bench.root / "cache" / key().digest / PLAN)
        self.refuse(monkeypatch, "rename", errno.EROFS)
        assert bench.get(key()) is None
        (said,) = bench.reported
        assert "it cannot be removed: Read-only file system" in said.message

    def test_unreadable_content(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        bench.put(key())

        def fail(reader: object, write: object) -> Any:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr(entry_module, "_copy", fail)
            assert bench.get(key()) is None
        assert bench.ids() == ["cache/unusable"]
        assert bench.get(key()) == b"engine", "it was not the entry's fault"

    def test_a_destination_that_is_full_is_no_fault_of_the_cache(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench.put(key())

        class Full(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: object) -> int:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", lambda *arguments, **options: Full())
            with pytest.raises(ResourceError) as caught:
                bench.cache.get(key(), bench.into)
        assert caught.value.id == "bundle/disk-full"
        assert not list(bench.into.iterdir())
        assert bench.get(key()) == b"engine"

    def test_no_destination(self, bench: Bench) -> None:
        bench.put(key())
        with pytest.raises(ResourceError):
            bench.cache.get(key(), bench.root / "missing")

    def test_a_missing_source_is_no_reason_to_fail(self, bench: Bench) -> None:
        assert not bench.cache.put(key(), {"engine.plan": bench.root / "missing"})
        assert bench.ids() == ["cache/unusable"]

    def test_interrupted(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", interrupt)
            with pytest.raises(KeyboardInterrupt):
                bench.put(key())
        assert bench.names() == {"CACHEDIR.TAG"}
        assert bench.reported == []


def test_only_the_owner_gets_in(bench: Bench) -> None:
    bench.put(key())
    cache = bench.root / "cache"
    assert [p.stat().st_mode & 0o077 for p in (cache, cache / key().digest)] == [0, 0]


def test_an_entry_replaced_while_it_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between key and content: the reader sees the old key with the new bytes, and looks again."""
    bench.put(key(), b"first!")
    original = entry_module.copy_out
    calls = []

    def late(entry: Any, directory: Path) -> None:
        if not calls:
            bench.store.remove(entry.path)
            bench.put(key(), b"second")
        calls.append(1)
        original(entry, directory)

    monkeypatch.setattr("edgecc.backends.cache.artifact_cache.copy_out", late)
    assert bench.get(key()) == b"second"
    assert bench.reported == []


def test_an_entry_pruned_while_it_is_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put(key())
    original = entry_module.copy_out

    def late(entry: Any, directory: Path) -> None:
        bench.store.prune(max_bytes=0)
        original(entry, directory)

    monkeypatch.setattr("edgecc.backends.cache.artifact_cache.copy_out", late)
    assert bench.get(key()) is None
    assert bench.reported == []
