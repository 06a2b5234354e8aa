"""Bundles by what decides them: hits, misses, damage, and two that want the same one."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import edgecc
from edgecc.backends.cache import BundleStore, prune
from edgecc.bundle_cache import bundle_key, cached_bundle
from edgecc.errors import InputError, ResourceError, UsageError
from helpers.goldens import DRAFT, TARGET

OPTIONS: dict[str, Any] = {"max_model_len": 64, "prefill_chunk": 16, "verify": "none"}


class Builds:
    """Compiles, and counts."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.count = 0
        self.lock = threading.Lock()

    def __call__(self, out: Path) -> None:
        with self.lock:
            self.count += 1
        edgecc.compile(self.target, out=out, **OPTIONS)


def get(cache: Path, target: Path, build: Any) -> Path:
    with cached_bundle(cache, target, None, OPTIONS, build) as path:
        return path


def never(out: Path) -> None:
    raise AssertionError(out)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TARGET, tmp_path / "target"))


def test_the_second_time_nothing_is_compiled(tmp_path: Path, target: Path) -> None:
    build = Builds(target)
    first = get(tmp_path / "cache", target, build)
    second = get(tmp_path / "cache", target, build)

    assert first == second
    assert build.count == 1
    (first / "bundle.json").write_text("{", encoding="utf-8")
    assert get(tmp_path / "cache", target, build) == first
    assert build.count == 2
    with edgecc.load(first) as generator:
        assert generator.generate("def", max_new_tokens=2).token_ids


def test_two_that_want_the_same_one(tmp_path: Path, target: Path) -> None:
    build = Builds(target)
    with ThreadPoolExecutor(2) as pool:
        paths = set(pool.map(lambda _: get(tmp_path / "cache", target, build), range(2)))

    assert len(paths) == 1
    assert build.count == 1


def test_what_decides(target: Path) -> None:
    key = bundle_key(target, None, OPTIONS)
    assert bundle_key(target, None, dict(OPTIONS)) == key
    others = {key, bundle_key(target, DRAFT, OPTIONS), bundle_key(target, None, {})}
    weights = next(target.glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))
    others.add(bundle_key(target, None, OPTIONS))
    config = target / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    others.add(bundle_key(target, None, OPTIONS))
    (target / "generation_config.json").write_text('{"temperature": 0.5}', encoding="utf-8")
    others.add(bundle_key(target, None, OPTIONS))

    assert len(others) == 6


def test_a_byte_in_the_middle_of_a_large_file(target: Path) -> None:
    """Size and time are those of before: what tells is that somebody wrote."""
    large = target / "model-large.safetensors"
    large.write_bytes(bytes(3 << 20))
    key, before = bundle_key(target, None, OPTIONS), large.stat()
    with large.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\x01")
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert large.stat().st_mtime_ns == before.st_mtime_ns
    assert bundle_key(target, None, OPTIONS) != key


def test_a_checkpoint_that_changes_meanwhile(tmp_path: Path, target: Path) -> None:
    build = Builds(target)

    def meddle(out: Path) -> None:
        build(out)
        (target / "config.json").touch()
        (target / "new.json").write_text("{}", encoding="utf-8")

    with pytest.raises(InputError, match="changed while"):
        get(tmp_path / "cache", target, meddle)
    assert list((tmp_path / "cache" / "bundles").iterdir()) == []


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        get(tmp_path / "cache", tmp_path / "missing", never)


def test_what_is_held_is_not_pruned(tmp_path: Path, target: Path) -> None:
    cache = tmp_path / "cache"
    shelf = BundleStore(cache)
    with cached_bundle(cache, target, None, OPTIONS, Builds(target)) as path:
        (held,) = shelf.scan()
        kept = prune([shelf], max_bytes=0, everything=True)
        assert path.is_dir()
    (free,) = shelf.scan()
    gone = prune([shelf], max_bytes=0)

    assert (held.in_use, free.in_use) == (True, False)
    assert (kept.removed, kept.kept, kept.kept_bytes) == ((), 1, held.bytes)
    assert [entry.title for entry in gone.removed] == ["bundle target for cpu"]
    assert (gone.kept, gone.freed_bytes) == (0, held.bytes)
    assert list(shelf.directory.iterdir()) == []
    assert shelf.scan() == []


def test_a_damaged_one_is_pruned(tmp_path: Path, target: Path) -> None:
    cache = tmp_path / "cache"
    (get(cache, target, Builds(target)) / "bundle.json").write_text("{", encoding="utf-8")
    shelf = BundleStore(cache)
    (found,) = shelf.scan()
    done = prune([shelf], max_bytes=10**12)

    assert found.entry is None
    assert found.damage
    assert (done.damaged, done.kept) == (1, 0)


def test_a_cache_that_cannot_be_written_serves_what_it_has(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    path = get(cache, target, Builds(target))

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    for name in ("mkdir", "rename", "utime", "unlink", "rmdir"):
        monkeypatch.setattr(os, name, refuse)
    assert get(cache, target, never) == path


def test_without_locks(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each compiles for itself; what the other one has under way is not touched."""
    monkeypatch.setattr("edgecc.backends.staging.fcntl", None)
    cache = tmp_path / "cache"
    inner: list[Path] = []
    build = Builds(target)

    def interrupted(out: Path) -> None:
        build(out)
        inner.append(get(cache, target, build))
        assert out.is_dir()

    assert [get(cache, target, interrupted)] == inner
    assert build.count == 2
    assert [path.name for path in (cache / "bundles").iterdir()] == [inner[0].name]
    edgecc.load(inner[0]).close()


def test_somebody_who_always_prunes(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle that vanishes before it can be held is compiled again, and not for ever."""
    cache = tmp_path / "cache"
    shelf = BundleStore(cache)
    published = BundleStore.publish

    def lose(self: BundleStore, made: Path, path: Path) -> None:
        published(self, made, path)
        assert shelf.remove(path)

    monkeypatch.setattr(BundleStore, "publish", lose)
    monkeypatch.setattr("edgecc.bundle_cache._ATTEMPTS", 2)
    build = Builds(target)
    with pytest.raises(ResourceError, match="other processes"):
        get(cache, target, build)
    assert build.count == 2
