"""Calls of tools in the text of an answer, in whatever pieces it comes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
tool_calls = pytest.importorskip("edgecc.backends.server.tool_calls")
call_readers = pytest.importorskip("edgecc.backends.server.call_readers")

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "kind": {"enum": ["a", "b"]},
            "any": {},
        },
    }
}
WRITERS = {
    "json": call_readers.JsonReader,
    "tags": lambda: tool_calls.TagReader(SCHEMAS),
}


def read(form: str, text: str, cuts: list[int] | None = None) -> tuple[str, list[tuple[str, str]]]:
    """Content, and names and arguments of the calls."""
    places = sorted({min(cut, len(text)) for cut in cuts or []} | {0, len(text)})
    parser = tool_calls.ToolCallParser(WRITERS[form])
    told = [parser.push(text[a:b]) for a, b in itertools.pairwise(places)]
    told.append(parser.finish())
    calls: dict[int, list[str]] = {}
    for part in (call for parts in told for call in parts.calls):
        if part.name is not None:
            assert part.id.startswith("call_")
            assert part.index == len(calls)
            calls[part.index] = [part.name, ""]
        calls[part.index][1] += part.arguments
    assert parser.calls == len(calls)
    return "".join(parts.content for parts in told), [(a, b) for a, b in calls.values()]


def framed(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


ONE = framed('{"name": "f", "arguments": {"text": "a } \\" {", "count": 1}}')
TAGS = framed(
    "<function=f>\n<parameter=text>\nline 1\nline 2\n</parameter>\n"
    "<parameter=count>\n3\n</parameter>\n</function>"
)


def tags(value: str, name: str = "text") -> str:
    """A call with one argument."""
    return framed(f"<function=f>\n<parameter={name}>\n{value}\n</parameter>\n</function>")


BAD_NAME = framed('{"name": "f\\x", "arguments": {}}')
NO_NUMBER = framed('{"arguments": {"count": NaN}, "name": "f"}')
UNFINISHED = framed("<function=f>\n<parameter=text>\na</function>")
SAID = {"text": "line 1\nline 2", "count": 3}

CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("json", "Hello <b> world", "Hello <b> world", []),
    ("json", " space ", " space ", []),
    ("json", ONE, "", [("f", {"text": 'a } " {', "count": 1})]),
    ("json", f"Let me see.\n\n{ONE}\n", "Let me see.", [("f", {"text": 'a } " {', "count": 1})]),
    (
        "json",
        ONE + "\n" + framed('{"name": "g", "arguments": {}}'),
        "",
        [("f", {"text": 'a } " {', "count": 1}), ("g", {})],
    ),
    ("json", framed('{"name": "f", "parameters": {"a": [1, {}]}}'), "", [("f", {"a": [1, {}]})]),
    ("json", framed('{"arguments": {"a": 1}, "name": "f"}'), "", [("f", {"a": 1})]),
    ("json", framed('{"name": "f", "arguments": "{\\"a\\": 1}"}'), "", [("f", {"a": 1})]),
    ("json", framed('{"name": "f"}'), "", [("f", {})]),
    (
        "json",
        framed('{"name": "f", "arguments": {"text": "</tool_call>"}}'),
        "",
        [("f", {"text": "</tool_call>"})],
    ),
    ("json", framed("no call"), framed("no call"), []),
    ("json", framed('{"name": 5, "arguments": {}}'), framed('{"name": 5, "arguments": {}}'), []),
    ("json", BAD_NAME, BAD_NAME, []),
    ("json", NO_NUMBER, NO_NUMBER, []),
    (
        "json",
        framed('{"arguments": {"text": "\\ud800"}, "name": "f"}'),
        "",
        [("f", {"text": "\ud800"})],
    ),
    ("json", "<tool_call>", "<tool_call>", []),
    ("json", ONE.removesuffix("\n</tool_call>"), "", [("f", {"text": 'a } " {', "count": 1})]),
    ("json", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("json", f"{ONE} and more", " and more", [("f", {"text": 'a } " {', "count": 1})]),
    ("tags", TAGS, "", [("f", {"text": "line 1\nline 2", "count": 3})]),
    ("tags", framed("<function=f>\n</function>"), "", [("f", {})]),
    ("tags", f"Hi.\n{TAGS}{TAGS}", "Hi.", [("f", {"text": "line 1\nline 2", "count": 3})] * 2),
    (
        "tags",
        framed(
            "<function=f>\n<parameter=text>\n5\n</parameter>\n<parameter=any>\n[1]\n</parameter>"
            "\n<parameter=count>\nfive\n</parameter>\n<parameter=kind>\na\n</parameter>\n"
            "</function>"
        ),
        "",
        [("f", {"text": "5", "any": [1], "count": "five", "kind": "a"})],
    ),
    (
        "tags",
        framed(
            '<function=f>\n<parameter=any>\n{"a": "</parameter>"}\n</parameter>\n<parameter=text>\n'
            '\n"x"\n\n</parameter>\n</function>'
        ),
        "",
        [("f", {"any": {"a": "</parameter>"}, "text": '\n"x"\n'})],
    ),
    (
        "tags",
        framed("<function=f>\n<parameter=any>\nNaN\n</parameter>\n</function>"),
        "",
        [("f", {"any": "NaN"})],
    ),
    (
        "json",
        framed('{"arguments": {"a": NaN}, "name": "f"}'),
        framed('{"arguments": {"a": NaN}, "name": "f"}'),
        [],
    ),
    (
        "tags",
        "<tool_call>\n<function=f>\n<parameter=text>\nlong",
        "<tool_call>\n<function=f>\n<parameter=text>\nlong",
        [],
    ),
    ("tags", TAGS.removesuffix("\n</tool_call>"), "", [("f", SAID)]),
    ("tags", framed("<function= >\n</function>"), framed("<function= >\n</function>"), []),
    ("tags", tags("a</parameter> b"), "", [("f", {"text": "a</parameter> b"})]),
    ("tags", tags("<tool_call>"), "", [("f", {"text": "<tool_call>"})]),
    (
        "tags",
        tags("</function>\n</tool_call>\n"),
        "",
        [("f", {"text": "</function>\n</tool_call>\n"})],
    ),
    ("tags", UNFINISHED, UNFINISHED, []),
    ("tags", UNFINISHED + "\n" + TAGS, UNFINISHED, [("f", SAID)]),
    ("tags", tags("NaN", "any"), "", [("f", {"any": "NaN"})]),
    ("tags", tags("[1e999]", "any"), "", [("f", {"any": "[1e999]"})]),
    ("tags", tags("[" * 100_000, "any"), "", [("f", {"any": "[" * 100_000})]),
    ("tags", tags('["\\ud800"]', "any"), "", [("f", {"any": ["\ud800"]})]),
    ("tags", framed("nothing"), framed("nothing"), []),
    (
        "tags",
        framed("<function=f>\n<parameter=text>\n</tool_call>\n</parameter>\n</function>"),
        "",
        [("f", {"text": "</tool_call>"})],
    ),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_pieces(form: str, text: str, content: str, calls: list[Any], cuts: list[int]) -> None:
    found, read_calls = read(form, text, cuts)
    assert found == content
    assert [(name, json.loads(arguments)) for name, arguments in read_calls] == calls
    for _, arguments in read_calls:
        arguments.encode()
    assert (found, read_calls) == read(form, text), "the pieces matter"


@given(
    st.dictionaries(
        st.text(max_size=4),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=6),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
            max_leaves=6,
        ),
        max_size=4,
    ),
    st.lists(st.integers(0, 200), max_size=8),
    st.booleans(),
)
def test_arguments_come_as_they_are_written(
    arguments: dict[str, Any], cuts: list[int], ascii_only: bool
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = framed(f'{{"name": "f", "arguments": {written}}}')
    assert read("json", text, cuts) == ("", [("f", written)])


@given(st.sampled_from(["json", "tags"]), st.text(max_size=40), st.lists(st.integers(0, 40)))
def test_any_text(form: str, text: str, cuts: list[int]) -> None:
    assert read(form, text, cuts) == read(form, text)


def test_a_cut_answer_keeps_what_was_told() -> None:
    parser = tool_calls.ToolCallParser(call_readers.JsonReader)
    parts = parser.push('<tool_call>{"name": "f", "arguments": {"a": "b')
    (call,) = parts.calls
    assert (call.name, call.arguments) == ("f", '{"a": "b')
    assert parser.finish().calls == []


def test_calls_after_the_first_are_left_out() -> None:
    parser = tool_calls.ToolCallParser(call_readers.JsonReader, 1)
    told = [parser.push(ONE + "\n" + ONE), parser.finish()]
    assert parser.calls == len([call for parts in told for call in parts.calls]) == 1
    assert "".join(parts.content for parts in told) == ""
