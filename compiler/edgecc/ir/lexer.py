"""Tokens of IR text, with the place of each for error messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Kinds of tokens; the value is how messages call one."""

    VALUE = "a value such as %x"
    SYMBOL = "a symbol such as @w"
    NAME = "a name"
    STRING = "a string"
    NUMBER = "a number"
    HEX = "bytes such as 0x00ff"
    PUNCTUATION = "punctuation"
    END = "the end of the text"
    BAD = "an unknown character"


class Token(NamedTuple):
    """One token: kind, spelling, and where it starts (line and column from 1)."""

    kind: Kind
    text: str
    line: int
    column: int


_PATTERN = re.compile(
    r"""(?P<SPACE>[ \t\r\n]+|//[^\n]*)
    |(?P<STRING>"(?:[^"\\\n]|\\.)*")
    |(?P<VALUE>%(?:"(?:[^"\\\n]|\\.)*"|[A-Za-z0-9_.]+))
    |(?P<SYMBOL>@(?:"(?:[^"\\\n]|\\.)*"|[A-Za-z0-9_.+/-]+))
    |(?P<HEX>0x[0-9a-fA-F]*)
    |(?P<NUMBER>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)
    |(?P<NAME>[A-Za-z_][A-Za-z0-9_.]*)
    |(?P<PUNCTUATION>\.\.|[(){}\[\]<>:,=*+-])
    |(?P<BAD>.)""",
    re.VERBOSE,
)


_KINDS = {kind.name: kind for kind in Kind}


def tokenize(text: str) -> Iterator[Token]:
    """All tokens of a text, an END token last. Spaces and `//` comments are dropped."""
    line, start = 1, 0
    for match in _PATTERN.finditer(text):
        spelling = match.group()
        group = match.lastgroup or "BAD"
        if group != "SPACE":
            yield Token(_KINDS[group], spelling, line, match.start() - start + 1)
        newlines = spelling.count("\n")
        if newlines:
            line += newlines
            start = match.start() + spelling.rindex("\n") + 1
    yield Token(Kind.END, "", line, len(text) - start + 1)
