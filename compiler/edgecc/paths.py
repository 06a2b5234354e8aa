"""Where a compile may write: never into a checkpoint, never over its own results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from edgecc.backends.bundle_manifest import MANIFEST
from edgecc.errors import UsageError


def local_path(value: str | os.PathLike[str], what: str) -> Path:
    """A path as the user gave it.

    Args:
        value: The path.
        what: What it is for, in words: `target`, `output`.

    Raises:
        UsageError: It is empty, which would mean the working directory, or no path at all.
    """
    text = os.fspath(value)
    if not text or "\0" in text or not _can_be_named(text):
        raise UsageError(
            "usage/bad-path",
            f"the {what} path is {'empty' if not text else ascii(text)}",
            help="give a path; . is the working directory" if not text else "",
        )
    return Path(text)


def _can_be_named(text: str) -> bool:
    """Whether the file system has bytes for a text: half a character in JSON has none."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def writable_path(value: str | os.PathLike[str], what: str) -> Path:
    """Like `local_path`, for something that ONNX's libraries have to write or read.

    Raises:
        UsageError: As `local_path`, or it has bytes that are no Unicode, which they cannot take.
    """
    path = local_path(value, what)
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            "usage/bad-path", f"the {what} path is not Unicode: {str(path)!a}"
        ) from error
    return path


def ir_folder(value: str | os.PathLike[str]) -> Path:
    """The folder for IR files: an existing one, or one that can be made.

    Raises:
        UsageError: It is no path, or a file.
    """
    path = local_path(value, "IR dump")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise UsageError("usage/not-a-folder", f"--dump-ir {path} is a file")
    return path


def check_outputs(
    sources: Sequence[Path], out: Path, dump_ir: Path | None, cache: Path | None = None
) -> None:
    """Check that nothing is written into a checkpoint, and nothing else into the bundle.

    Args:
        sources: Checkpoint folders; need not exist.
        out: Bundle directory.
        dump_ir: Folder for the IR, if it is wanted.
        cache: Folder of the cache, if one is used.

    Raises:
        UsageError: Naming the path and what is in its way.
    """
    for path, flag in ((out, "-o"), (dump_ir, "--dump-ir")):
        if path is not None:
            for source in sources:
                refuse_inside(path, source, flag)
            _check_parents(path, flag)
    if cache is not None:
        for source in sources:
            refuse_inside(cache, source, "--cache-dir")
    for path, flag in ((dump_ir, "--dump-ir"), (cache, "--cache-dir")):
        if path is not None and _within(path, out):
            raise UsageError(
                "usage/output-overlap",
                f"{flag} {path} lies in the bundle {out}, which holds nothing else",
                help="choose a folder beside it",
            )


def refuse_inside(path: Path, checkpoint: Path, flag: str) -> None:
    """Refuse a checkpoint's folder, and everything below it, as a place to write.

    Raises:
        UsageError: `path` lies there.
    """
    if _within(path, checkpoint):
        raise UsageError(
            "usage/output-in-checkpoint",
            f"{flag} {path} lies in the checkpoint folder {checkpoint}, where nothing is written",
            help=f"choose a path outside of it with {flag}",
        )


def _check_parents(path: Path, flag: str) -> None:
    for parent in Path(os.path.realpath(path)).parents:
        if os.path.isfile(parent):
            raise UsageError(
                "usage/not-a-folder", f"{flag} {path} cannot be made: {parent} is a file"
            )
        if os.path.isfile(parent / MANIFEST):
            raise UsageError(
                "usage/output-overlap",
                f"{flag} {path} lies in the bundle {parent}, which holds nothing else",
                help="choose a folder beside it",
            )


def _within(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies below it, links followed."""
    real, real_folder = (Path(os.path.realpath(p)) for p in (path, folder))
    return real.is_relative_to(real_folder)
