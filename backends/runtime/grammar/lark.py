"""Grammars in llguidance's variant of Lark, in which it reads all kinds of them."""

from __future__ import annotations

import json
import re
from typing import Any

from edgecc.backends.runtime.grammar.spec import Grammar, GrammarKind, bad_grammar

WHITE_SPACE = r" |\n[ \t]{0,32}"
"""Between the tokens of JSON: a space, or a new line with its indentation. Small models would write
white space without end."""

HEADER = '%llguidance {"no_forcing": true}\n'
"""Where only one text is possible, llguidance would allow only the tokens that the tokenizer makes
of it: not all that the target may write, and none of them if the tokenizer normalizes the text or
finds a special token in it."""


def lark_of(grammar: Grammar) -> str:
    """A grammar in llguidance's variant of Lark."""
    if grammar.kind is GrammarKind.LARK:
        return f"{grammar.text}\n{HEADER}"  # the last header counts
    if grammar.kind is GrammarKind.REGEX:
        return HEADER + f"start: {lark_regex(grammar.text)}"
    if grammar.kind is GrammarKind.CHOICE:
        choices = map(lark_string, json.loads(grammar.text))
        return HEADER + "start: CHOICE\nCHOICE: " + " | ".join(choices)
    return HEADER + "start: " + json_rule(json.loads(grammar.text))


def lark_string(text: str) -> str:
    """A text as a string of Lark, which is one of JSON without any control characters."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", quoted)


def json_rule(schema: dict[str, Any] | bool) -> str:
    """JSON that is valid by a schema, as part of a rule.

    Raises:
        RequestError: It is nested too deeply.
    """
    if schema is not False:
        options = {"whitespace_pattern": WHITE_SPACE}
        schema = {**({} if schema is True else schema), "x-guidance": options}
    try:
        return "%json " + json.dumps(schema, ensure_ascii=False)
    except RecursionError as error:
        raise bad_grammar(GrammarKind.JSON_SCHEMA, "it is nested too deeply") from error


def lark_regex(pattern: str) -> str:
    """A regular expression between the slashes of Lark, on one line."""
    inner = re.sub(r"\\\n|\\.|[/\n]", lambda found: _SLASHED.get(found[0], found[0]), pattern)
    return f"/{inner}/"


_SLASHED = {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}
