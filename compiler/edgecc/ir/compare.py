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
    """Whether two modules have the same structure, weights by source, metadata and names.

    Content hashes count where both modules know one: whether one was computed does not matter.
    """
    hashes = _contradicting(a, b)
    first = print_module(a, locations=locations, hashes=hashes)
    return first == print_module(b, locations=locations, hashes=hashes)


def fingerprint(module: Module) -> str:
    """SHA-256 of the printed module without hashes: the same in every process and machine."""
    return hashlib.sha256(print_module(module, hashes=False).encode()).hexdigest()


def diff(a: Module, b: Module, *, names: tuple[str, str] = ("a", "b"), context: int = 3) -> str:
    """A unified diff of the printed modules; empty when they are equal."""
    hashes = _contradicting(a, b)
    lines = difflib.unified_diff(
        print_module(a, hashes=hashes).splitlines(),
        print_module(b, hashes=hashes).splitlines(),
        *names,
        lineterm="",
        n=context,
    )
    return "\n".join(lines)


def _contradicting(a: Module, b: Module) -> set[str]:
    """Weights of which both modules know the hash, and not the same."""
    found = set()
    for symbol in a.weights.keys() & b.weights.keys():
        ours, theirs = a.weights.known_digest(symbol), b.weights.known_digest(symbol)
        if ours and theirs and ours != theirs:
            found.add(symbol)
    return found
