"""The folder of a cache, and folders in it that processes have left behind."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from edgecc.backends.cache.entry import bytes_on_disk
from edgecc.backends.staging import is_locked, lock_directory

_TAG = "CACHEDIR.TAG"
_TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# This directory is a cache of edgecc. See https://bford.info/cachedir/ about this file.
"""
_DAY_S = 24 * 60 * 60


def make_root(directory: Path) -> None:
    """Make the directory of a cache, for the user alone: what is in it will be executed.

    Raises:
        OSError: The system refuses.
    """
    for folder in reversed((directory, *directory.parents)):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    with suppress(FileExistsError), (directory / _TAG).open("x", encoding="ascii") as tag:
        tag.write(_TAG_TEXT)


def named(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """What lies in a directory under a name that is the cache's, sorted.

    Raises:
        OSError: It cannot be read; one that does not exist is empty.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return [directory / name for name in sorted(names) if pattern.fullmatch(name)]


def sweep(paths: Iterable[Path]) -> tuple[int, int]:
    """Remove those of some working directories whose processes were killed.

    Args:
        paths: Working directories, locked (flock) by those who use them. Where there are no locks,
            one that is a day old counts as left.

    Returns:
        How many there were, and their bytes.

    Raises:
        OSError: One cannot be removed.
    """
    count = freed = 0
    for path in paths:
        lock = lock_directory(path, wait=False) if _is_folder(path) else None
        try:
            if lock is None and _is_folder(path) and (is_locked(path) or not _is_old(path)):
                continue
            nbytes = bytes_on_disk(path)
            delete(path)
            count += 1
            freed += nbytes
        finally:
            if lock is not None:
                os.close(lock)
    return count, freed


def delete(path: Path) -> None:
    """Delete a folder with all it holds, or whatever else it is; links are not followed.

    Several processes may delete the same one.

    Raises:
        OSError: Something in it cannot be deleted.
    """
    while os.path.lexists(path):
        with suppress(FileNotFoundError):
            shutil.rmtree(path) if _is_folder(path) else path.unlink()


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > _DAY_S
    except FileNotFoundError:
        return False


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
