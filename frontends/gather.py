"""Errors of independent steps, told together: a user mends all of them in one go."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import TracebackType

from edgecc.errors import Diagnostic, EdgeccError, InputError, UnsupportedError

_LISTED = 4
"""Places that are named where one fault is found in many."""


class Gather:
    """Runs steps that do not need each other, and keeps what is wrong with each.

    A step that fails is left at its error; the code behind it goes on. What later code cannot do
    without has to be checked for with `raise_found` before.

    Attributes:
        errors: What the steps raised, in their order.
    """

    def __init__(self) -> None:
        self.errors: list[EdgeccError] = []

    def step(self) -> _Step:
        """A `with` block that keeps an `InputError` or `UnsupportedError` and ends there.

        Other errors (usage, resources, ours) pass: more of the same would follow.
        """
        return _Step(self.errors)

    def raise_found(self) -> None:
        """Raise what was found so far: the one error as it is, several as one.

        Raises:
            InputError: A step found something bad.
            UnsupportedError: Steps found only what is understood and not supported.
        """
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise joined(self.errors) from self.errors[0]


class _Step:
    def __init__(self, errors: list[EdgeccError]) -> None:
        self._errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if isinstance(error, InputError | UnsupportedError):
            self._errors.append(error)
            return True
        return False


def joined(errors: Iterable[EdgeccError]) -> EdgeccError:
    """Several errors as one: bad input before what is not supported, equal faults as one."""
    bad = [d for e in errors if isinstance(e, InputError) for d in e.diagnostics]
    rest = [d for e in errors if not isinstance(e, InputError) for d in e.diagnostics]
    diagnostics = [*merged(bad), *merged(rest)]
    return (InputError if bad else UnsupportedError)(*diagnostics)


def merged(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Diagnostics that say the same of many layers or files, as one with a note."""
    groups: dict[tuple[str, str, str], list[Diagnostic]] = {}
    for diagnostic in diagnostics:
        where = re.sub(r"\d+", "#", diagnostic.where)
        message = re.sub(r"(?<=\.)\d+(?=\.)", "#", diagnostic.message)
        groups.setdefault((diagnostic.id, where, message), []).append(diagnostic)
    return [_one(group) for group in groups.values()]


def _one(group: list[Diagnostic]) -> Diagnostic:
    first = group[0]
    others = list(dict.fromkeys(d.where for d in group if d.where != first.where))
    if not others:
        return first
    shown = ", ".join(others[:_LISTED]) + (", ..." if len(others) > _LISTED else "")
    return first.with_note(f"the same in {len(others)} more: {shown}")
