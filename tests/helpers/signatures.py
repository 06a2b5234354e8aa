"""Signatures of compiled modules, read from their documentation, and checks of calls against them.

Bindings state their signatures in the first lines of their docstrings: pybind11 one for each
overload with types, Cython one with the C types. A stand-in whose calls are checked here fails on a
name, an argument or a type that the real module does not take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_LINE = re.compile(r"^(?:\d+\. )?(\w+)\((.*)\)(?: -> (.*))?$")


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    optional: bool


@dataclass(frozen=True)
class Signature:
    parameters: tuple[Parameter, ...]
    result: str

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Arguments by name, or None if they do not fit."""
        names = [p.name for p in self.parameters]
        if len(args) > len(names):
            return None
        bound = dict(zip(names, args, strict=False))
        if kwargs.keys() & bound.keys() or kwargs.keys() - set(names):
            return None
        bound |= kwargs
        missing = [p for p in self.parameters if p.name not in bound and not p.optional]
        return None if missing else bound

    def type_of(self, name: str) -> str:
        return next(p.type for p in self.parameters if p.name == name)


def signatures(function: Any) -> list[Signature]:
    """The overloads of a function of a binding; `self` is left out."""
    name = function.__name__
    found = []
    for line in (function.__doc__ or "").splitlines():
        match = _LINE.match(line.strip())
        if match and match[1] == name and match[2] != "*args, **kwargs":
            found.append(Signature(tuple(_parameters(match[2])), match[3] or ""))
    return found


def _parameters(text: str) -> Iterator[Parameter]:
    for part in _split(text):
        head, _, default = part.partition(" = ")
        if ": " in head:
            name, _, kind = head.partition(": ")
        else:
            *words, name = head.split()
            kind = " ".join(words)
        if name != "self":
            yield Parameter(name.strip(), kind.strip(), bool(default))


def _split(text: str) -> Iterator[str]:
    """Parts between commas that are in no brackets."""
    depth, part = 0, ""
    for char in text:
        depth += (char in "[(<") - (char in "])>")
        if char == "," and not depth:
            yield part.strip()
            part = ""
        else:
            part += char
    if part.strip():
        yield part.strip()


def check_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    fits: Callable[[str, Any], bool],
) -> Signature:
    """The overload that takes these arguments.

    Raises:
        AssertionError: None does.
    """
    known = signatures(function)
    assert known, f"{function.__name__} states no signature"
    for signature in known:
        bound = signature.bind(args, kwargs)
        if bound is not None and all(fits(signature.type_of(n), v) for n, v in bound.items()):
            return signature
    raise AssertionError(f"{function.__name__}{args}{dict(kwargs)} fits none of {known}")
