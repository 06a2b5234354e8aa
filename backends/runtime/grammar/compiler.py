"""Grammars over the tokens of one model."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING

from edgecc.backends.runtime.grammar.constraint import Constraint
from edgecc.backends.runtime.grammar.spec import Grammar, bad_grammar
from edgecc.backends.runtime.tokenizer import Tokenizer
from edgecc.errors import UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from edgecc.backends.runtime.grammar.matchers import Matchers

_MAX_KEPT = 32


class CompiledGrammar:
    """A grammar that sequences can be held to.

    Args:
        matcher: At the beginning of a text; never moved from there.
        num_tokens: Tokens of the model.
        end_id: The token that stands for the end in the matcher.
        special_ids: Tokens that are allowed only where the grammar names them.
    """

    def __init__(
        self, matcher: LLMatcher, num_tokens: int, end_id: int, special_ids: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._special_ids = special_ids
        self._num_tokens = num_tokens
        self._end_id = end_id

    def start(self, stop_ids: Collection[int]) -> Constraint:
        """Follow a new sequence.

        Args:
            stop_ids: Tokens that end it.
        """
        copy = self._matcher.deep_copy()
        return Constraint(
            copy, self._num_tokens, self._end_id, frozenset(stop_ids), self._special_ids
        )


class GrammarCompiler:
    """Compiles grammars for a tokenizer and keeps the latest; may be called from any thread.

    Args:
        tokenizer: Of the model.
        num_tokens: Tokens of the model.
    """

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = num_tokens
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._matchers: Matchers | None = None

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Make a grammar fit the tokens.

        Raises:
            RequestError: It is malformed, too complex, or no text fits it.
            UnsupportedError: llguidance is not installed, or does not read the tokenizer.
        """
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = self._compile(grammar)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
            return found

    def prepare(self) -> None:
        """Read the tokenizer now; otherwise the first grammar has to wait for it.

        Raises:
            UnsupportedError: As `compile`.
        """
        with self._lock:
            self._read_tokenizer()

    def _read_tokenizer(self) -> Matchers:
        if self._matchers is None:
            self._matchers = _matchers(self._tokenizer)
        return self._matchers

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        matchers = self._read_tokenizer()
        compiled = CompiledGrammar(
            matchers.make(grammar), self._num_tokens, matchers.end_id, self._tokenizer.special_ids
        )
        # The first step finds most of what is too complex, and grammars that fit no text.
        if compiled.start(()).finished:
            raise bad_grammar(grammar.kind, "only the empty text fits it")
        return compiled


def _matchers(tokenizer: Tokenizer) -> Matchers:
    """Import llguidance, now that there is a grammar.

    Raises:
        UnsupportedError: It is not installed, or does not read the tokenizer.
    """
    try:
        from edgecc.backends.runtime.grammar.matchers import Matchers
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "grammar/not-installed",
            "grammars need llguidance, which is not installed",
            help="pip install 'edgecc[grammar]'",
        ) from error
    return Matchers(tokenizer)
