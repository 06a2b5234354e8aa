"""Pygments lexer for IR text, so that documentation and terminals highlight it.

Registered as the lexer `eir` through the entry-point group `pygments.lexers`; nothing else imports
this module.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pygments.lexer import RegexLexer, words
from pygments.token import (
    Comment,
    Keyword,
    Name,
    Number,
    Operator,
    Punctuation,
    String,
    Text,
)

from edgecc.ir.ops import OPS
from edgecc.ir.types import DType
from edgecc.roles import Role


class EirLexer(RegexLexer):  # type: ignore[misc]
    """IR text (`.eir`)."""

    name = "edgecc IR"
    aliases: ClassVar[list[str]] = ["eir"]
    filenames: ClassVar[list[str]] = ["*.eir"]
    url = "https://pypi.org/project/edgecc/"

    tokens: ClassVar[dict[str, Any]] = {
        "root": [
            (r"\s+", Text),
            (r"//[^\n]*", Comment.Single),
            (r'"(?:[^"\\\n]|\\.)*"', String),
            (r'%(?:"(?:[^"\\\n]|\\.)*"|[A-Za-z0-9_.]+)', Name.Variable),
            (r'@(?:"(?:[^"\\\n]|\\.)*"|[A-Za-z0-9_.+/-]+)', Name.Label),
            (r"edgecc\.module\b", Keyword.Declaration),
            (
                words(
                    ("symbol", "metadata", "checkpoint", "decision", "weight", "graph", "return"),
                    suffix=r"\b",
                ),
                Keyword,
            ),
            (
                words(
                    ("stored", "derived", "alias", "unbound", "inline", "hash", "loc"), suffix=r"\b"
                ),
                Keyword.Pseudo,
            ),
            (words(tuple(d.value for d in DType), suffix=r"\b"), Keyword.Type),
            (words(("dense", "nvfp4", "int8_block"), suffix=r"\b"), Keyword.Type),
            (words(tuple(OPS), suffix=r"(?=\()"), Name.Function),
            (words(tuple(r.value for r in Role), suffix=r"\b"), Name.Attribute),
            (words(("true", "false", "null", "inf", "nan"), suffix=r"\b"), Keyword.Constant),
            (r"0x[0-9a-fA-F]*", Number.Hex),
            (r"\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+", Number.Float),
            (r"\d+", Number.Integer),
            (r"\.\.|[=*+-]", Operator),
            (r"[(){}\[\]<>:,]", Punctuation),
            (r"[A-Za-z_][A-Za-z0-9_.]*", Name),
            (r".", Text),
        ]
    }
