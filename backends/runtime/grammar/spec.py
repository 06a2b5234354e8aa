"""What a text must be, as a request says it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from edgecc.errors import RequestError

MAX_CHARACTERS = 1 << 18
"""Longest grammar: what is longer takes seconds to compile, and comes from a program gone wrong."""

MAX_DEPTH = 256
"""Deepest nesting of a schema; llguidance takes about half of it, Python three times as much."""


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a text must be; made by one of the class methods.

    Attributes:
        kind: How it is written.
        text: The schema as JSON, the regular expression, the list of choices as JSON, or a grammar
            in llguidance's variant of Lark.

    Raises:
        RequestError: The text is too long or is no text.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise bad_grammar(self.kind, f"expected text, not a {type(self.text).__name__}")
        if any("\ud800" <= character <= "\udfff" for character in self.text):
            raise bad_grammar(self.kind, "it has half of a surrogate pair")
        if len(self.text) > MAX_CHARACTERS:
            raise RequestError(
                "grammar/too-long",
                f"the {_NAMES[self.kind]} has {len(self.text)} characters, at most "
                f"{MAX_CHARACTERS} are read",
                help="use a smaller one",
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that is valid by a schema.

        Properties come in the order of the schema. White space is free between tokens, up to a
        limit, so that no model writes it for ever.

        Args:
            schema: A JSON schema, or its JSON.

        Raises:
            RequestError: It is no JSON schema at all.
        """
        kind = GrammarKind.JSON_SCHEMA
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise bad_grammar(kind, f"it cannot be read as JSON: {error}") from error
        if not isinstance(value, Mapping | bool):
            raise bad_grammar(kind, f"expected an object, not a {type(value).__name__}")
        if _too_deep(value):
            raise bad_grammar(kind, f"it is nested too deeply: more than {MAX_DEPTH} levels")
        return cls(kind, text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches as a whole.

        Args:
            pattern: In the syntax of Rust's `regex`: no look-around, no references to groups.

        Raises:
            RequestError: It is no text, or too long.
        """
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, choices: Any) -> Grammar:
        """One of several texts.

        Args:
            choices: A list of texts.

        Raises:
            RequestError: They are no list of texts, or one is empty.
        """
        kind = GrammarKind.CHOICE
        if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
            raise bad_grammar(kind, f"expected a list of texts, not {choices!r:.60}")
        for choice in choices:
            if not isinstance(choice, str) or not choice:
                raise bad_grammar(kind, f"{choice!r:.60} is no text")
        return cls(kind, json.dumps(list(choices), ensure_ascii=False))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text of a context-free grammar.

        Args:
            text: In llguidance's variant of Lark, with a rule `start`.

        Raises:
            RequestError: It is no text, or too long.
        """
        return cls(GrammarKind.LARK, text)


_NAMES: Mapping[GrammarKind, str] = {
    GrammarKind.JSON_SCHEMA: "JSON schema",
    GrammarKind.REGEX: "regular expression",
    GrammarKind.CHOICE: "list of choices",
    GrammarKind.LARK: "grammar",
}


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for value in level
            if isinstance(value, Mapping | list)
            for item in (value.values() if isinstance(value, Mapping) else value)
        ]
        if not level:
            return False
    return True


def bad_grammar(kind: GrammarKind, message: str) -> RequestError:
    """An error about a grammar that cannot be used."""
    return RequestError(
        f"grammar/bad-{kind.value.replace('_', '-')}",
        f"the {_NAMES[kind]} cannot be used: {message}",
        help="docs/constrained.md says what each kind may contain",
    )
