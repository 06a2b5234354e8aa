"""Messages of a chat as templates take them: what a template would drop in silence is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgecc.backends.runtime.image_messages import IMAGE_KINDS
from edgecc.backends.server.tools import without_call_strings
from edgecc.errors import RequestError

_TEXT_KINDS = (None, "text", "input_text", "output_text")


def readable(
    messages: Sequence[Mapping[str, Any]], *, images: bool, developer: bool
) -> list[Mapping[str, Any]]:
    """The same messages for a template.

    Args:
        messages: As they came.
        images: Whether the model reads images; templates of others take texts, not lists of parts.
        developer: Whether its templates know the role `developer`; others have `system` for it.

    Raises:
        RequestError: One has content that is neither text nor images, or malformed calls of tools.
    """
    return [_readable(message, i, images, developer) for i, message in enumerate(messages)]


def _readable(
    message: Mapping[str, Any], index: int, images: bool, developer: bool
) -> Mapping[str, Any]:
    where = f"messages[{index}]"
    if message.get("function_call") is not None:
        raise RequestError(
            "server/unsupported-field",
            "function_call is not supported",
            where=f"{where}.function_call",
            help="write it as one of tool_calls",
        )
    message = without_call_strings(message, index)
    if message.get("role") == "developer" and not developer:
        message = {**message, "role": "system"}
    content = message.get("content")
    if content is None or isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise _bad("a content is a text or a list of parts", f"{where}.content")
    parts = [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
    if images or not parts or not all(_is_text(part) for part in parts):
        return {**message, "content": parts}
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def _part(part: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise _bad("a part of a content is an object with a type", where)
    kind = part.get("type")
    if kind in IMAGE_KINDS or any(key in part for key in IMAGE_KINDS):
        return part
    key = "refusal" if kind == "refusal" else "text"
    if key == "text" and kind not in _TEXT_KINDS:
        raise _bad("a part is a text or an image, and nothing else is read", f"{where}.type")
    text = part.get(key)
    if not isinstance(text, str):
        raise _bad("a part that is a text has one", f"{where}.{key}")
    return {"type": "text", "text": text}


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "text" and isinstance(part.get("text"), str)


def _bad(message: str, where: str) -> RequestError:
    return RequestError("chat/bad-content", message, where=where)
