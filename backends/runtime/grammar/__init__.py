"""Constrained decoding: texts that a grammar allows, and no others.

A `Grammar` says what a text must be, a `GrammarCompiler` makes it fit a tokenizer, and a
`Constraint` follows one sequence. Grammars are parsed by llguidance, an extra that is imported when
the first one is compiled.
"""

from __future__ import annotations

from edgecc.backends.runtime.grammar.compiler import CompiledGrammar, GrammarCompiler
from edgecc.backends.runtime.grammar.constraint import Constraint
from edgecc.backends.runtime.grammar.lark import json_rule, lark_regex, lark_string
from edgecc.backends.runtime.grammar.spec import Grammar, GrammarKind

__all__ = [
    "CompiledGrammar",
    "Constraint",
    "Grammar",
    "GrammarCompiler",
    "GrammarKind",
    "json_rule",
    "lark_regex",
    "lark_string",
]
