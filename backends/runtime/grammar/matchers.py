"""Matchers of llguidance, which this module needs.

llguidance (https://github.com/guidance-ai/llguidance) parses by Earley's algorithm, over lexemes
that it matches by derivatives of regular expressions, and walks the trie of the vocabulary for a
mask.
"""

from __future__ import annotations

import re

import llguidance

from edgecc.backends.runtime.grammar.lark import lark_of
from edgecc.backends.runtime.grammar.spec import Grammar, GrammarKind, bad_grammar
from edgecc.backends.runtime.tokenizer import Tokenizer
from edgecc.errors import UnsupportedError

END_TOKEN = "<|edgecc:end|>"
"""Stands for the end of a text, whatever tokens end it: a request may have none, or others."""


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
        text = lark_of(grammar)
        matcher = llguidance.LLMatcher(self._tokens, text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise bad_grammar(grammar.kind, _shown(matcher.get_error(), grammar.kind))
        return matcher


def _limits() -> llguidance.LLParserLimits:
    """A tenth of llguidance's own, with which `((a{100}){100}){100}` takes minutes."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=100_000,
        verbose_errors=False,  # they quote what was generated
    )


def _shown(message: str, kind: GrammarKind) -> str:
    """What llguidance says, without the grammar that it quotes, nor places in one that we wrote."""
    lines = [line.strip() for line in message.splitlines()]
    kept = [line for line in lines if line and not line.startswith("<") and " | " not in line]
    text = " ".join(kept)
    if kind is not GrammarKind.LARK:
        text = _PLACE.sub("", text).removesuffix("^").rstrip()
    return text[:400]


_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
