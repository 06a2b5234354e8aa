"""Schemas of what stands in tags, which is text as it is, not JSON, as rules of a grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from edgecc.backends.runtime.grammar import json_rule, lark_regex, lark_string
from edgecc.backends.server.errors import bad_tools
from edgecc.backends.server.tool_calls import takes_text
from edgecc.errors import RequestError

Schema: TypeAlias = Mapping[str, Any] | bool

END = "\n</parameter>\n"
"""What follows a value."""

_ANY = r"/(.|\n)*/"
_ENDS = (
    r"<\/parameter>\s*(<parameter=|<\/function>)"
    r"|<\/function>\s*<\/tool_call>(.|\n)*<tool_call>"
)
_READABLE = rf"{_ANY} & ~/(.|\n)*({_ENDS})(.|\n)*/"
"""Any text but one that would end its tag, or the call; see `TagReader`."""

_COMBINED = ("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if")
"""Keywords that say more of a text than it is held to here."""

_OBJECT = (
    *(*_COMBINED, "dependentRequired", "dependentSchemas", "dependencies", "propertyNames"),
    *("patternProperties", "minProperties", "maxProperties"),
)
"""Keywords that say more of the parameters than what each may be, and which are required."""


def object_schema(schema: Mapping[str, Any], what: str) -> dict[str, Schema]:
    """The schemas of the parameters that may be given, in the order of the schema.

    Args:
        schema: Of all of them, an object.
        what: For errors.

    Raises:
        RequestError: It says what calls in tags cannot be held to, or nothing fits it.
    """
    _refuse(schema, _OBJECT, what)
    properties: Mapping[str, Schema] = schema.get("properties", {})
    for name in schema.get("required", []):
        if properties.get(name, False) is False:
            raise _bad(f"{what}: {name!r} is required, and nothing fits it")
    return {name: value for name, value in properties.items() if value is not False}


def value_rule(
    schema: Schema, definitions: Mapping[str, Any], name: str, what: str
) -> tuple[str, list[str]]:
    """A value and the tag behind it.

    Args:
        schema: Of the value.
        definitions: Of the schemas that it refers to.
        name: For a rule of its own.
        what: The parameter, for errors.

    Returns:
        The part of a rule that stands for it, and the rules that it needs.

    Raises:
        RequestError: It says what a text cannot be held to, or nothing fits it.
    """
    if isinstance(schema, bool) or not takes_text(schema):
        whole = schema if isinstance(schema, bool) else {**schema, **definitions}
        return f"{json_rule(whole)} {lark_string(END)}", []
    held = " & ".join([_READABLE, *_text_terms(schema, what)])
    # Lazy: the first place where the tag can end is where it does.
    return name, [f"{name}[lazy]: ({held}) {lark_string(END)}"]


def _text_terms(schema: Mapping[str, Any], what: str) -> Iterator[str]:
    """What a text must match, each as a term of Lark.

    `format` is a note, as JSON Schema has it unless a validator is told otherwise.
    """
    _refuse(schema, _COMBINED, what)
    least, most = _length(schema, "minLength", what), _length(schema, "maxLength", what)
    if least is not None or most is not None:
        if most is not None and (least or 0) > most:
            raise _bad(f"{what}: minLength is {least} and maxLength {most}: no text fits them")
        yield f"/(.|\\n){{{least or 0},{'' if most is None else most}}}/"
    for choices in _choices(schema, what):
        fits = [c for c in choices if (least or 0) <= len(c) and (most is None or len(c) <= most)]
        if not fits:
            raise _bad(f"{what}: no text that is listed has a length that is allowed")
        if unreadable := [c for c in fits if re.search(_ENDS, c)]:
            raise _bad(f"{what}: {unreadable[0]!r:.60} would end the call where it stands")
        yield f"({' | '.join(map(lark_string, fits))})"
    if "pattern" in schema:
        yield _searched(schema["pattern"], what)


def _choices(schema: Mapping[str, Any], what: str) -> Iterator[Sequence[str]]:
    if "const" in schema:
        if not isinstance(schema["const"], str):
            raise _bad(f"{what}: const is no text, and the type is")
        yield [schema["const"]]
    if "enum" in schema:
        if not isinstance(schema["enum"], list) or not schema["enum"]:
            raise _bad(f"{what}: enum is {schema['enum']!r:.40}, expected a list of texts")
        yield schema["enum"]


def _length(schema: Mapping[str, Any], keyword: str, what: str) -> int | None:
    if keyword not in schema:
        return None
    value = schema[keyword]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and value >= 0 and value % 1 == 0:
        return int(value)
    raise _bad(f"{what}: {keyword} is {value!r:.40}, expected a number of characters")


def _searched(pattern: object, what: str) -> str:
    """A pattern, which need not match a whole text, as one that does.

    Anchors may stand at its ends, as in llguidance's own reading of JSON schemas.
    """
    if not isinstance(pattern, str):
        raise _bad(f"{what}: pattern is {pattern!r:.40}, expected text")
    body = pattern.removeprefix("^")
    before = [] if body != pattern else [_ANY]
    last = body.removesuffix("$")
    anchored = last != body and not (len(last) - len(last.rstrip("\\"))) % 2  # no escaped dollar
    inner, after = (last, []) if anchored else (body, [_ANY])
    # Terms of their own: a parenthesis of the pattern closes none of ours.
    return f"({' '.join([*before, lark_regex(inner or '()'), *after])})"


def _refuse(schema: Mapping[str, Any], keywords: Sequence[str], what: str) -> None:
    found = [keyword for keyword in keywords if keyword in schema]
    if found:
        raise _bad(f"{what}: calls in tags cannot be held to {found[0]}")


def _bad(message: str) -> RequestError:
    help = 'leave it out of the schema, or let calls be free: tool_choice "auto" without strict'
    return bad_tools("tools", message, help)
