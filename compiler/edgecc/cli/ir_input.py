"""IR text given to a command: a file, or `-` for standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from edgecc.errors import InputError

if TYPE_CHECKING:
    from edgecc.ir.core import Module

STDIN = "-"


def read_ir(name: str) -> Module:
    """Parse the IR text a command got.

    Raises:
        InputError: It is missing, not text, or not IR.
    """
    from edgecc.ir.parser import parse_module, read_module

    if name != STDIN:
        return read_module(Path(name))
    # As bytes if it has any: IR text is UTF-8, whatever the locale says.
    stream = getattr(sys.stdin, "buffer", sys.stdin)
    try:
        data: bytes | str = stream.read()
        text = data.decode("utf-8") if isinstance(data, bytes) else data
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            "ir/unreadable", f"cannot read IR text: {error}", where="<stdin>"
        ) from error
    return parse_module(text, file="<stdin>")
