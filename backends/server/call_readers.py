"""What is between the tags of a call, as it comes; and calls that are written as JSON."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Any, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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
            name = None if head is None else _name(head[1])
            if head is None or name is None:
                return self._read_whole()
            self.name = name
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
            call = read_json(text)
            name, arguments = call["name"], call.get("arguments", call.get("parameters", {}))
            if isinstance(arguments, str):
                arguments = read_json(arguments)
            written = write_json(arguments)
        except (ValueError, TypeError, KeyError, AttributeError):
            return ""
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return ""
        self.name = name
        return written


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


def read_json(text: str) -> Any:
    """JSON as models write it: their strings may have line ends in them.

    Raises:
        ValueError: It is something else, nested too deeply, or has NaN or infinity in it.
    """
    try:
        return json.loads(text, strict=False, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def write_json(value: Any) -> str:
    """A value as JSON that any client can read.

    Raises:
        ValueError: It has a number that is too large for one, or is nested too deeply.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return _HALF_PAIR.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _name(quoted: str) -> str | None:
    """The name of a tool in JSON; None if it is malformed."""
    try:
        return str(read_json(quoted))
    except ValueError:
        return None


_IN_STRING = re.compile(r'\\.|\\$|"', re.DOTALL)
_OUT_OF_STRING = re.compile(r'["{}\[\]]')
_JSON_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_HALF_PAIR = re.compile("[\ud800-\udfff]")
