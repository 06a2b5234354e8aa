"""Messages of a chat: what templates would drop in silence is refused, with its place."""

from __future__ import annotations

from typing import Any

import pytest

from edgecc.errors import RequestError

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
history = pytest.importorskip("edgecc.backends.server.history")

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAEC"}}


def read(*messages: Any, images: bool = False, developer: bool = False) -> list[Any]:
    found: list[Any] = history.readable(messages, images=images, developer=developer)
    return found


def content(value: Any, **options: Any) -> Any:
    (message,) = read({"role": "user", "content": value}, **options)
    return message["content"]


def test_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"text": "b"}, {"type": "refusal", "refusal": "c"}]
    assert content("a") == "a"
    assert content(None) is None
    assert content([]) == []
    assert content(parts) == "a\nb\nc"
    assert content(parts, images=True) == [{"type": "text", "text": text} for text in "abc"]


def test_images_stay() -> None:
    parts = [{"type": "text", "text": "a"}, IMAGE]
    assert content(parts, images=True) == content(parts) == parts


def test_the_role_developer() -> None:
    message = {"role": "developer", "content": "a"}
    assert read(message) == [{"role": "system", "content": "a"}]
    assert read(message, developer=True) == [message]


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (5, ""),
        (True, ""),
        ({"type": "text", "text": "a"}, ""),
        (["a"], "[0]"),
        ([None], "[0]"),
        ([{"type": "text"}], "[0].text"),
        ([{"type": "text", "text": 5}], "[0].text"),
        ([{"type": "refusal", "text": "a"}], "[0].refusal"),
        ([{"type": "text", "text": "a"}, {"type": "file", "file": {}}], "[1].type"),
        ([{"type": "input_audio", "text": "a"}], "[0].type"),
        ([{"type": ["text"], "text": "a"}], "[0].type"),
    ],
)
def test_content_that_nothing_reads(value: Any, place: str) -> None:
    with pytest.raises(RequestError) as caught:
        read({"role": "system", "content": "a"}, {"role": "user", "content": value})
    assert caught.value.id == "chat/bad-content"
    assert caught.value.diagnostics[0].where == f"messages[1].content{place}"


def test_calls_as_they_were_written_long_ago() -> None:
    with pytest.raises(RequestError) as caught:
        read({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}})
    assert caught.value.diagnostics[0].where == "messages[0].function_call"


def test_arguments_with_line_ends() -> None:
    """As models write them, and as they were answered."""
    function = {"name": "f", "arguments": '{"a": "x\ny"}'}
    (message,) = read({"role": "assistant", "tool_calls": [{"function": function}]})
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": "x\ny"}
