"""What the chat template says about tools decides what a server does with them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from helpers.tool_templates import TAG_TEMPLATE

httpx = pytest.importorskip("httpx")
pytest.importorskip("llguidance")

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "$defs": {"place": {"enum": ["in", "out"]}},
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
BODY = {
    "messages": [{"role": "user", "content": "Say hi"}],
    "tools": [TOOL],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
}


def post(server: Any, body: Any) -> Any:
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize(
    ("template", "code"),
    [
        (None, "server/no-tools"),
        ("{{ messages[0].content }}{% if tools %}[CALL]{% endif %}", "server/unknown-tool-calls"),
    ],
)
def test_templates_that_know_no_calls(serve: Any, template: str | None, code: str) -> None:
    with serve(chat_template=template) as server:
        refused = post(server, BODY)
        taken = post(server, BODY | {"tools": [], "tool_choice": None, "max_tokens": 1})

    assert (refused.status_code, taken.status_code) == (400, 200)
    assert refused.json()["error"]["code"] == code
    assert "--chat-template" in refused.json()["error"]["message"]


def test_calls_in_tags(serve: Any) -> None:
    with serve(chat_template=TAG_TEMPLATE) as server:
        answers = [post(server, BODY | {"temperature": 1.5, "seed": seed}) for seed in range(6)]
        text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        note = {"type": "function", "function": {"name": "note", "parameters": text}}
        free = post(server, BODY | {"tools": [note], "temperature": 0, "max_tokens": 250}).json()

    found = []
    for answer in answers:
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "tool_calls":
            (call,) = choice["message"]["tool_calls"]
            found.append(json.loads(call["function"]["arguments"]))
            jsonschema.validate(found[-1], PARAMETERS)
    assert found
    choice = free["choices"][0]
    if choice["finish_reason"] == "tool_calls":
        arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
        jsonschema.validate(arguments, text)
    else:
        assert choice["message"]["content"].startswith("<tool_call>\n<function=note>")
