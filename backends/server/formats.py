"""The format of an answer, as a grammar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from edgecc.backends.runtime import Grammar
from edgecc.backends.server.protocol import GenerationBody, ResponseFormat, StructuredOutputs
from edgecc.errors import RequestError


def wanted_grammar(body: GenerationBody) -> Grammar | None:
    """What `response_format` or `structured_outputs` asks for, if they do.

    Raises:
        RequestError: Both do, or one in several ways; or it is no grammar.
    """
    found = [
        (name, grammar)
        for name, grammar in (
            ("response_format", _of_format(body.response_format)),
            ("structured_outputs", _of_outputs(body.structured_outputs)),
        )
        if grammar is not None
    ]
    if len(found) > 1:
        raise _bad("response_format", "give one of response_format and structured_outputs")
    return found[0][1] if found else None


@contextmanager
def naming_the_grammar(body: GenerationBody) -> Iterator[None]:
    """Let errors of grammars name the field that the grammar comes from.

    Args:
        body: What asks for it.
    """
    try:
        yield
    except RequestError as error:
        finding = error.diagnostics[0]
        if finding.where or not error.id.startswith("grammar/"):
            raise
        where = next((name for name in _FIELDS if getattr(body, name, None)), "")
        raise RequestError(error.id, finding.message, where=where, help=finding.help) from error


_FIELDS = ("tools", "structured_outputs", "response_format")
"""Where grammars come from; with tools, that of a format is part of theirs."""


def _of_format(given: ResponseFormat | None) -> Grammar | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Grammar.json_object()
    if given.json_schema is None:
        raise _bad("response_format", "the type json_schema needs the field json_schema")
    return Grammar.json_schema(given.json_schema.schema_)


def _of_outputs(given: StructuredOutputs | None) -> Grammar | None:
    if given is None:
        return None
    kinds = {
        "json": (given.json_, Grammar.json_schema),
        "regex": (given.regex, Grammar.regex),
        "choice": (given.choice, Grammar.choice),
        "grammar": (given.grammar, Grammar.lark),
        "json_object": (given.json_object or None, lambda _: Grammar.json_object()),
    }
    wanted = [(value, make) for value, make in kinds.values() if value is not None]
    if len(wanted) != 1:
        raise _bad(
            "structured_outputs", f"give one of {', '.join(kinds)}, not {len(wanted) or 'none'}"
        )
    ((value, make),) = wanted
    return make(value)


def _bad(where: str, message: str) -> RequestError:
    return RequestError("server/bad-format", message, where=where)
