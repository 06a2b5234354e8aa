"""Where a compile may write: never into a checkpoint, never over its own results."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

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
    if not text or "\0" in text:
        raise UsageError(
            "usage/bad-path",
            f"the {what} path is {'empty' if not text else repr(text)}",
            help="give a path; . is the working directory" if not text else "",
        )
    return Path(text)


def check_outputs(sources: Iterable[Path], out: Path, dump_ir: Path | None) -> None:
    """Check that nothing is written into a checkpoint, nor IR into the bundle.

    Args:
        sources: Checkpoint folders; need not exist.
        out: Bundle directory.
        dump_ir: Folder for the IR, if it is wanted.

    Raises:
        UsageError: Naming the path and what is in its way.
    """
    for path, flag in ((out, "-o"), (dump_ir, "--dump-ir")):
        if path is not None:
            for source in sources:
                refuse_inside(path, source, flag)
            _refuse_files_above(path, flag)
    if dump_ir is None:
        return
    if _within(dump_ir, out):
        raise UsageError(
            "usage/output-overlap",
            f"--dump-ir {dump_ir} lies in the bundle directory {out}, which holds nothing else",
            help="choose a folder beside it",
        )
    if dump_ir.exists() and not dump_ir.is_dir():
        raise UsageError("usage/not-a-folder", f"--dump-ir {dump_ir} is a file")


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


def _refuse_files_above(path: Path, flag: str) -> None:
    for parent in path.absolute().parents:
        if parent.is_file():
            raise UsageError(
                "usage/not-a-folder", f"{flag} {path} cannot be made: {parent} is a file"
            )


def _within(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies below it, links followed."""
    real, real_folder = (Path(os.path.realpath(p)) for p in (path, folder))
    return real.is_relative_to(real_folder)
