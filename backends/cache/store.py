"""The directory with all entries: looking through it, adding, removing, keeping to a size.

```
ROOT/CACHEDIR.TAG               tells backup programs to pass by
ROOT/<64 hex digits>/           an entry
ROOT/.partial-<pid>-<random>/   an entry that is being written or removed
```

Nothing else that lies there is touched. An entry appears and vanishes by renaming, so nobody sees
half of one, and of two processes that write the same one the first wins: the key says that both
built the same. A working directory is locked (flock) while it is written; one that can be locked,
or is a day old, was left by a process that was killed, and goes with the next pruning.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgecc.backends.cache.entry import (
    DamagedEntryError,
    Entry,
    bytes_on_disk,
    read_entry,
    touch,
    write_entry,
)
from edgecc.backends.cache.key import CacheKey
from edgecc.backends.staging import lock_directory
from edgecc.backends.storage import sync

_ENTRY = re.compile(r"[0-9a-f]{64}")
_PARTIAL = re.compile(r"\.partial-\d+-[0-9a-f]{16}")
_TAG = "CACHEDIR.TAG"
_TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# This directory is a cache of edgecc. See https://bford.info/cachedir/ about this file.
"""
_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_ATTEMPTS = 8
_DAY_S = 24 * 60 * 60


@dataclass(frozen=True, slots=True)
class Found:
    """A folder of the cache.

    Attributes:
        path: Where it is.
        bytes: What it takes on the disk.
        entry: Its content; None if it is damaged.
        damage: In which way; empty if it is not.
    """

    path: Path
    bytes: int
    entry: Entry | None = None
    damage: str = ""


@dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning did.

    Attributes:
        removed: Entries that were removed, in this order.
        damaged: How many damaged entries were removed.
        leftovers: How many working directories of killed processes were removed.
        freed_bytes: The sizes of all these.
        kept: How many entries are left.
        kept_bytes: Their size.
    """

    removed: tuple[Entry, ...]
    damaged: int
    leftovers: int
    freed_bytes: int
    kept: int
    kept_bytes: int


class Store:
    """A directory of entries. Other processes may change it at any time.

    Args:
        directory: Need not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: CacheKey) -> Path:
        """Where the entry of a key is, if there is one."""
        return self.directory / key.digest

    def scan(self) -> list[Found]:
        """All entries, whole or damaged, the one used last at the end.

        Raises:
            OSError: The directory cannot be read.
        """
        found = [f for path in self._named(_ENTRY) if (f := _look(path)) is not None]
        return sorted(found, key=lambda f: (f.entry.used_ns if f.entry else 0, f.path.name))

    def add(self, key: CacheKey, files: Mapping[str, Path]) -> None:
        """Copy files into a new entry. A whole entry of the same key stays as it is.

        Raises:
            OSError: A file or the cache cannot be read or written.
            ResourceError: The disk refuses.
        """
        self._make()
        with self._work() as work:
            write_entry(work, key, files)
            self._publish(work, self.path(key))

    def remove(self, path: Path) -> bool:
        """Remove an entry.

        Returns:
            Whether it was there.

        Raises:
            OSError: It cannot be removed.
        """
        trash = self.directory / _partial_name()
        try:
            os.rename(path, trash)
        except FileNotFoundError:
            return False
        _delete(trash)
        return True

    def prune(
        self, *, max_bytes: int, older_than_s: float | None = None, everything: bool = False
    ) -> Pruned:
        """Remove what was left by killed processes, what is damaged, and what is too much.

        Args:
            max_bytes: Remove what was not used for longest until the rest is this small.
            older_than_s: Remove entries that were not used for so many seconds.
            everything: Remove all entries.

        Raises:
            OSError: The directory cannot be read, or something cannot be removed.
        """
        leftovers, freed = self._sweep()
        found = self.scan()
        total = sum(f.bytes for f in found)
        latest_ns = time.time_ns() - int((older_than_s or 0) * 1e9)
        removed, kept, damaged = [], [], 0
        for item in found:
            expired = older_than_s is not None and item.entry and item.entry.used_ns < latest_ns
            if item.entry and not (everything or expired or total > max_bytes):
                kept.append(item)
                continue
            total -= item.bytes
            if self.remove(item.path):
                freed += item.bytes
                damaged += item.entry is None
                removed += [item.entry] if item.entry else []
        return Pruned(tuple(removed), damaged, leftovers, freed, len(kept), total)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return []
        return [self.directory / name for name in sorted(names) if pattern.fullmatch(name)]

    def _make(self) -> None:
        """Make the directory, for the user alone: what is in it will be executed."""
        for folder in reversed((self.directory, *self.directory.parents)):
            if not folder.exists():
                folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError), (self.directory / _TAG).open("x", encoding="ascii") as tag:
            tag.write(_TAG_TEXT)

    @contextmanager
    def _work(self) -> Iterator[Path]:
        """A new working directory, locked; removed at the end unless it was renamed."""
        for _ in range(_ATTEMPTS):
            work = self.directory / _partial_name()
            work.mkdir(mode=0o700)
            lock = lock_directory(work, wait=True)
            try:
                # Whoever pruned before it was locked took it for a dead one.
                if work.exists():
                    yield work
                    return
            finally:
                shutil.rmtree(work, ignore_errors=True)
                if lock is not None:
                    os.close(lock)
        raise OSError(errno.EBUSY, "working directories are removed by others", str(self.directory))

    def _publish(self, work: Path, path: Path) -> None:
        for _ in range(_ATTEMPTS):
            try:
                os.rename(work, path)
            except OSError as error:
                if error.errno not in _IN_THE_WAY:
                    raise
            else:
                sync(self.directory)
                return
            found = _look(path)
            if found is not None and found.entry:
                touch(path)
                return
            self.remove(path)
        raise OSError(errno.EBUSY, "the entry is changed by others all the time", str(path))

    def _sweep(self) -> tuple[int, int]:
        """Remove working directories of processes that were killed; returns how many, and bytes."""
        count = freed = 0
        for path in self._named(_PARTIAL):
            lock = lock_directory(path, wait=False) if _is_folder(path) else None
            try:
                if lock is None and _is_folder(path) and not _is_old(path):
                    continue
                nbytes = bytes_on_disk(path)
                _delete(path)
                count += 1
                freed += nbytes
            finally:
                if lock is not None:
                    os.close(lock)
        return count, freed


def _look(path: Path) -> Found | None:
    """An entry and its size; None if it is gone."""
    try:
        entry = read_entry(path)
    except FileNotFoundError:
        return None
    except (DamagedEntryError, OSError) as error:
        if not os.path.lexists(path):
            return None
        reason = str(error.strerror) if isinstance(error, OSError) else str(error)
        return Found(path, bytes_on_disk(path), damage=reason)
    return Found(path, bytes_on_disk(path), entry)


def _partial_name() -> str:
    return f".partial-{os.getpid()}-{secrets.token_hex(8)}"


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > _DAY_S
    except FileNotFoundError:
        return False


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _delete(path: Path) -> None:
    """Delete a folder with all it holds, or whatever else it is; links are not followed.

    Several processes may delete the same one.

    Raises:
        OSError: Something in it cannot be deleted.
    """
    while os.path.lexists(path):
        with suppress(FileNotFoundError):
            shutil.rmtree(path) if _is_folder(path) else path.unlink()
