"""Schemas of tools as grammars of calls in tags."""

from __future__ import annotations

import json
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
tool_forms = pytest.importorskip("edgecc.backends.server.tool_forms")

GRAMMARS = GrammarCompiler(TOKENIZER, 4095)


def grammar_of(parameters: Any, form: str = "TagForm") -> CompiledGrammar:
    """Calls of a tool with these parameters."""
    function = {"name": "f", "parameters": parameters}
    body = protocol.ChatBody.model_validate(
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
        }
    )
    wanted = tools.wanted_tools(body)
    return GRAMMARS.compile(tools.tool_grammar(body, wanted, getattr(tool_forms, form)(), None))


def compiled(value: Any) -> CompiledGrammar:
    """Calls of a tool with one parameter, of the given schema."""
    return grammar_of({"type": "object", "properties": {"a": value}, "required": ["a"]})


def allows(grammar: CompiledGrammar, text: str) -> bool:
    tokens = TOKENIZER.encode(text)
    return grammar.start(()).count_allowed(tokens) == len(tokens)


def takes(grammar: CompiledGrammar, *values: str) -> bool:
    """Whether a call may give values for `a`, `b`, ..."""
    parts = [f"<parameter={n}>\n{v}\n</parameter>\n" for n, v in zip("abc", values, strict=False)]
    return allows(grammar, f"<tool_call>\n<function=f>\n{''.join(parts)}</function>\n</tool_call>")


@pytest.mark.parametrize("enum", [None, 5, "abc", {"a": 1}])
def test_an_enum_that_is_no_list(enum: Any) -> None:
    with pytest.raises(RequestError, match=r"enum is .*, expected a list of texts"):
        compiled({"type": "string", "enum": enum})


TEXTS = (
    "",
    "a",
    "Rome",
    "Paris",
    "\n",
    " x ",
    "ab\n",
    "12-34",
    "z12-34z",
    'two\n"lines"',
    "</function>",
)
TEXTS += ("</function>", "é" * 3, "<", "</parameter", "a</b>", "x" * 40, "</", "\n\n", "Ünï")
SCHEMAS: list[dict[str, Any]] = [
    {},
    {"enum": ["Rome", "Paris"]},
    {"const": "Rome"},
    {"const": "Rome", "enum": ["Rome", "Paris"]},
    {"minLength": 3},
    {"maxLength": 3},
    {"minLength": 2.0, "maxLength": 4},
    {"minLength": 5, "enum": ["Rome", "Paris"]},
    {"pattern": "[0-9]{2}-[0-9]{2}"},
    {"pattern": "^[0-9]{2}-[0-9]{2}$"},
    {"pattern": "^(Rome|Paris)$"},
    {"pattern": "a|e"},
    {"pattern": "^R"},
    {"pattern": "e$"},
    {"pattern": "", "maxLength": 2},
    {"pattern": "o", "maxLength": 4},
    {"pattern": "a", "enum": ["Rome", "Paris"]},
    {"pattern": "/"},
    {"format": "date", "description": "a note"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=str)
def test_texts_are_held_to_their_schema(schema: dict[str, Any]) -> None:
    """To all that jsonschema says of it."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = {"type": "string", **schema}
    grammar = compiled(schema)
    valid = jsonschema.Draft202012Validator(schema).is_valid
    assert any(map(valid, TEXTS))
    for text in TEXTS:
        assert takes(grammar, text) == valid(text), text


def test_an_end_is_the_end() -> None:
    """Not the place before a last line feed, as in Python."""
    grammar = compiled({"type": "string", "pattern": "^$"})
    assert takes(grammar, "")
    assert not takes(grammar, "\n")


READABLE = (
    *("a</parameter>b", "</parameter>", "x</parameter>\n", "<parameter=b>", "</tool_call>"),
    *("</function>\n</tool_call>", "<tool_call>", "<tool_call></function></tool_call>"),
)
UNREADABLE = (
    *("</parameter></function>", "a</parameter>\n<parameter=b>"),
    "</function></tool_call>\n<tool_call>",
)


@pytest.mark.parametrize("text", [*READABLE, *UNREADABLE])
def test_texts_with_tags_in_them(text: str) -> None:
    """They are allowed exactly if what reads the call gets them back."""
    tool = protocol.Tool.model_validate(
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}},
        }
    )
    reader = tool_forms.TagForm().reader([tool])()
    told = reader.push(
        f"\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    )
    is_read = reader.name == "f" and json.loads(told or "0") == {"a": text} and reader.rest == ""
    assert is_read == (text in READABLE)
    assert takes(compiled({"type": "string"}), text) == is_read


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"minLength": 3, "maxLength": 2}, "minLength is 3 and maxLength 2"),
        ({"minLength": -1}, "minLength is -1, expected a number of characters"),
        ({"maxLength": "5"}, "maxLength is '5'"),
        ({"maxLength": True}, "maxLength is True"),
        ({"maxLength": None}, "maxLength is None"),
        ({"minLength": 0.5}, "minLength is 0.5"),
        ({"enum": []}, r"enum is \[\], expected a list"),
        ({"enum": ["a", "b"], "minLength": 2}, "no text that is listed"),
        ({"const": 5}, "const is no text"),
        ({"enum": ["a", "x</parameter>\n</function>"]}, "would end the call where it stands"),
        ({"pattern": 5}, "pattern is 5"),
        ({"pattern": "a)|(b"}, "regex"),
        ({"pattern": "a(?=b)"}, "regex"),
        ({"anyOf": [{"maxLength": 5}]}, "cannot be held to anyOf"),
        ({"not": {"const": "x"}}, "cannot be held to not"),
        ({"$ref": "#/$defs/A"}, r"cannot be held to \$ref"),
    ],
)
def test_texts_that_cannot_be_held_to_their_schema(value: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        compiled({"type": "string", **value})


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"type": "array"}, "expected 'object', found 'array'"),
        ({"type": None}, "found None"),
        ({"type": ["object", "null"]}, "expected 'object'"),
        ({"properties": []}, "expected an object of schemas"),
        ({"properties": {"a": None}}, "expected a schema, an object or a boolean, found None"),
        ({"properties": {"a": 5}}, "found 5"),
        ({"properties": {"a": []}}, r"found \[\]"),
        ({"required": "a"}, "expected a list of names"),
        ({"required": [5]}, "expected a list of names"),
    ],
)
@pytest.mark.parametrize("form", ["TagForm", "JsonForm"])
def test_what_is_no_schema_of_an_object(parameters: Any, words: str, form: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        grammar_of(parameters, form)
    assert caught.value.diagnostics[0].where.startswith("tools[0].function.parameters")


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"required": ["a"]}, "'a' is required, and nothing fits it"),
        ({"properties": {"a": False}, "required": ["a"]}, "'a' is required, and nothing fits it"),
        ({"anyOf": [{"required": ["a"]}]}, "cannot be held to anyOf"),
        ({"minProperties": 1}, "cannot be held to minProperties"),
        ({"dependentRequired": {"a": ["b"]}}, "cannot be held to dependentRequired"),
    ],
)
def test_parameters_that_calls_in_tags_cannot_be_held_to(parameters: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        grammar_of(parameters)


def test_parameters_that_nothing_fits_are_left_out() -> None:
    grammar = grammar_of({"properties": {"a": {"type": "string"}, "b": False, "c": True}})
    assert takes(grammar, "x")
    assert not takes(grammar, "x", "5")
    assert takes(grammar)
    rest = '<parameter=c>\n{"b": [1]}\n</parameter>\n</function>\n</tool_call>'
    assert allows(grammar, f"<tool_call>\n<function=f>\n{rest}")


def test_values_that_are_no_text() -> None:
    grammar = grammar_of(
        {
            "properties": {"a": {"$ref": "#/$defs/A"}, "b": {"type": ["string", "null"]}},
            "required": ["a"],
            "$defs": {"A": {"type": "integer", "minimum": 5}},
        }
    )
    assert takes(grammar, "5", '"x"')
    assert takes(grammar, "7", "null")
    assert not takes(grammar, "4")
    assert not takes(grammar, "5", "x")
    assert not allows(grammar, "<tool_call>\n<function=f>\n</function>")


def test_arguments_in_json_are_an_object_whatever_the_schema_leaves_out() -> None:
    grammar = grammar_of({"properties": {"a": {"type": "string"}}}, "JsonForm")
    assert allows(grammar, '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>')
    assert not allows(grammar, '<tool_call>\n{"name": "f", "arguments": 5}\n</tool_call>')


@pytest.mark.parametrize("name", ["", "a>b", "a\nb"])
def test_names_that_no_tag_can_have(name: str) -> None:
    """Nobody could read the call again."""
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    with pytest.raises(RequestError, match="no name for a tag"):
        grammar_of(parameters)
    grammar_of(parameters, "JsonForm")  # JSON can have it
