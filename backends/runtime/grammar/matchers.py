"""Matchers of llguidance, which this module needs.

llguidance (https://github.com/guidance-ai/llguidance) parses by Earley's algorithm, over lexemes
that it matches by derivatives of regular expressions, and walks the trie of the vocabulary for a
mask.
"""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance

from edgecc.backends.runtime.grammar.spec import Grammar, GrammarKind, bad_grammar
from edgecc.backends.runtime.tokenizer import Tokenizer
from edgecc.errors import UnsupportedError

WHITE_SPACE = r" |\n[ \t]{0,32}"
"""Between the tokens of JSON: a space, or a new line with its indentation. Small models would write
white space without end."""

END_TOKEN = "<|edgecc:end|>"
"""Stands for the end of a text, whatever tokens end it: a request may have none, or others."""


HEADER = '%llguidance {"no_forcing": true}\n'
"""Where only one text is possible, llguidance would allow only the tokens that the tokenizer makes
of it: not all that the target may write, and none of them if the tokenizer normalizes the text or
finds a special token in it."""


class Matchers:
    """Makes matchers over the tokens of a tokenizer.

    What a grammar may cost is limited: its size, the size of its automata, and the work of a step.

    Args:
        tokenizer: Read once.

    Raises:
        UnsupportedError: llguidance does not read it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        text, self.end_id = tokenizer.with_special_token(END_TOKEN)
        try:
            self._tokens = llguidance.LLTokenizer(text, eos_token=self.end_id)
        except ValueError as error:
            raise UnsupportedError(
                "grammar/tokenizer",
                f"llguidance {llguidance.__version__} does not read the bundle's tokenizer: "
                f"{error}",
                help="leave the grammar out; byte-level and byte-fallback vocabularies are read",
            ) from error

    def make(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at the beginning of a text.

        Raises:
            RequestError: The grammar is malformed or too complex.
        """
        text = _source(grammar)
        matcher = llguidance.LLMatcher(self._tokens, text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise bad_grammar(grammar.kind, _shown(matcher.get_error()))
        return matcher


def _source(grammar: Grammar) -> str:
    """A grammar in llguidance's variant of Lark."""
    if grammar.kind is GrammarKind.LARK:
        own = "%llguidance" in grammar.text
        return grammar.text if own else HEADER + grammar.text
    if grammar.kind is GrammarKind.REGEX:
        made = json.loads(llguidance.LLMatcher.grammar_from_regex(grammar.text))
        return HEADER + str(made["grammars"][0]["lark_grammar"])  # it has escaped the slashes
    if grammar.kind is GrammarKind.CHOICE:
        choices = map(_quoted, json.loads(grammar.text))
        return HEADER + "start: CHOICE\nCHOICE: " + " | ".join(choices)
    return HEADER + "start: " + json_rule(json.loads(grammar.text))


def _quoted(text: str) -> str:
    """A text as a string of Lark, which is one of JSON without any control characters."""
    quoted = json.dumps(text, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", quoted)


def json_rule(schema: dict[str, Any] | bool) -> str:
    """JSON that is valid by a schema, as part of a rule."""
    if schema is not False:
        options = {"whitespace_pattern": WHITE_SPACE}
        schema = {**({} if schema is True else schema), "x-guidance": options}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _limits() -> llguidance.LLParserLimits:
    """A tenth of llguidance's own, with which `((a{100}){100}){100}` takes minutes."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # they quote what was generated
    )


def _shown(message: str) -> str:
    """What llguidance says, without the grammar that it quotes."""
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line and not line.startswith("<") and " | " not in line]
    return " ".join(kept)[:400]
