"""Bundles that were compiled on demand, beside the artifacts of the cache.

```
ROOT/bundles/<target>-<16 hex digits>/   a bundle
ROOT/bundles/.<16 hex digits>.partial/   of a process that compiles or removes a bundle
```

A bundle grows in a working directory, which its process locks (flock), and appears by renaming; one
that is there is whole. Of several processes that want the same one, the first has the lock and the
others wait for it. The system releases the lock of a process that is killed: who finds a working
directory without one removes it. Whoever reads a bundle shares a lock on it, so that it is not
removed meanwhile. Where there are no locks, each process compiles for itself, and the first to
publish wins.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgecc.backends.bundle_manifest import MANIFEST, load_manifest
from edgecc.backends.cache.entry import bytes_on_disk, note_use
from edgecc.backends.cache.folders import delete, make_root, named, sweep
from edgecc.backends.cache.key import shown
from edgecc.backends.cache.pruning import Found
from edgecc.backends.staging import is_locked, lock_directory
from edgecc.backends.storage import storage_errors, sync
from edgecc.errors import BundleError, ResourceError

_BUNDLE = re.compile(r"[^.].*-[0-9a-f]{16}", re.DOTALL)
_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")
_IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY)


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle of the cache.

    Attributes:
        path: Its folder.
        devices: What it was compiled for.
        used_ns: Time of the last use, nanoseconds since the epoch.
    """

    path: Path
    devices: tuple[str, ...]
    used_ns: int

    @property
    def title(self) -> str:
        """What it is: `bundle tiny-qwen3 for cpu`."""
        target = shown(self.path.name.rpartition("-")[0])
        return f"bundle {target} for {', '.join(shown(device) for device in self.devices)}"


class BundleStore:
    """The bundles of a cache. Other processes may change them at any time.

    Args:
        root: Directory of the cache; need not exist.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.directory = root / "bundles"

    def path(self, target: str, digest: str) -> Path:
        """Where a bundle is, if there is one.

        Args:
            target: Name of the target, for people.
            digest: 16 hex digits that tell it from all others.
        """
        return self.directory / f"{target}-{digest}"

    @contextmanager
    def held(self, path: Path) -> Iterator[bool]:
        """Keep a bundle from being removed, if it is there; whether it is."""
        lock = lock_directory(path, wait=True, shared=True)
        try:
            # Between opening and locking it may have been removed, or replaced.
            here = path.is_dir() if lock is None else _is_at(lock, path)
            if here:
                note_use(path / MANIFEST)
            yield here
        finally:
            if lock is not None:
                os.close(lock)

    @contextmanager
    def workspace(self, digest: str, on_wait: Callable[[], None]) -> Iterator[Path]:
        """An empty directory to compile in, for one process at a time; removed at the end.

        Args:
            digest: Of the bundle.
            on_wait: Called if another process has it, before waiting for that one.

        Raises:
            ResourceError: It cannot be made, or what was left there cannot be removed.
        """
        work = self.directory / f".{digest}.partial"
        own = work / f"{os.getpid()}-{secrets.token_hex(4)}"
        lock = None
        try:
            with storage_errors(self.directory):
                make_root(self._root)
                self.directory.mkdir(mode=0o700, exist_ok=True)
                lock = _lock_new(work, on_wait)
                if lock is not None:
                    for left in work.iterdir():
                        delete(left)
                self.sweep()
                own.mkdir(parents=True)
            yield own
        finally:
            with suppress(OSError):
                delete(own)
                work.rmdir()
            if lock is not None:
                os.close(lock)

    def publish(self, made: Path, path: Path) -> None:
        """Move a bundle from a workspace to its place, and what is there out of it.

        Raises:
            ResourceError: The system refuses.
        """
        with storage_errors(path):
            if os.path.lexists(path):
                os.rename(path, made.parent / "previous")
            try:
                os.rename(made, path)
            except OSError as error:
                # Without locks, another process may have been faster: its bundle is as good.
                if error.errno not in _IN_THE_WAY:
                    raise
        sync(self.directory)

    def scan(self) -> list[Found]:
        """All bundles, whole or damaged, the one used last at the end.

        Raises:
            OSError: The directory cannot be read.
        """
        found = [_look(path) for path in named(self.directory, _BUNDLE)]
        return sorted((f for f in found if f), key=lambda f: (f.used_ns, f.path.name))

    def sweep(self) -> tuple[int, int]:
        """Remove working directories of processes that were killed; returns how many, and bytes.

        Raises:
            OSError: One cannot be removed.
        """
        return sweep(named(self.directory, _PARTIAL))

    def remove(self, path: Path) -> bool:
        """Remove a bundle that nobody holds.

        Returns:
            Whether it was there, and free.

        Raises:
            OSError: It cannot be removed.
        """
        lock = lock_directory(path, wait=False)
        try:
            if lock is None and is_locked(path):
                return False
            trash = self.directory / f".{secrets.token_hex(8)}.partial"
            os.rename(path, trash)
        except FileNotFoundError:
            return False
        finally:
            if lock is not None:
                os.close(lock)
        delete(trash)
        return True


def _lock_new(work: Path, on_wait: Callable[[], None]) -> int | None:
    """Make and lock a working directory; None where there are no locks."""
    told = False
    while True:
        work.mkdir(mode=0o700, exist_ok=True)
        if not told and is_locked(work):
            told = True
            on_wait()
        lock = lock_directory(work, wait=True)
        # Whoever had it before us has removed it: then what we have is no longer there.
        if lock is None and work.is_dir():
            return None
        if lock is not None:
            if _is_at(lock, work):
                return lock
            os.close(lock)


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open directory is what lies at a path now."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _look(path: Path) -> Found | None:
    """A bundle and its size; None if it is gone."""
    in_use = is_locked(path)
    nbytes = bytes_on_disk(path)
    try:
        manifest = load_manifest(path)
        used_ns = (path / MANIFEST).stat().st_mtime_ns
    except (BundleError, ResourceError, OSError) as error:
        if not os.path.lexists(path):
            return None
        reason = error.strerror if isinstance(error, OSError) else error.diagnostics[0].message
        return Found(path, nbytes, damage=str(reason), in_use=in_use)
    devices = manifest.get("artifacts")
    names = tuple(map(str, devices)) if isinstance(devices, dict) else ()
    return Found(path, nbytes, StoredBundle(path, names, used_ns), in_use=in_use)
