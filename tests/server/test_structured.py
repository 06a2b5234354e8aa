"""Formats of answers and calls of tools, through OpenAI's own client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import jsonschema
import pytest

from edgecc.backends.runtime import ChatTemplates, Generator
from helpers.tool_templates import TEMPLATE

from .conftest import serving

if TYPE_CHECKING:
    from edgecc.backends.server import Server

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")
pydantic = pytest.importorskip("pydantic")
pytest.importorskip("llguidance")

MESSAGES = [{"role": "user", "content": "Say hi"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTE = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 6}}}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def nested(depth: int) -> Any:
    """The schema of a list in a list in a list."""
    return {"type": "array", "items": nested(depth - 1)} if depth else {}


WEATHER, REMEMBER = tool("weather", PARAMETERS), tool("note", NOTE)
TOOLS = [WEATHER, REMEMBER]


class Person(pydantic.BaseModel):
    """What a client parses an answer into."""

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(max_length=8)
    kind: Literal["man", "woman"]
    age: int = pydantic.Field(ge=0, le=130)


@pytest.fixture(scope="module")
def served(loaded: Generator) -> Iterator[Server]:
    with serving(loaded, chat_template=TEMPLATE) as running:
        yield running


@pytest.fixture
def client(served: Server) -> Any:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: Any, messages: Any = MESSAGES, **options: Any) -> Any:
    options = {"max_tokens": 200, "temperature": 0} | options
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def streamed(client: Any, **options: Any) -> tuple[str, list[list[str]], str]:
    """Content, name and arguments of each call, and why the answer ended."""
    content, calls, reason = "", [], ""
    for event in ask(client, stream=True, **options):
        choice = event.choices[0]
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls)
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
        reason = choice.finish_reason or reason
    return content, calls, reason


def test_an_answer_of_a_class(client: Any) -> None:
    """The client sends the schema and reads the answer."""
    answer = client.beta.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Person, max_tokens=200, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Person)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.draft_tokens > 0


def test_speculation_changes_no_answer(client: Any) -> None:
    format_ = {
        "type": "json_schema",
        "json_schema": {"name": "person", "schema": Person.model_json_schema(), "strict": True},
    }
    for options in ({}, {"temperature": 1, "seed": 3}):
        found = {
            ask(client, response_format=format_, extra_body=extra, **options)
            .choices[0]
            .message.content
            for extra in ({}, {"disable_spec_decode": True}, {"num_speculative_tokens": 1})
        }
        assert len(found) == 1
        Person.model_validate_json(found.pop())


def test_a_stream_of_json(client: Any) -> None:
    options = {"response_format": {"type": "json_object"}, "max_tokens": 40}
    content, calls, _ = streamed(client, **options)
    assert content == ask(client, **options).choices[0].message.content
    assert content.startswith("{")
    assert calls == []


@pytest.mark.parametrize(
    ("outputs", "pattern"),
    [
        ({"regex": "[0-9]{3}-[0-9]{2}"}, "[0-9]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
        ({"json": '{"enum": [1, 2]}'}, "1|2"),
        ({"grammar": "start: /[xy]{2}/"}, "[xy]{2}"),
    ],
)
def test_outputs_as_vllm_has_them(client: Any, outputs: Any, pattern: str) -> None:
    extra = {"structured_outputs": outputs}
    chat = ask(client, extra_body=extra).choices[0]
    text = client.completions.create(model="tiny", prompt="a", max_tokens=30, extra_body=extra)
    for found in (chat.message.content, text.choices[0].text):
        assert re.fullmatch(pattern, found)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_call_is_required(client: Any, parallel: bool) -> None:
    options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel}
    choice = ask(client, **options).choices[0]
    calls = choice.message.tool_calls
    assert choice.message.content is None
    assert calls
    if not parallel:
        assert choice.finish_reason == "tool_calls"
        assert len(calls) == 1
    for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
        schema = {"weather": PARAMETERS, "note": NOTE}[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema)
    content, found, reason = streamed(client, **options)
    assert content == ""
    assert reason == choice.finish_reason
    assert found == [[call.function.name, call.function.arguments] for call in calls]


def test_a_tool_is_named(client: Any) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for n in (1, 2):
        answer = ask(client, tools=TOOLS, tool_choice=named, n=n, temperature=1, seed=4)
        assert len(answer.choices) == n
        for choice in answer.choices:
            (call,) = choice.message.tool_calls
            assert call.function.name == "weather"
            assert call.type == "function"
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
            assert choice.finish_reason == "tool_calls"
        assert len({c.message.tool_calls[0].id for c in answer.choices}) == n


def test_the_model_may_choose(client: Any) -> None:
    """Without a word about it, the answer is free: text, or a call if the model writes one."""
    free = ask(client, tools=TOOLS, max_tokens=20).choices[0]
    assert free.message.tool_calls is None
    assert free.message.content
    assert streamed(client, tools=TOOLS, max_tokens=20)[0] == free.message.content
    strict = ask(client, tools=[tool("weather", PARAMETERS, strict=True)], max_tokens=20)
    assert strict.choices[0].message.content
    either = ask(client, tools=TOOLS, response_format={"type": "json_object"}, max_tokens=20)
    assert (either.choices[0].message.content or "{").startswith("{")


def test_a_stop_inside_of_a_call(client: Any) -> None:
    answer = ask(client, tools=TOOLS, tool_choice="required", stop="arguments").choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.tool_calls is None
    assert answer.message.content.startswith("<tool_call>")


def test_none_is_called(client: Any, served: Server) -> None:
    plain = ask(client, max_tokens=8)
    none = ask(client, max_tokens=8, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    body = {"messages": MESSAGES}
    with_tools = httpx.post(f"{served.url}/tokenize", json=body | {"tools": TOOLS}).json()
    assert with_tools["count"] > plain.usage.prompt_tokens


def test_history(client: Any, loaded: Generator) -> None:
    """Calls and their results go to the template as it takes them."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'},
    }
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    function = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}
    expected = ChatTemplates({"default": TEMPLATE}).render(
        [
            *MESSAGES,
            {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            {"role": "tool", "content": "sunny"},
        ]
    )
    assert '"arguments": {"city": "Rome", "days": 2}}</tool_call>' in expected
    answer = ask(client, messages, max_tokens=4)
    assert answer.usage.prompt_tokens == len(loaded.tokenizer.encode(expected))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema"}}, "server/bad-format"),
    ({"response_format": {"type": "xml"}}, "server/bad-field"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "grammar/bad-json-schema",
    ),
    ({"structured_outputs": {"regex": "[a"}}, "grammar/bad-regex"),
    (
        {"tools": [tool("a", {"properties": {"a": nested(900)}})], "tool_choice": "required"},
        "chat/too-deep",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "server/bad-format"),
    ({"structured_outputs": {}}, "server/bad-format"),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "server/bad-format",
    ),
    ({"guided_regex": "a"}, "server/unsupported-field"),
    ({"tools": [WEATHER, WEATHER]}, "server/bad-tools"),
    ({"tools": [tool("a b")]}, "server/bad-field"),
    ({"tools": [{"type": "magic"}]}, "server/bad-field"),
    ({"tools": [tool("a", {"properties": 5})]}, "server/bad-tools"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "server/bad-field"),
    ({"tool_choice": "required"}, "server/bad-tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "server/bad-tools",
    ),
    (
        {"tools": [tool("a", {"not": {}})], "tool_choice": "required"},
        "grammar/bad-lark",
    ),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "server/bad-tools"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
        "server/bad-tools",
    ),
    (
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "a", "arguments": "{"}}],
                }
            ]
        },
        "server/bad-tools",
    ),
    ({"functions": [{"name": "a"}]}, "server/unsupported-field"),
]


@pytest.mark.parametrize(("body", "code"), BAD)
def test_bad_requests(served: Server, body: dict[str, Any], code: str) -> None:
    answer = httpx.post(
        f"{served.url}/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 5} | body
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    if code.startswith("grammar/"):
        assert error["param"] == next(iter(body))
