"""Attribute dataclasses to text and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeAlias

from edgecc.errors import did_you_mean
from edgecc.ir.ops.base import Attributes

Scalar: TypeAlias = bool | int | float | str
Literal: TypeAlias = Scalar | tuple[Scalar, ...]


class AttributeSyntaxError(ValueError):
    """Attributes do not fit the op; `help` lists what would."""

    def __init__(self, message: str, help: str = "") -> None:
        super().__init__(message)
        self.help = help


def build_attributes(cls: type[Attributes], literals: Mapping[str, Literal]) -> Attributes:
    """An attribute object from parsed literals.

    Raises:
        AttributeSyntaxError: Unknown, missing or wrongly typed attributes.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name in literals:
        if name not in fields:
            raise AttributeSyntaxError(
                f"unknown attribute {name}", did_you_mean(name, fields) if fields else "it has none"
            )
    hints = _hints(cls)  # type: ignore[arg-type]  # classes are hashable
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in literals:
            values[name] = _coerce(name, literals[name], hints[name])
        elif field.default is dataclasses.MISSING:
            raise AttributeSyntaxError(f"attribute {name} is missing")
    return cls(**values)


@functools.cache
def _hints(cls: type[Attributes]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def print_literal(value: object) -> str:
    """Text of an attribute or parameter value; floats are the shortest that read back equal."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(print_literal(v) for v in value) + "]"
    if isinstance(value, float):
        if math.isnan(value):
            return "nan"
        text = repr(value)
        return text if "inf" in text or "." in text or "e" in text else text + ".0"
    return repr(value)


def quote(text: str) -> str:
    """A JSON string; what is no Unicode, such as bytes in the name of a folder, is escaped."""
    return json.dumps(text, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def _coerce(name: str, value: Literal, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin is tuple:
        if not isinstance(value, tuple):
            raise AttributeSyntaxError(f"{name} must be a list")
        inner = typing.get_args(hint)[0]
        return tuple(_coerce(name, v, inner) for v in value)
    if origin in (typing.Union, types.UnionType):
        options = [o for o in typing.get_args(hint) if o is not type(None)]
        return _coerce(name, value, options[0])
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise AttributeSyntaxError(f"{name} must be of type {hint.__name__}, got {value!r}")
    return value
