"""Flags of `edgecc run` that say what a text must be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgecc.errors import UsageError
from edgecc.paths import local_path

if TYPE_CHECKING:
    from edgecc.backends.runtime import Grammar

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS = (
    click.option(
        "--json-schema", metavar="FILE|JSON", help="The answer is JSON that is valid by a schema."
    ),
    click.option("--regex", metavar="PATTERN", help="The answer matches a regular expression."),
    click.option(
        "--choice",
        "choices",
        multiple=True,
        metavar="TEXT",
        help="The answer is one of these; given once for each.",
    ),
    click.option("--lark", metavar="FILE", help="The answer follows a grammar in Lark's notation."),
)


def grammar_flags(function: F) -> F:
    """Add the flags; see `grammar_argument`."""
    for option in reversed(_FLAGS):
        function = option(function)
    return function


def grammar_argument(flags: Mapping[str, Any]) -> Grammar | None:
    """What the flags say about the text, if they say anything.

    Raises:
        UsageError: Several of them do.
        RequestError: It is no grammar.
        ResourceError: A file cannot be read.
    """
    from edgecc.backends.runtime import Grammar

    names = ("json_schema", "regex", "choices", "lark")
    given = [name for name in names if flags[name] not in (None, ())]
    if not given:
        return None
    if len(given) > 1:
        raise UsageError(
            "usage/grammar",
            "give one of --json-schema, --regex, --choice and --lark, not " + str(len(given)),
        )
    value = flags[given[0]]
    if given[0] == "json_schema":
        return Grammar.json_schema(value if value.lstrip().startswith("{") else _read(value))
    if given[0] == "regex":
        return Grammar.regex(value)
    return Grammar.choice(value) if given[0] == "choices" else Grammar.lark(_read(value))


def _read(name: str) -> str:
    path = local_path(name, "grammar")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(
            "run/unreadable-grammar",
            f"cannot be read: {reason}",
            where=name,
            help="give the path of a readable text file, or for JSON the schema itself",
        ) from error
