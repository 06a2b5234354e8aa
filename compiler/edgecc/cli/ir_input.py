"""IR text given to a command: a file, or `-` for standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edgecc.errors import UsageError

if TYPE_CHECKING:
    from edgecc.ir.core import Module

STDIN = "-"


def read_ir(name: str) -> Module:
    """Parse the IR text a command got.

    Raises:
        InputError: It is missing, not text, or not IR.
    """
    from edgecc.ir.parser import parse_module, read_module, unreadable

    if name != STDIN:
        return read_module(Path(name))
    if sys.stdin is None:
        raise unreadable("standard input is closed", "<stdin>")
    # As bytes if it has any: IR text is UTF-8, whatever the locale says.
    stream = getattr(sys.stdin, "buffer", sys.stdin)
    try:
        data: bytes | str = stream.read()
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except (OSError, ValueError) as error:
        raise unreadable(error, "<stdin>") from error
    return parse_module(text, file="<stdin>")


def folders_of(module: Module) -> list[Path]:
    """Folders of the checkpoints that a module has open: nothing is written there."""
    from edgecc.checkpoints import checkpoints_of

    return [checkpoint.path for checkpoint in checkpoints_of(module).values()]


def read_with_checkpoints(name: str, checkpoints: Sequence[str]) -> Module:
    """Parse the IR text a command got, check it, and open the checkpoints it names.

    Args:
        name: File, or `-`.
        checkpoints: `ROLE=DIR` for checkpoints that lie elsewhere now.

    Raises:
        UsageError: No `ROLE=DIR`.
        InputError: The text or a checkpoint is bad.
        VerifyError: The module breaks a rule of the IR.
    """
    from edgecc.ir.verifier import verify_or_raise
    from edgecc.ir_source import attach_checkpoints

    folders = {}
    for text in checkpoints:
        role, equals, folder = text.partition("=")
        if not equals or not folder:
            raise UsageError("usage/checkpoint", f"--checkpoint {text!r}: expected ROLE=DIR")
        folders[role] = folder
    module = read_ir(name)
    attach_checkpoints(module, near=None if name == STDIN else Path(name).parent, folders=folders)
    verify_or_raise(module, f"in {name}")
    return module
