"""Pruning: what goes, in which order, and what is never touched."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from edgecc.backends.cache import Pruned
from edgecc.backends.staging import lock_directory
from helpers.cache_entries import Bench, key

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks of POSIX")

PARTIAL = f".partial-4711-{'0' * 16}"
HUGE = 10**15


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def used(bench: Bench, name: str, days_ago: float) -> None:
    then = time.time() - days_ago * 86400
    os.utime(bench.root / "cache" / key(name=name).digest / "key.json", (then, then))


def names(done: Pruned) -> list[str]:
    return [entry.key.name for entry in done.removed]


def test_nothing_there(bench: Bench) -> None:
    assert bench.store.scan() == []
    assert bench.store.prune(max_bytes=0) == Pruned((), 0, 0, 0, 0, 0)
    assert not (bench.root / "cache").exists()


@pytest.fixture
def four(bench: Bench) -> Bench:
    for name, days in (("b", 3.0), ("a", 4.0), ("d", 1.0), ("c", 2.0)):
        bench.put(key(name=name), bytes(5000))
        used(bench, name, days)
    return bench


def test_scan_is_in_the_order_of_use(four: Bench) -> None:
    found = four.store.scan()
    assert [item.entry and item.entry.key.name for item in found] == ["a", "b", "c", "d"]
    files = [p for p in (four.root / "cache").rglob("*") if p.is_file() and p.suffix != ".TAG"]
    assert sum(item.bytes for item in found) == sum(p.stat().st_size for p in files)


@pytest.mark.parametrize(
    ("days", "gone"), [(0, "abcd"), (0.5, "abcd"), (1.5, "abc"), (3.5, "a"), (9, "")]
)
def test_by_age(four: Bench, days: float, gone: str) -> None:
    done = four.store.prune(max_bytes=HUGE, older_than_s=days * 86400)
    assert names(done) == list(gone)
    assert done.kept == 4 - len(gone)


def test_by_size(four: Bench) -> None:
    sizes = [item.bytes for item in four.store.scan()]
    exact = sum(sizes[2:])
    done = four.store.prune(max_bytes=exact)
    assert (names(done), done.kept, done.kept_bytes) == (["a", "b"], 2, exact)
    assert done.freed_bytes == sum(sizes[:2])
    assert names(four.store.prune(max_bytes=exact)) == []
    assert names(four.store.prune(max_bytes=exact - 1)) == ["c"]


def test_a_use_counts(four: Bench) -> None:
    four.get(key(name="a"))
    assert names(four.store.prune(max_bytes=sum(i.bytes for i in four.store.scan()[2:]))) == [
        "b",
        "c",
    ]


def test_age_and_size_together(four: Bench) -> None:
    one = max(item.bytes for item in four.store.scan())
    assert names(four.store.prune(max_bytes=one, older_than_s=3.5 * 86400)) == ["a", "b", "c"]


def test_everything(four: Bench) -> None:
    done = four.store.prune(max_bytes=HUGE, everything=True)
    assert (names(done), done.kept, done.kept_bytes) == (list("abcd"), 0, 0)
    assert four.names() == {"CACHEDIR.TAG"}


def test_a_clock_that_went_back(four: Bench) -> None:
    used(four, "a", -400)
    assert names(four.store.prune(max_bytes=HUGE, older_than_s=2.5 * 86400)) == ["b"]


def test_damaged_ones_go_first(four: Bench) -> None:
    entry = four.root / "cache" / key(name="d").digest
    (entry / "key.json").write_text("{")
    (four.root / "cache" / ("0" * 64)).touch()
    total = sum(item.bytes for item in four.store.scan())
    done = four.store.prune(max_bytes=HUGE)
    assert (names(done), done.damaged, done.kept) == ([], 2, 3)
    assert done.freed_bytes == total - done.kept_bytes
    assert not entry.exists()


class TestForeign:
    NAMES = (
        "notes.txt", ".hidden", "0" * 63, "0" * 65, "A" * 64, "g" * 64, ".partial-x-1",
        f".partial-1-{'0' * 15}", f"x{'0' * 64}", f".{'0' * 64}",
    )  # fmt: skip

    @pytest.mark.parametrize("kind", ["file", "folder", "link"])
    def test_stays(self, bench: Bench, tmp_path: Path, kind: str) -> None:
        bench.put(key())
        for name in self.NAMES:
            path = bench.root / "cache" / name
            if kind == "file":
                path.touch()
            elif kind == "folder":
                (path / "x").mkdir(parents=True)
            else:
                path.symlink_to(tmp_path)
        assert len(bench.store.scan()) == 1
        bench.store.prune(max_bytes=0, older_than_s=0, everything=True)
        assert bench.names() == {"CACHEDIR.TAG", *self.NAMES}

    def test_links_are_removed_not_followed(self, bench: Bench, tmp_path: Path) -> None:
        bench.put(key())
        outside = tmp_path / "outside"
        (outside / "files").mkdir(parents=True)
        (outside / "files" / "x").write_bytes(bytes(100))
        for name in ("0" * 64, PARTIAL):
            (bench.root / "cache" / name).symlink_to(outside)
        (bench.root / "cache" / key().digest / "files" / "more").symlink_to(outside)
        found = bench.store.scan()
        assert max(item.bytes for item in found) < 2000
        done = bench.store.prune(max_bytes=HUGE, everything=True)
        assert (len(done.removed), done.damaged, done.leftovers) == (1, 1, 1)
        assert (outside / "files" / "x").read_bytes() == bytes(100)
        assert bench.names() == {"CACHEDIR.TAG"}

    def test_a_tag_of_others_stays(self, bench: Bench) -> None:
        (bench.root / "cache").mkdir()
        (bench.root / "cache" / "CACHEDIR.TAG").write_text("mine")
        bench.put(key())
        assert (bench.root / "cache" / "CACHEDIR.TAG").read_text() == "mine"

    def test_tag(self, bench: Bench) -> None:
        """The first line is fixed by the Cache Directory Tagging Specification."""
        bench.put(key())
        lines = (bench.root / "cache" / "CACHEDIR.TAG").read_text().splitlines()
        assert lines[0] == "Signature: 8a477f597d28d172789f06886806bc55"


class TestLeftovers:
    @pytest.fixture
    def left(self, bench: Bench) -> Path:
        bench.put(key())
        path = bench.root / "cache" / PARTIAL
        (path / "files").mkdir(parents=True)
        (path / "files" / "engine.plan").write_bytes(bytes(700))
        return path

    def test_of_the_dead_go(self, bench: Bench, left: Path) -> None:
        assert len(bench.store.scan()) == 1
        done = bench.store.prune(max_bytes=HUGE)
        assert (done.leftovers, done.freed_bytes, done.kept) == (1, 700, 1)
        assert not left.exists()

    def test_of_the_living_stay(self, bench: Bench, left: Path) -> None:
        lock = lock_directory(left, wait=True)
        assert lock is not None
        assert bench.store.prune(max_bytes=HUGE, everything=True).leftovers == 0
        assert left.exists()
        os.close(lock)
        assert bench.store.prune(max_bytes=HUGE).leftovers == 1

    def test_old_ones_go_where_nothing_can_be_locked(
        self, bench: Bench, left: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("edgecc.backends.staging.fcntl", None)
        assert bench.store.prune(max_bytes=HUGE).leftovers == 0
        then = time.time() - 25 * 3600
        os.utime(left, (then, then))
        assert bench.store.prune(max_bytes=HUGE).leftovers == 1
        assert bench.put(key(name="x"))

    @pytest.mark.parametrize("kind", ["file", "pipe"])
    def test_no_folder(self, bench: Bench, kind: str) -> None:
        bench.put(key())
        path = bench.root / "cache" / PARTIAL
        path.touch() if kind == "file" else os.mkfifo(path)
        assert bench.store.prune(max_bytes=HUGE).leftovers == 1
        assert not os.path.lexists(path)

    def test_a_new_working_directory_taken_for_dead(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody prunes between making and locking it: the writer makes another one."""
        times = []

        def late(directory: Path, *, wait: bool) -> int | None:
            if wait and not times:
                times.append(1)
                assert bench.store.prune(max_bytes=HUGE).leftovers == 1
                return None
            return lock_directory(directory, wait=wait)

        monkeypatch.setattr("edgecc.backends.cache.store.lock_directory", late)
        assert bench.put(key())
        assert times
        assert bench.get(key()) == b"engine"
        assert bench.names() == {"CACHEDIR.TAG", key().digest}
