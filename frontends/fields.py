"""Typed access to the keys of a config, with errors that name file, key, value and expectation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn, TypeVar, overload

from edgecc.errors import InputError
from edgecc.frontends.strict_json import Json, kind

_T = TypeVar("_T")

MAX_COUNT = 2**31 - 1
"""No size or id of a model is larger; bigger ones are damage."""

_FETCH = "correct the key, or fetch the file again"


@dataclass(frozen=True, slots=True)
class Fields:
    """One object of a config file.

    JSON null counts as absent everywhere: producers write it for "not set". JSON booleans are not
    numbers here, although Python thinks so.

    Attributes:
        values: The object.
        where: File and path of the object, for messages: `target/config.json: text_config`.
    """

    values: Mapping[str, Json]
    where: str

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.values.get(key) is not None

    def at(self, key: str) -> str:
        """How messages call a key: `target/config.json: hidden_size`."""
        return f"{self.where}{'.' if ': ' in self.where else ': '}{key}"

    def fail(self, key: str, expected: str) -> NoReturn:
        """Raise for a key with a wrong value.

        Raises:
            InputError: Always.
        """
        value = self.values.get(key)
        if key not in self:
            raise InputError(
                "config/missing-key",
                f"{key} is missing, expected {expected}",
                where=self.at(key),
                help=_FETCH,
            )
        shown = repr(value) if isinstance(value, str | int | float) else kind(value)
        if isinstance(value, list):
            shown = repr(value[:8])[:80]
        raise InputError(
            "config/bad-value",
            f"{key} is {shown}, expected {expected}",
            where=self.at(key),
            help=_FETCH,
        )

    def section(self, key: str) -> Fields | None:
        """A nested object, or None if absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(key, "an object")
        return Fields(value, self.at(key))

    @overload
    def integer(self, key: str, *, minimum: int = ...) -> int: ...
    @overload
    def integer(self, key: str, *, minimum: int = ..., default: _T) -> int | _T: ...
    def integer(self, key: str, *, minimum: int = 1, default: object = ...) -> object:
        """An integer of at least `minimum` (1 unless given); required unless there is a default."""
        value = self.values.get(key)
        if value is None and default is not ...:
            return default
        if type(value) is not int or not minimum <= value <= MAX_COUNT:
            most = f" and at most {MAX_COUNT}" if type(value) is int and value > minimum else ""
            self.fail(key, f"an integer of at least {minimum}{most}")
        return value

    @overload
    def number(self, key: str) -> float: ...
    @overload
    def number(self, key: str, *, default: _T) -> float | _T: ...
    def number(self, key: str, *, default: object = ...) -> object:
        """A finite positive number; required unless there is a default."""
        value = self.values.get(key)
        if value is None and default is not ...:
            return default
        if type(value) not in (int, float) or not _usable(value):
            self.fail(key, "a finite positive number")
        return float(value)  # type: ignore[arg-type]

    def boolean(self, key: str, *, default: bool) -> bool:
        """A boolean, `default` if absent."""
        value = self.values.get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, "true or false")
        return value

    @overload
    def string(self, key: str) -> str: ...
    @overload
    def string(self, key: str, *, default: _T) -> str | _T: ...
    def string(self, key: str, *, default: object = ...) -> object:
        """A string; required unless there is a default."""
        value = self.values.get(key)
        if value is None and default is not ...:
            return default
        if not isinstance(value, str):
            self.fail(key, "a string")
        return value

    def strings(self, key: str) -> tuple[str, ...] | None:
        """A list of strings, or None if absent."""
        return self._list(key, "a list of strings", lambda v: isinstance(v, str), str)

    def integers(self, key: str, *, minimum: int = 0) -> tuple[int, ...] | None:
        """A list of integers of at least `minimum`, or None if absent."""

        def accepts(value: Json) -> bool:
            return type(value) is int and minimum <= value <= MAX_COUNT

        return self._list(key, f"a list of integers of at least {minimum}", accepts, int)

    def ids(self, key: str) -> frozenset[int]:
        """Token ids given as an integer, a list of integers, or not at all."""
        value = self.values.get(key)
        if isinstance(value, list):
            return frozenset(self.integers(key) or ())
        return frozenset() if value is None else frozenset((self.integer(key, minimum=0),))

    def _list(
        self, key: str, expected: str, accepts: Callable[[Json], bool], of: Callable[..., _T]
    ) -> tuple[_T, ...] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(accepts(item) for item in value):
            self.fail(key, expected)
        return tuple(of(item) for item in value)


def _usable(value: Json) -> bool:
    """Whether a number is positive and finite as a float64 (integers may be too large for one)."""
    try:
        return isinstance(value, int | float) and 0 < float(value) < math.inf
    except OverflowError:
        return False
