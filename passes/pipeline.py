"""Pipelines as text: `bind-shared-weights,fuse-qkv,lower-encodings{device=cpu}`, and back.

```
pipeline := pass ("," pass)*
pass     := NAME [ "{" option ("," option)* "}" ] | "repeat" "(" pipeline ")"
option   := KEY "=" VALUE
```
Options are the fields of the pass's dataclass, with dashes for underscores; values with characters
beyond letters, digits and `._+*-` are quoted. `str()` of a parsed pipeline parses to the same.
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Sequence
from typing import Any, NoReturn

from edgecc.errors import UsageError, did_you_mean
from edgecc.passes import get_pass
from edgecc.passes.base import PLAIN_VALUE, Pass
from edgecc.passes.repeat import Repeat

_TOKEN = re.compile(r'\s*(?:("(?:[^"\\]|\\.)*")|([A-Za-z0-9_.+*/-]+)|([{}(),=])|(\S))')

MAX_DEPTH = 16
"""Most `repeat` within each other."""


def parse_pipeline(text: str) -> list[Pass[Any]]:
    """Passes of a pipeline, with their options.

    Raises:
        UsageError: Syntax, an unknown pass or option, or a value of the wrong type; with a caret.
    """
    return _Parser(text).parse()


def print_pipeline(passes: Sequence[Pass[Any]]) -> str:
    """Canonical text of a pipeline."""
    return ",".join(map(str, passes))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = [
            (m.group(m.lastindex or 0), m.start(m.lastindex or 0)) for m in _TOKEN.finditer(text)
        ]
        self.tokens.append(("", len(text.rstrip())))
        self.at = 0
        self.depth = 0

    def parse(self) -> list[Pass[Any]]:
        passes = self.sequence()
        if self.tokens[self.at][0]:
            self.fail("expected ',' or the end")
        return passes

    def sequence(self) -> list[Pass[Any]]:
        passes = [self.one()]
        while self.accept(","):
            passes.append(self.one())
        return passes

    def one(self) -> Pass[Any]:
        start = self.at
        name = self.name("a pass name")
        if name == "repeat" and self.accept("("):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                self.fail(f"repeat within repeat more than {MAX_DEPTH} times", start)
            inner = self.sequence()
            self.expect(")")
            self.depth -= 1
            return Repeat(inner)
        try:
            cls = get_pass(name)
        except UsageError as error:
            self.fail(error.diagnostics[0].message, start, error.diagnostics[0].help)
        values = self.options(cls) if self.accept("{") else {}
        try:
            return cls(cls.options_type(**values))
        except (TypeError, ValueError) as error:
            self.fail(f"{name}: {error}", start)

    def options(self, cls: type[Pass[Any]]) -> dict[str, Any]:
        fields = {f.name.replace("_", "-"): f for f in dataclasses.fields(cls.options_type)}
        hints = typing.get_type_hints(cls.options_type)
        values: dict[str, Any] = {}
        while not self.accept("}"):
            if values:
                self.expect(",")
            start = self.at
            key = self.name("an option")
            if key not in fields:
                known = did_you_mean(key, fields) if fields else f"{cls.name} has no options"
                self.fail(f"{cls.name} has no option {key!r}", start, known)
            name = fields[key].name
            if name in values:
                self.fail(f"option {key} is given twice", start)
            self.expect("=")
            start = self.at
            text = self.name("a value")
            values[name] = self.value(text, hints[name], start)
        return values

    def value(self, text: str, hint: Any, at: int) -> Any:
        if hint is bool:
            if text not in ("true", "false"):
                self.fail(f"expected true or false, found {text!r}", at)
            return text == "true"
        if hint in (int, float):
            try:
                return hint(text)
            except ValueError:
                self.fail(f"expected a number, found {text!r}", at)
        return text

    def name(self, what: str) -> str:
        text = self.tokens[self.at][0]
        if text.startswith('"'):
            try:
                found = str(json.loads(text))
            except json.JSONDecodeError as error:
                self.fail(f"bad string: {error.msg.lower()}")
            self.at += 1
            return found
        if not PLAIN_VALUE.fullmatch(text):
            self.fail(f"expected {what}")
        self.at += 1
        return text

    def accept(self, text: str) -> bool:
        if self.tokens[self.at][0] == text:
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected '{text}'")

    def fail(self, message: str, at: int | None = None, help: str = "") -> NoReturn:
        """Raise with a caret below the token.

        Raises:
            UsageError: Always.
        """
        column = self.tokens[self.at if at is None else at][1]
        raise UsageError(
            "pass/pipeline",
            message,
            where="--pass-pipeline",
            notes=[self.text, " " * column + "^"],
            help=help,
        )
