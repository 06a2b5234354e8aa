"""One artifact on disk: a folder with its files and the key they were built for.

```
<digest of the key>/key.json        all fields of the key; bytes and SHA-256 of every file
<digest of the key>/files/<name>    the files
```

What is read here may have been written by anybody, or cut off by a full disk: links are not
followed, names cannot leave the folder, and no content is handed out whose hash does not agree. The
time at which `key.json` was changed is the time of the last use.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from edgecc.backends.cache.key import VERSION, CacheKey, shown
from edgecc.backends.storage import storage_errors, sync
from edgecc.errors import InternalError

KEY_FILE = "key.json"
FILES = "files"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_KEY_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_READ = os.O_RDONLY | sum(
    getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)


class DamagedEntryError(Exception):
    """An entry is not what was written; says how."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of an entry.

    Attributes:
        bytes: Its size.
        sha256: Digest of its content, in hex.
    """

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One artifact, of which everything but the content of its files was checked.

    Attributes:
        path: Its folder.
        key: What it was built for.
        files: Its files by name.
        used_ns: Time of the last use, nanoseconds since the epoch.
    """

    path: Path
    key: CacheKey
    files: Mapping[str, StoredFile]
    used_ns: int

    @property
    def title(self) -> str:
        """What it is: `engine target.body for sm120`."""
        return f"{shown(self.key.kind)} {shown(self.key.name)} for {shown(self.key.device)}"


def read_entry(path: Path) -> Entry:
    """Read an entry's key, and check that its files are there in the right size.

    Raises:
        FileNotFoundError: There is no such entry.
        DamagedEntryError: It is not what was written.
        OSError: It cannot be read.
    """
    if not stat.S_ISDIR(path.lstat().st_mode):
        raise DamagedEntryError("not a folder")
    with _open(path / KEY_FILE) as file:
        used_ns = os.fstat(file.fileno()).st_mtime_ns
        data = file.read(_MAX_KEY_BYTES + 1)
    key, files = _parse(data)
    if key.digest != path.name:
        raise DamagedEntryError(f"{KEY_FILE} belongs to another entry")
    if not _is_folder(path / FILES):
        raise DamagedEntryError(f"{FILES}/ is missing")
    for name, stored in files.items():
        with _open(path / FILES / name) as file:
            size = os.fstat(file.fileno()).st_size
        if size != stored.bytes:
            raise DamagedEntryError(f"{name} has {size} bytes, not {stored.bytes}")
    return Entry(path, key, files, used_ns)


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _open(path: Path) -> BinaryIO:
    """Open a regular file of an entry for reading, following no link and waiting for no pipe.

    Raises:
        DamagedEntryError: It is missing, or something else than a file.
    """
    try:
        handle = os.open(path, _READ)
    except FileNotFoundError as error:
        raise DamagedEntryError(f"{path.name} is missing") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.ENOTDIR):  # a link, a socket
            raise DamagedEntryError(f"{path.name} is not a file") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedEntryError(f"{path.name} is not a file")
    return os.fdopen(handle, "rb")


def _parse(data: bytes) -> tuple[CacheKey, dict[str, StoredFile]]:
    """The content of `key.json`.

    Raises:
        DamagedEntryError: It is not what `write_entry` wrote.
    """
    try:
        if len(data) > _MAX_KEY_BYTES:
            raise ValueError("it is too large")
        value = json.loads(data.decode("utf-8"))
        if not isinstance(value, dict) or value.get("format") != VERSION:
            raise ValueError("it was written by another version of edgecc")
        return CacheKey.from_json(value.get("key")), _stored_files(value.get("files"))
    except (ValueError, RecursionError) as error:
        raise DamagedEntryError(f"{KEY_FILE} cannot be used: {error}") from error


def _stored_files(value: object) -> dict[str, StoredFile]:
    if not isinstance(value, dict) or not value:
        raise ValueError("it lists no files")
    return {name: _stored_file(name, stored) for name, stored in value.items()}


def _stored_file(name: str, value: Any) -> StoredFile:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:80]!r} is no name of a file")
    if not isinstance(value, dict) or set(value) != {"bytes", "sha256"}:
        raise ValueError(f"{name} needs bytes and sha256")
    nbytes, sha256 = value["bytes"], value["sha256"]
    if type(nbytes) is not int or nbytes < 0:
        raise ValueError(f"{name} has no size")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"{name} has no hash")
    return StoredFile(nbytes, sha256)


def check_names(names: Mapping[str, object]) -> None:
    """Check the names an artifact's files are to have.

    Raises:
        InternalError: There is none, or one is no plain file name.
    """
    bad = [name for name in names if not _NAME.fullmatch(name)]
    if bad or not names:
        raise InternalError("cache/bad-name", f"no names for files of an entry: {bad}")


def write_entry(folder: Path, key: CacheKey, files: Mapping[str, Path]) -> None:
    """Fill an empty folder with an entry, and wait until it has reached the disk.

    Args:
        folder: An existing folder.
        key: What the files were built for.
        files: Where each file is now, by the name it gets.

    Raises:
        OSError: A file cannot be read or written.
        ResourceError: The disk refuses.
    """
    (folder / FILES).mkdir()
    stored = {}
    for name, source in sorted(files.items()):
        with source.open("rb") as reader, (folder / FILES / name).open("xb") as writer:
            sha256, nbytes = _copy(reader, writer.write)
            writer.flush()
            os.fsync(writer.fileno())
        stored[name] = {"bytes": nbytes, "sha256": sha256}
    sync(folder / FILES)
    value = {"format": VERSION, "key": key.to_json(), "files": stored}
    with (folder / KEY_FILE).open("x", encoding="utf-8") as text:
        json.dump(value, text, indent=1, sort_keys=True)
        text.flush()
        os.fsync(text.fileno())
    sync(folder)
    touch(folder)


def _copy(reader: IO[bytes], write: Callable[[bytes], object]) -> tuple[str, int]:
    """Copy a file; returns the SHA-256 and the number of bytes."""
    digest, nbytes = hashlib.sha256(), 0
    while chunk := reader.read(_CHUNK_BYTES):
        digest.update(chunk)
        nbytes += len(chunk)
        write(chunk)
    return digest.hexdigest(), nbytes


def copy_out(entry: Entry, directory: Path) -> None:
    """Copy the files of an entry, all of them or none, replacing files of the same names.

    Args:
        entry: From `read_entry`.
        directory: An existing folder outside of the cache.

    Raises:
        DamagedEntryError: The content of a file is not what was written.
        OSError: The entry cannot be read.
        ResourceError: `directory` cannot be written.
    """
    with storage_errors(directory):
        work = Path(tempfile.mkdtemp(prefix=".edgecc-cache-", dir=directory))
    try:
        for name, stored in entry.files.items():
            with _open(entry.path / FILES / name) as reader:
                if _copy_out(reader, work / name) != (stored.sha256, stored.bytes):
                    raise DamagedEntryError(f"the content of {name} changed")
        with storage_errors(directory):
            for name in entry.files:
                os.replace(work / name, directory / name)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _copy_out(reader: IO[bytes], path: Path) -> tuple[str, int]:
    """Like `_copy`, to a new file; errors of writing, and only those, become ResourceErrors."""
    with storage_errors(path):
        writer = path.open("xb", buffering=0)

    def write(chunk: bytes) -> None:
        with storage_errors(path):
            view = memoryview(chunk)
            while view:
                view = view[writer.write(view) :]

    with writer:
        return _copy(reader, write)


def touch(path: Path) -> None:
    """Note that an entry is used now, where the cache can be written."""
    note_use(path / KEY_FILE)


def note_use(file: Path) -> None:
    """Give a file the time of now, if it can be written."""
    now = time.time_ns()  # the file system's own clock ticks too slowly to tell two uses apart
    with suppress(OSError):
        os.utime(file, ns=(now, now))


def bytes_on_disk(path: Path) -> int:
    """Sizes of all files below a path, links not followed; what vanishes meanwhile is 0."""
    total = 0
    with suppress(OSError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            return path.lstat().st_size
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
