"""Files of text that a command is told to write: `-o FILE`, `--timing-json FILE`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from edgecc.backends.storage import storage_errors
from edgecc.cli.output import print_text
from edgecc.errors import ResourceError, UsageError
from edgecc.paths import local_path, refuse_inside

_FLAGS = {
    "-o": ("output", "usage/output"),
    "--timing-json": ("timing", "usage/timing-json"),
}
"""What the path of each flag is called, and the id of errors about it."""


def text_file(
    name: str | None, checkpoints: Iterable[str | Path | None], *, flag: str = "-o"
) -> Path | None:
    """Where a text goes, checked before the work: it must not fail when all else is done.

    Args:
        name: What the flag was given; None and `-` are standard output.
        checkpoints: Folders in which nothing is written.
        flag: The flag, `-o` or `--timing-json`.

    Returns:
        The file, None for standard output.

    Raises:
        UsageError: It is a folder, in no folder, or in a checkpoint.
        ResourceError: It may not be written.
    """
    if name is None or name == "-":
        return None
    what, id = _FLAGS[flag]
    path = local_path(name, what)
    for checkpoint in checkpoints:
        if checkpoint is not None:
            refuse_inside(path, Path(checkpoint), flag)
    if path.is_dir():
        raise UsageError(id, f"{flag} {name} is a folder", help="give a file")
    if not path.parent.is_dir():
        raise UsageError(id, f"{flag} {name} cannot be made: no folder {path.parent}")
    place = path if os.path.lexists(path) else path.parent
    if not os.access(place, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise ResourceError(id, f"{flag} {name}: {place} is write-protected")
    return path


def write_text(path: Path | None, text: str) -> None:
    """Write a text whole or not at all; to standard output if there is no path.

    Raises:
        ResourceError: The disk refuses; a file that was there is as before.
    """
    if path is None:
        print_text(text)
        return
    path = Path(os.path.realpath(path))  # a link stays one
    with storage_errors(path):
        if (path.exists() and not path.is_file()) or not os.access(path.parent, os.W_OK):
            path.write_text(text, encoding="utf-8")  # a device, or no place for a second file
            return
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            if path.exists():
                partial.chmod(path.stat().st_mode)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
