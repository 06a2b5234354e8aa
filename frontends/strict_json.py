"""JSON from files that nobody vouches for: bounded size and nesting, no duplicate keys.

The standard parser keeps the last of two equal keys, so two readers of one file can see two models.
Everything read from a checkpoint goes through `parse_object`.
"""

from __future__ import annotations

import json
from typing import TypeAlias

from edgecc.errors import InputError

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
JsonObject: TypeAlias = dict[str, Json]

MAX_DEPTH = 32
"""Deepest nesting accepted; real configs use about six levels."""

MAX_VALUES = 4_000_000
"""Most commas accepted, and so most values. Real vocabularies and headers have less than half; a
hundred megabytes of numbers would take a minute and gigabytes to parse."""

LFS_MAGIC = b"version https://git-lfs.github.com/spec/"


class _Rejected(ValueError):
    """A value the JSON grammar allows and edgecc does not."""


def parse_object(data: bytes, where: str, *, constants: bool = False) -> JsonObject:
    """Parse one JSON object.

    Args:
        data: The bytes, UTF-8.
        where: File the bytes come from, for messages.
        constants: Accept `NaN` and `Infinity`, which Python writes into configs although JSON has
            no such values. Numbers that are used are checked by their reader.

    Raises:
        InputError: Not UTF-8, not JSON, not an object, a duplicate key, nested too deeply, of too
            many values, or a Git LFS pointer.
    """
    if data.startswith(LFS_MAGIC):
        raise lfs_pointer(where)
    if data.count(b",") > MAX_VALUES:
        raise _bad(where, f"it holds more than {MAX_VALUES} values")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=float if constants else _no_constant,
        )
    except RecursionError:
        raise _bad(where, "it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise _bad(where, f"byte {error.start} is not UTF-8") from error
    except ValueError as error:  # syntax, _Rejected, or an integer of more than 4300 digits
        raise _bad(where, str(error)) from error
    if not isinstance(value, dict):
        raise _bad(where, f"it holds {kind(value)}, not an object")
    if _too_deep(value):
        raise _bad(where, f"it is nested deeper than {MAX_DEPTH} levels")
    return value


def kind(value: Json) -> str:
    """What a JSON value is, in words: `a string`, `null`, `a list`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    names = {int: "an integer", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object")


def lfs_pointer(where: str) -> InputError:
    """The error for a Git LFS pointer in the place of a file."""
    return InputError(
        "checkpoint/lfs-pointer",
        "this is a Git LFS pointer, a few lines of text that stand for the real file",
        where=where,
        help="fetch the real file, for example with `git lfs pull`",
    )


def _bad(where: str, reason: str) -> InputError:
    return InputError(
        "checkpoint/bad-json",
        f"not usable as JSON: {reason}",
        where=where,
        help="download or export the file again",
    )


def _unique(pairs: list[tuple[str, Json]]) -> JsonObject:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _Rejected(f"the key {twice!r} occurs twice in one object")
    return found


def _no_constant(text: str) -> float:
    raise _Rejected(f"{text} is not a JSON number")


def _too_deep(value: JsonObject) -> bool:
    """Whether lists and objects are nested deeper than `MAX_DEPTH`, without recursion."""
    level: list[JsonObject | list[Json]] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
