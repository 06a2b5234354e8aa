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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from edgecc.backends.cache.entry import (
    DamagedEntryError,
    bytes_on_disk,
    read_entry,
    touch,
    write_entry,
)
from edgecc.backends.cache.folders import delete, make_root, named, sweep
from edgecc.backends.cache.key import CacheKey
from edgecc.backends.cache.pruning import Found, Pruned, prune
from edgecc.backends.staging import lock_directory
from edgecc.backends.storage import sync

_ENTRY = re.compile(r"[0-9a-f]{64}")
_PARTIAL = re.compile(r"\.partial-\d+-[0-9a-f]{16}")
_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_ATTEMPTS = 8


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
        found = [f for path in named(self.directory, _ENTRY) if (f := _look(path)) is not None]
        return sorted(found, key=lambda f: (f.used_ns, f.path.name))

    def add(self, key: CacheKey, files: Mapping[str, Path]) -> None:
        """Copy files into a new entry. A whole entry of the same key stays as it is.

        Raises:
            OSError: A file or the cache cannot be read or written.
            ResourceError: The disk refuses.
        """
        make_root(self.directory)
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
        delete(trash)
        return True

    def prune(
        self, *, max_bytes: int, older_than_s: float | None = None, everything: bool = False
    ) -> Pruned:
        """Keep this directory small: see `pruning.prune`."""
        return prune([self], max_bytes=max_bytes, older_than_s=older_than_s, everything=everything)

    def sweep(self) -> tuple[int, int]:
        """Remove working directories of processes that were killed; returns how many, and bytes."""
        return sweep(named(self.directory, _PARTIAL))

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
