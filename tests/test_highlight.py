from __future__ import annotations

from pathlib import Path

from pygments.token import Comment, Error, Keyword, Name, Text

import edgecc
from edgecc.highlight import EirLexer
from edgecc.ir import print_module

PAIRS = Path(__file__).parent / "data" / "pairs"


def test_every_token_of_a_real_module_is_known():
    module = edgecc.lift(PAIRS / "tiny-qwen3-nvfp4", PAIRS / "tiny-qwen3-dspark")
    text = "// a comment\n" + print_module(module, locations=True)
    tokens = list(EirLexer().get_tokens(text))
    assert "".join(t for _, t in tokens) == text
    kinds = {kind for kind, _ in tokens}
    assert Error not in kinds
    assert {
        Comment.Single,
        Keyword,
        Keyword.Type,
        Name.Function,
        Name.Variable,
        Name.Label,
    } <= kinds
    assert {t for kind, t in tokens if kind is Text and t.strip()} == set()
    functions = {t for kind, t in tokens if kind is Name.Function}
    assert {"linear", "attention", "markov_chain"} <= functions
