"""Structural equality, readable differences, and a stable fingerprint of modules.

Two modules are equal when they print the same text: names of values are hints, but printing makes
them unique in order of definition, so equal structure with equal hints gives equal text.
Differences are unified diffs of that text.
"""

from __future__ import annotations

import difflib
import hashlib

from edgecc.ir.core import Module
from edgecc.ir.printer import print_module


def equal(a: Module, b: Module, *, locations: bool = False) -> bool:
    """Whether two modules have the same structure, weights by source, metadata and names."""
    return print_module(a, locations=locations) == print_module(b, locations=locations)


def fingerprint(module: Module) -> str:
    """SHA-256 of the printed module: the same in every process and on every machine."""
    return hashlib.sha256(print_module(module).encode()).hexdigest()


def diff(a: Module, b: Module, *, names: tuple[str, str] = ("a", "b"), context: int = 3) -> str:
    """A unified diff of the printed modules; empty when they are equal."""
    lines = difflib.unified_diff(
        print_module(a).splitlines(),
        print_module(b).splitlines(),
        *names,
        lineterm="",
        n=context,
    )
    return "\n".join(lines)
