"""Schemas of tools as grammars of calls in tags."""

from __future__ import annotations

from typing import Any

import pytest

from edgecc.backends.runtime.grammar import CompiledGrammar, GrammarCompiler
from edgecc.errors import RequestError
from runtime.test_generator import TOKENIZER

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
protocol = pytest.importorskip("edgecc.backends.server.protocol")
tools = pytest.importorskip("edgecc.backends.server.tools")

GRAMMARS = GrammarCompiler(TOKENIZER, 4095)


def compiled(value: Any) -> CompiledGrammar:
    """Calls of a tool with one parameter, of the given schema."""
    parameters = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    body = protocol.ChatBody.model_validate(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
            "tool_choice": "required",
        }
    )
    wanted = tools.wanted_tools(body)
    return GRAMMARS.compile(tools.tool_grammar(body, wanted, tools.TagForm(), None))


def takes(grammar: CompiledGrammar, value: str) -> bool:
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n"
    tokens = TOKENIZER.encode(call)
    return grammar.start(()).count_allowed(tokens) == len(tokens)


@pytest.mark.parametrize("enum", [None, 5, "abc", {"a": 1}])
def test_an_enum_that_is_no_list(enum: Any) -> None:
    with pytest.raises(RequestError, match="enum must be an array"):
        compiled({"type": "string", "enum": enum})


@pytest.mark.parametrize("kind", ["enum", "const"])
def test_texts_that_are_listed(kind: str) -> None:
    grammar = compiled({"type": "string", kind: ["Rome"] if kind == "enum" else "Rome"})
    assert takes(grammar, "Rome")
    assert not takes(grammar, "Paris")


def test_any_text() -> None:
    grammar = compiled({"type": "string"})
    assert takes(grammar, "Rome")
    assert takes(grammar, 'two\n"lines"')
