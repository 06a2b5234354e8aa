"""Writing bundles: all of a bundle, or nothing.

`staging` moves the finished directory into its place; this module knows what belongs into a bundle,
and what may be removed to make room for it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO

from edgecc.backends.bundle import Bundle
from edgecc.backends.bundle_manifest import (
    FORMAT,
    MANIFEST,
    VERSION,
    check_manifest,
    check_relative_path,
    load_manifest,
)
from edgecc.backends.staging import StagedDirectory
from edgecc.backends.storage import is_disk_full, read_chunks, storage_error, storage_errors
from edgecc.errors import BundleError, InternalError, UsageError


class BundleWriter:
    """Context manager that makes one bundle, or leaves everything as it was.

    ```
    with BundleWriter(Path("out")) as writer:
        backend.lower(module, writer.directory, progress)
        writer.copy_file(checkpoint / "tokenizer.json", "tokenizer/tokenizer.json")
        bundle = writer.finish(manifest)
    ```

    While the block runs, SIGTERM and SIGHUP raise SystemExit: see `StagedDirectory`.

    Args:
        out: Where the bundle goes. Missing parents are created. It must not exist, be empty, or
            be a bundle, which is replaced at the very end. Nothing else is ever removed.
        force: Also replace a bundle to which someone has added files of their own.

    Raises:
        UsageError: `out` cannot be used: a file, a mount point, the working directory, a directory
            that is no bundle, or a bundle with foreign files in it.
        ResourceError: A directory cannot be made, or the disk is full.
        InternalError: The block ended without `finish`.
    """

    def __init__(self, out: Path, *, force: bool = False) -> None:
        with storage_errors(out):
            # Through links, so that the bundle grows on the disk of its destination.
            self._out = Path(os.path.realpath(out))
        self._stage = StagedDirectory(self._out, partial(_check_destination, self._out, force))
        self._known: dict[str, tuple[str, int]] = {}
        self._finished = False

    @property
    def directory(self) -> Path:
        """Where to write the files of the bundle, until `finish`."""
        return self._stage.directory

    def __enter__(self) -> BundleWriter:
        self._stage.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stage.__exit__(kind, error, traceback)
        if isinstance(error, OSError) and is_disk_full(error):
            # From a library that writes files itself. Other errors may be about what it reads.
            raise storage_error(error, self._out) from error
        if error is None and not self._finished:
            raise InternalError("bundle/not-finished", f"nothing was written to {self._out}")

    def new_path(self, relative: str) -> Path:
        """The path at which to write a file, with its directories created.

        Args:
            relative: Path in the bundle, with `/` as separator.

        Raises:
            InternalError: A bundle may not hold such a path.
            ResourceError: A directory cannot be created.
        """
        _check_name(relative)
        path = self.directory / relative
        with storage_errors(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def add_file(self, relative: str, *, sha256: str, nbytes: int) -> None:
        """Give the digest of a written file, to save reading it again.

        Files that are never added are found and hashed by `finish`.

        Args:
            relative: Path in the bundle.
            sha256: Hex digest of the content.
            nbytes: Its size.

        Raises:
            InternalError: A bundle may not hold such a path.
        """
        _check_name(relative)
        self._known[relative] = (sha256, nbytes)

    def write_file(self, relative: str, content: bytes) -> None:
        """Write a small file.

        Raises:
            InternalError: A bundle may not hold such a path, or the file exists.
            ResourceError: The disk is full or fails.
        """
        sha256, nbytes = _write_new(self.new_path(relative), (content,))
        self.add_file(relative, sha256=sha256, nbytes=nbytes)

    def copy_file(self, source: Path, relative: str) -> None:
        """Copy a file into the bundle; a link is followed and its content copied.

        Args:
            source: The file to copy. It is only read.
            relative: Path in the bundle.

        Raises:
            InternalError: A bundle may not hold such a path, or the file exists.
            ResourceError: `source` cannot be read, or the disk is full or fails.
        """
        sha256, nbytes = _write_new(self.new_path(relative), read_chunks(source))
        self.add_file(relative, sha256=sha256, nbytes=nbytes)

    def finish(self, manifest: Mapping[str, Any]) -> Bundle:
        """Write `bundle.json`, bring everything to the disk, and put the bundle in its place.

        Args:
            manifest: All of the manifest except `format`, `version` and `files`, which are filled
                in. The same manifest and files give the same bytes.

        Returns:
            The bundle in its place.

        Raises:
            InternalError: The manifest breaks the schema, or a file is not what was added.
            UsageError: Someone put other files where the bundle goes.
            ResourceError: The disk is full or fails.
        """
        files = self._list_files()
        complete, text = _encode({**manifest, "format": FORMAT, "version": VERSION, "files": files})
        _write_new(self.directory / MANIFEST, (text,))
        self._stage.publish()
        self._finished = True
        return Bundle(self._out, complete)

    def _list_files(self) -> dict[str, dict[str, Any]]:
        """The `files` of the manifest: every file in the directory, hashed unless it is known."""
        with storage_errors(self.directory, "read"):
            found = {relative: self._describe(relative) for relative in _walk(self.directory)}
        lost = sorted(self._known.keys() - found.keys())
        if lost:
            raise InternalError("bundle/file-lost", f"added but not written: {', '.join(lost)}")
        return found

    def _describe(self, relative: str) -> dict[str, Any]:
        _check_name(relative)
        path = self.directory / relative
        if path.is_symlink() or not path.is_file():
            raise InternalError("bundle/not-a-file", f"{relative} is not a regular file")
        size = path.stat().st_size
        sha256, nbytes = self._known.get(relative) or _digest(read_chunks(path))
        if nbytes != size:
            message = f"{relative} was added with {nbytes} bytes and now has {size}"
            raise InternalError("bundle/file-changed", message)
        return {"bytes": size, "sha256": sha256}


def check_destination(out: Path, *, force: bool = False) -> None:
    """Refuse destinations that cannot be replaced, or whose content is not ours to remove.

    Args:
        out: Where a bundle shall go.
        force: Also accept a bundle to which someone has added files of their own.

    Raises:
        UsageError: `out` cannot be used.
        ResourceError: It may not be looked at or written.
    """
    with storage_errors(out):
        _check_destination(Path(os.path.realpath(out)), force)


def _check_destination(out: Path, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UsageError(
            "bundle/output-is-a-file",
            "a bundle is a directory, but the output is a file",
            where=str(out),
            help="choose another -o",
        )
    if os.path.ismount(out) or Path.cwd().is_relative_to(out):
        raise UsageError(
            "bundle/output-in-use",
            "a bundle is moved into its place, and a mount point or the working directory "
            "cannot be replaced",
            where=str(out),
            help=f"choose a directory inside it: -o {out / 'bundle'}",
        )
    if next(out.iterdir(), None) is not None:
        _check_ours(out, force)
    if not os.access(out, os.W_OK):
        raise storage_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), out)


def _check_ours(out: Path, force: bool) -> None:
    """Refuse a directory that is no bundle, and a bundle with files that edgecc did not make."""
    try:
        manifest = load_manifest(out)
    except BundleError as error:
        raise UsageError(
            "bundle/foreign-directory",
            "the output directory is not empty, and edgecc did not make it",
            where=str(out),
            notes=[error.diagnostics[0].message],
            help="choose another -o, or empty the directory yourself; --force does not remove it",
        ) from error
    listed = manifest.get("files")
    known = {MANIFEST, *(listed if isinstance(listed, dict) else ())}
    foreign = [name for name in _walk(out) if name not in known]
    if foreign and not force:
        raise UsageError(
            "bundle/foreign-files",
            f"the bundle to be replaced holds {len(foreign)} "
            f"{'file' if len(foreign) == 1 else 'files'} that edgecc did not make",
            where=str(out),
            notes=[repr(name) for name in foreign[:5]],
            help="move them away, or remove them together with the old bundle with --force",
        )


def _walk(directory: Path) -> list[str]:
    """Everything below a directory that is no directory, as sorted relative paths with `/`."""
    found = []
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        base = Path(folder).relative_to(directory)
        found += [PurePosixPath(*base.parts, name).as_posix() for name in (*names, *links)]
    return sorted(found)


def _write_new(path: Path, chunks: Iterable[bytes]) -> tuple[str, int]:
    """Write a file that must not exist; answer its digest and size."""
    if os.path.lexists(path):
        raise InternalError("bundle/file-exists", f"{path.name} is written twice", where=str(path))
    with storage_errors(path), path.open("xb") as file:
        return _digest(chunks, file)


def _digest(chunks: Iterable[bytes], file: BinaryIO | None = None) -> tuple[str, int]:
    """SHA-256 and size of some chunks, which also go into `file`."""
    digest = hashlib.sha256()
    nbytes = 0
    for chunk in chunks:
        if file is not None:
            file.write(chunk)
        digest.update(chunk)
        nbytes += len(chunk)
    return digest.hexdigest(), nbytes


def _check_name(relative: str) -> None:
    try:
        check_relative_path(relative, Path(MANIFEST))
    except BundleError as error:
        raise InternalError(error.diagnostics[0]) from error


def _encode(manifest: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The manifest as readers will see it, checked, and its bytes."""
    try:
        text = json.dumps(manifest, sort_keys=True, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InternalError("bundle/invalid-manifest", f"not JSON: {error}") from error
    complete: dict[str, Any] = json.loads(text)
    try:
        check_manifest(complete, Path(MANIFEST))
    except BundleError as error:
        raise InternalError(*error.diagnostics) from error
    return complete, text.encode("ascii")
