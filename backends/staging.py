"""Replacing a directory: all of it, or nothing.

A new directory grows in a working directory beside its destination and moves there by renaming:

```
PARENT/.NAME.partial-<pid>-<random>/new/        the new directory, until it is complete
PARENT/.NAME.partial-<pid>-<random>/previous/   the old one, while the two change places
PARENT/NAME/                                    the destination
```

Two locks (flock: the system releases them when a process dies) keep processes apart. The one on
the working directory is held as long as it is in use. Whoever finds it free knows that its process
was killed, and removes the directory after putting back an old one that has no successor yet. The
one on the parent is held for a moment at the start and while directories change places. Of two
processes with the same destination, the last to publish wins. On a file system without locks,
nothing is cleaned up after a kill, and of two that publish in the same instant one may fail.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType

from edgecc.backends.storage import storage_errors, sync
from edgecc.signals import termination_raises

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class StagedDirectory:
    """Context manager that replaces a directory at the end, or leaves everything as it was.

    While the block runs in the main thread, SIGTERM and SIGHUP raise SystemExit (143, 129) unless
    the program handles them already, so that a terminated program cleans up like an interrupted
    one. Parents that had to be created are removed again when nothing was published.

    Args:
        destination: The directory to make or replace, without links in its path.
        check: Raises if what lies at the destination must not be removed. Called at the start, and
            again before anything is moved away.

    Raises:
        ResourceError: A directory cannot be made or moved.
    """

    def __init__(self, destination: Path, check: Callable[[], None]) -> None:
        self.destination = destination
        self._check = check
        self._work = destination
        self._stack = ExitStack()

    @property
    def directory(self) -> Path:
        """Where the new directory grows, until it is published."""
        return self._work / "new"

    def __enter__(self) -> StagedDirectory:
        parent = self.destination.parent
        with ExitStack() as stack, storage_errors(self.destination):
            stack.enter_context(termination_raises())
            _make_parent(parent, stack)
            with _alone_in(parent):
                self._check()
                _remove_dead(self.destination)
                self._work = _make_work(self.destination, stack)
            stack.callback(_dissolve, self._work, self.destination)
            self.directory.mkdir()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def publish(self) -> None:
        """Bring everything in the new directory to the disk, then rename it to its destination.

        Raises:
            ResourceError: The disk or the file system refuses.
        """
        for folder, _, names in os.walk(self.directory, topdown=False):
            for name in names:
                sync(Path(folder, name))
            sync(Path(folder))
        parent = self.destination.parent
        with storage_errors(self.destination), _alone_in(parent):
            self._check()
            if os.path.lexists(self.destination):
                os.rename(self.destination, self._work / "previous")
            os.rename(self.directory, self.destination)
        sync(parent)


def _make_parent(parent: Path, stack: ExitStack) -> None:
    """Create missing parents; those still empty when the stack closes are removed again."""
    for folder in reversed((parent, *parent.parents)):
        if not folder.exists():
            folder.mkdir(exist_ok=True)
            stack.callback(_remove_if_empty, folder)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _make_work(destination: Path, stack: ExitStack) -> Path:
    """Make a working directory, locked until the stack closes."""
    name = f".{destination.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
    work = destination.parent / name
    work.mkdir()
    lock = lock_directory(work, wait=True)
    if lock is not None:
        stack.callback(os.close, lock)
    return work


def _remove_dead(destination: Path) -> None:
    """Clean up after processes with the same destination that were killed."""
    pattern = re.compile(rf"\.{re.escape(destination.name)}\.partial-\d+-[0-9a-f]{{8}}")
    with storage_errors(destination.parent, "read"):
        found = [work for work in destination.parent.iterdir() if pattern.fullmatch(work.name)]
    for work in sorted(found):
        if work.is_symlink() or not work.is_dir():
            continue
        lock = lock_directory(work, wait=False)
        if lock is None:
            continue
        # What another user left behind may have to stay; that is no reason to fail.
        with suppress(OSError):
            _restore(work, destination)
            shutil.rmtree(work)
        os.close(lock)


def _dissolve(work: Path, destination: Path) -> None:
    """Remove the own working directory."""
    with storage_errors(destination), _alone_in(destination.parent):
        _restore(work, destination)
    shutil.rmtree(work, ignore_errors=True)


def _restore(work: Path, destination: Path) -> None:
    """Put an old directory back if it was moved away and nothing took its place."""
    previous = work / "previous"
    if previous.exists() and not os.path.lexists(destination):
        os.rename(previous, destination)


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """Keep other processes from moving directories in `parent`, where it can be locked."""
    lock = lock_directory(parent, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def lock_directory(directory: Path, *, wait: bool, shared: bool = False) -> int | None:
    """Lock a directory against other processes that ask for the same lock.

    Args:
        directory: The directory.
        wait: Until the lock is free, instead of giving up.
        shared: Several may have the lock at a time, if all of them share it.

    Returns:
        The open file that holds the lock. None if the directory cannot be locked, or, without
        `wait`, because another process holds it.
    """
    if fcntl is None:
        return None
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(handle, kind if wait else kind | fcntl.LOCK_NB)
        except BaseException:
            os.close(handle)
            raise
        return handle
    return None


def is_locked(directory: Path) -> bool:
    """Whether a process holds a lock on a directory; False where that cannot be told."""
    if fcntl is None:
        return False
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(handle)
    return False
