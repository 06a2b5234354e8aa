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

import json
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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


class CallReader(ABC):
    """Reads one call, from behind `<tool_call>` on.

    Attributes:
        name: The name of the tool, as soon as it is known; never, if this is no call.
        announced: For the caller: whether it has told the name.
        text: All that was taken, up to the end of the call.
        rest: What follows the call, once it has ended.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.announced = False
        self.text = ""
        self.rest: str | None = None

    def push(self, text: str) -> str:
        """Take more text; returns the next part of the arguments."""
        self.text += text
        return self._read()

    @abstractmethod
    def finish(self) -> str:
        """Nothing more comes; returns the last part of the arguments."""

    @abstractmethod
    def _read(self) -> str:
        """Read what is new of the text."""

    def _end(self, place: int) -> None:
        """The call ends here."""
        self.text, self.rest = self.text[:place], self.text[place:]


class JsonReader(CallReader):
    """A call in JSON. Arguments are handed out as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self._read_to = 0
        self._object: _Object | None = None

    def _read(self) -> str:
        if self._object is None:
            head = _JSON_HEAD.match(self.text)
            if head is None:
                return self._read_whole()
            self.name = json.loads(head[1], strict=False)
            self._object, self._read_to = _Object(), head.end()
        begin = self._read_to
        self._read_to = self._object.follow(self.text, begin)
        arguments = self.text[begin : self._read_to]
        if self._object.closed and (end := self.text.find(CLOSE, self._read_to)) >= 0:
            self._end(end + len(CLOSE))
        return arguments

    def _read_whole(self) -> str:
        """A call whose parts come in another order, or something else."""
        end = self.text.find(CLOSE)
        if end < 0:
            return ""
        arguments = self._parse(self.text[:end])
        self._end(end + len(CLOSE))
        return arguments

    def finish(self) -> str:
        """See `CallReader`. Models leave the closing tag out where their text ends."""
        return self._parse(self.text) if self._object is None else ""

    def _parse(self, text: str) -> str:
        try:
            call = json.loads(text, strict=False)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return ""
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return ""
        try:
            found = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        except ValueError:  # NaN, which is no JSON
            return ""
        self.name = name
        return found


class TagReader(CallReader):
    """A call in tags. Its arguments come when it is complete.

    Args:
        schemas: Schemas of the parameters of tools, by the tools' names: they tell text from JSON.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__()
        self._schemas = schemas

    def _read(self) -> str:
        closing = _TAGS_END if self.text.lstrip().startswith("<function=") else _CLOSE
        end = closing.search(self.text)
        if end is None:
            return ""
        arguments = self._parse(self.text[: end.end() - len(CLOSE)])
        self._end(end.end())
        return arguments

    def finish(self) -> str:
        """See `CallReader`."""
        return self._parse(self.text)

    def _parse(self, text: str) -> str:
        function = _TAGS.fullmatch(text)
        if function is None:
            return ""
        self.name = function[1].strip()
        properties = self._schemas.get(self.name, {}).get("properties", {})
        arguments: dict[str, str] = {}
        place = 0
        while (opened := _PARAMETER.search(function[2], place)) is not None:
            key = opened[1].strip()
            found = _read_value(function[2], opened.end(), properties.get(key, {}))
            if found is None:
                break
            arguments[key], place = found
        members = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in arguments.items())
        return "{" + ", ".join(members) + "}"


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


class _Object:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.closed = False
        self._depth = 0
        self._quoted = False

    def follow(self, text: str, begin: int) -> int:
        """Where the object ends, or the text.

        What may be the first half of an escape is left for the next time.
        """
        place = begin
        while place < len(text) and not self.closed:
            found = (_IN_STRING if self._quoted else _OUT_OF_STRING).search(text, place)
            if found is None:
                return len(text)
            if found[0] == "\\":
                return found.start()
            place = found.end()
            self._take(found[0])
        return place

    def _take(self, mark: str) -> None:
        if mark == '"':
            self._quoted = not self._quoted
        elif mark in "{[":
            self._depth += 1
        elif mark in "}]":
            self._depth -= 1
            self.closed = self._depth == 0


_IN_STRING = re.compile(r'\\.|\\$|"', re.DOTALL)
_OUT_OF_STRING = re.compile(r'["{}\[\]]')
_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_TAGS = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?")
_END_OF_TEXT = re.compile(r"\n?</parameter>")
_END_OF_JSON = re.compile(r"\s*</parameter>")
_TAGS_END = re.compile(r"</function>\s*</tool_call>")
_CLOSE = re.compile(re.escape(CLOSE))


def takes_text(schema: object) -> bool:
    """Whether a parameter is a text, which tags do not write as JSON."""
    if not isinstance(schema, Mapping):
        return False
    if isinstance(enum := schema.get("enum"), list):
        return all(isinstance(value, str) for value in enum)
    return schema.get("type") == "string"


def _read_value(text: str, begin: int, schema: object) -> tuple[str, int] | None:
    """A value of a parameter as JSON, and where its closing tag ends; None if there is none.

    What should be JSON and is not is text. JSON is kept as it is written: numbers keep all digits.
    """
    if not takes_text(schema):
        start = begin + len(text[begin:]) - len(text[begin:].lstrip())
        try:
            _, end = _JSON.raw_decode(text, start)
        except (ValueError, RecursionError):
            pass
        else:
            if (closing := _END_OF_JSON.match(text, end)) is not None:
                return text[start:end], closing.end()
    closing = _END_OF_TEXT.search(text, begin)
    if closing is None:
        return None
    return json.dumps(text[begin : closing.start()], ensure_ascii=False), closing.end()


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_constant=_no_number)


def _begun(text: str, marker: str) -> int:
    """Length of the end of a text that begins a marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)
