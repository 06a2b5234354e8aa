"""Files and disks: what the operating system says, as errors that name a path and what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edgecc.errors import ResourceError

_CHUNK_BYTES = 4 << 20
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def read_chunks(path: Path) -> Iterator[bytes]:
    """The content of a file in pieces of a few MiB.

    Raises:
        ResourceError: The file cannot be read.
    """
    with storage_errors(path, "read"), path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an exception says that a disk, a quota or a file size limit is exhausted."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def storage_error(error: OSError, path: Path, action: str = "write") -> ResourceError:
    """The error to raise instead of an OSError.

    Args:
        error: What the operating system said.
        path: The file or directory concerned.
        action: What failed, as a verb: "write", "read".
    """
    message = f"cannot {action} {path}: {error.strerror or error}"
    if is_disk_full(error):
        notes = []
        with suppress(OSError, StopIteration):
            place = next(p for p in (path, *path.absolute().parents) if p.is_dir())
            notes = [f"{place} has {shutil.disk_usage(place).free:,} bytes free"]
        help = "free some space or raise the limit, or write to another disk with -o"
        return ResourceError("bundle/disk-full", message, where=str(path), notes=notes, help=help)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        help = f"check who may {action} there, or choose another directory"
        return ResourceError("bundle/no-permission", message, where=str(path), help=help)
    return ResourceError("bundle/io-error", message, where=str(path))


@contextmanager
def storage_errors(path: Path, action: str = "write") -> Iterator[None]:
    """Turn every OSError of the block into a ResourceError: see `storage_error`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, path, action) from error


def sync(path: Path) -> None:
    """Wait until a file, or the list of names in a directory, has reached the disk.

    Raises:
        ResourceError: The disk refuses.
    """
    if os.name == "nt":  # no such call for directories, nor for files opened for reading
        return
    with storage_errors(path):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # network file systems that cannot sync a directory
                raise
        finally:
            os.close(handle)
