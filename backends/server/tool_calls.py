"""Calls of tools in the text of an answer, as it comes.

A call is framed by `<tool_call>` and `</tool_call>`. Between them is, by what the model was trained
on, JSON (Qwen2.5, Qwen3, Hermes):

```
{"name": "get_weather", "arguments": {"city": "Paris"}}
```

or tags (Qwen3-Coder, Qwen3.5):

```
<function=get_weather>
<parameter=city>
Paris
</parameter>
</function>
```
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edgecc.backends.server.call_readers import CLOSE, OPEN, CallReader, read_json, write_json


@dataclass(slots=True)
class CallPart:
    """What is new of one call.

    Attributes:
        index: Of the call in the answer.
        arguments: The next part of its arguments, which are JSON once they are complete.
        id: With the first part only.
        name: Likewise.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parts:
    """What is new of an answer.

    Attributes:
        content: The next piece of its text.
        calls: New parts of its calls, in order.
    """

    content: str = ""
    calls: list[CallPart] = field(default_factory=list)


class TagReader(CallReader):
    """A call in tags. Its arguments come when it is complete.

    A value ends at the first `</parameter>` behind which the call goes on or ends: texts may have
    tags in them.

    Args:
        schemas: Schemas of the parameters of tools, by the tools' names: they tell text from JSON.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas
        self._first_end: int | None = None
        self._searched = 0

    def _read(self) -> str:
        if not self.text.lstrip().startswith("<function="):
            if end := _CLOSE.search(self.text):
                self._end(end.end())
            return ""
        while end := _TAGS_END.search(self.text, self._searched):
            self._searched = end.end()
            if end[0] == OPEN:
                if self._first_end is None:
                    continue  # in a text
                self._end(self._first_end)  # the next call, and a value of this one has no end
                return ""
            call = _TagCall(self.text[: end.start("close")])
            if not call.unfinished:
                self._end(end.end())
                return self._take(call)
            self._first_end = self._first_end or end.end()
        return ""

    def finish(self) -> str:
        """See `CallReader`. Models leave the closing tag out where their text ends."""
        return self._take(_TagCall(self.text))

    def _take(self, call: _TagCall) -> str:
        if not call.name:
            return ""
        properties = self._schemas.get(call.name, {}).get("properties", {})
        members = (
            f"{write_json(key)}: {_written(text, properties.get(key, {}))}"
            for key, text in call.values.items()
        )
        self.name = call.name
        return "{" + ", ".join(members) + "}"


class _TagCall:
    """A function in tags and its parameters, as texts.

    Args:
        text: All of it.

    Attributes:
        name: Of the function; empty if the text is something else.
        values: Of the parameters, by name.
        unfinished: Whether a value has no end yet.
    """

    def __init__(self, text: str) -> None:
        self.name = ""
        self.values: dict[str, str] = {}
        self.unfinished = False
        head = _FUNCTION.match(text)
        if head is None:
            return
        place = head.end()
        while begin := _PARAMETER.match(text, place):
            end = _VALUE_END.search(text, begin.end())
            if end is None:
                self.unfinished = True
                return
            self.values[begin[1].strip()] = text[begin.end() : end.start()]
            place = end.end()
        if _FUNCTION_END.fullmatch(text, place):
            self.name = head[1].strip()


MakeReader: TypeAlias = Callable[[], CallReader]


class ToolCallParser:
    """Takes an answer apart: text, and calls of tools.

    What is framed as a call and is none is text. White space around calls is dropped.

    Args:
        make_reader: Makes a reader for each call.
        most: Calls after so many are left out; None keeps all.
    """

    def __init__(self, make_reader: MakeReader, most: int | None = None) -> None:
        self._make_reader = make_reader
        self._most = most
        self._held = ""
        self._reader: CallReader | None = None
        self.calls = 0
        """Calls found so far."""

    def push(self, text: str) -> Parts:
        """Take more text."""
        parts, left = Parts(), text
        while left:
            left = self._outside(left, parts) if self._reader is None else self._inside(left, parts)
        return parts

    def finish(self) -> Parts:
        """Nothing more comes."""
        parts, reader = Parts(), self._reader
        if reader is not None:
            self._reader = None
            self._note(reader, reader.finish(), parts)
            if reader.name is None:
                self._held += OPEN + reader.text
        parts.content += self._held.rstrip() if self.calls else self._held
        self._held = ""
        return parts

    def _outside(self, text: str, parts: Parts) -> str:
        text = self._held + text
        before, found, after = text.partition(OPEN)
        if found:
            self._held = ""
            parts.content += before.rstrip()
            self._reader = self._make_reader()
            return after
        shown = text[: len(text) - _begun(text, OPEN)].rstrip()
        self._held = text[len(shown) :]
        parts.content += shown
        return ""

    def _inside(self, text: str, parts: Parts) -> str:
        reader = self._reader
        if reader is None:
            return text
        self._note(reader, reader.push(text), parts)
        if reader.rest is None:
            return ""
        self._reader = None
        if reader.name is None:
            parts.content += OPEN + reader.text
        return reader.rest

    def _note(self, reader: CallReader, arguments: str, parts: Parts) -> None:
        if reader.name is None:
            return
        if not reader.announced:
            if self.calls == self._most:
                return
            reader.announced = True
            identifier = f"call_{secrets.token_hex(12)}"
            parts.calls.append(CallPart(self.calls, arguments, identifier, reader.name))
            self.calls += 1
        elif arguments:
            parts.calls.append(CallPart(self.calls - 1, arguments))


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?")
_VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
_FUNCTION_END = re.compile(r"\s*</function>\s*")
_TAGS_END = re.compile(rf"</function>\s*(?P<close>{re.escape(CLOSE)})|{re.escape(OPEN)}")
_CLOSE = re.compile(re.escape(CLOSE))


def takes_text(schema: object) -> bool:
    """Whether a parameter is a text, which tags do not write as JSON."""
    if not isinstance(schema, Mapping):
        return False
    if isinstance(enum := schema.get("enum"), list):
        return all(isinstance(value, str) for value in enum)
    return schema.get("type") == "string"


def _written(text: str, schema: object) -> str:
    """A value as JSON; what should be some and is not is a text."""
    if not takes_text(schema):
        with suppress(ValueError):
            return write_json(read_json(text))
    return write_json(text)


def _begun(text: str, marker: str) -> int:
    """Length of the end of a text that begins a marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)
