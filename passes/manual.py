"""Manuals of passes: their docstrings, taken apart, with what their classes declare.

`edgecc passes NAME` prints a manual, the documentation builds a page from it.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgecc.devices import DEVICES
from edgecc.docstrings import sections_of
from edgecc.errors import EdgeccError
from edgecc.passes.base import Pass, print_value
from edgecc.passes.default import default_pipeline
from edgecc.passes.repeat import Repeat

HEADINGS = (
    *("What it does", "Why", "Example", "Options", "Requires and ensures"),
    *("Exactness", "Limits"),
)
"""The sections of every manual, in this order."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option: its spelling in pipelines, its type and its default."""

    name: str
    type: str
    default: str


@dataclass(frozen=True, slots=True)
class Manual:
    """What there is to know about a pass.

    Attributes:
        name: Its name in pipelines.
        summary: One sentence.
        sections: Text by heading, in the order of the docstring.
        options: What can be set.
        requires: Properties that must hold before it runs.
        ensures: Properties that hold afterwards.
        tolerance: Relative error it may add to values with default options; 0 when it keeps them
            bit for bit.
        devices: Names of the devices whose default pipeline has it.
    """

    name: str
    summary: str
    sections: Mapping[str, str]
    options: tuple[Option, ...]
    requires: tuple[str, ...]
    ensures: tuple[str, ...]
    tolerance: float
    devices: tuple[str, ...]

    @property
    def values(self) -> str:
        """What happens to the values of outputs."""
        return "exact" if self.tolerance == 0 else f"relative error up to {self.tolerance:g}"

    def __str__(self) -> str:
        """The manual as text for a terminal."""
        lines = [self.name, "", self.summary]
        for heading, text in self.sections.items():
            lines += ["", heading, *(f"    {line}".rstrip() for line in text.splitlines())]
        lines.append("")
        lines += [f"option {o.name}: {o.type}, default {o.default}" for o in self.options]
        lines.append(f"requires: {', '.join(self.requires) or 'nothing'}")
        lines.append(f"ensures: {', '.join(self.ensures) or 'nothing'}")
        lines.append(f"values: {self.values}")
        lines.append(f"default pipelines: {', '.join(self.devices) or 'none'}")
        return "\n".join(lines)


def manual_of(cls: type[Pass[Any]]) -> Manual:
    """The manual of a pass.

    A docstring is one sentence, then sections: a heading on a line of its own and the text below
    it, indented. Text in no section is not part of the manual.
    """
    summary, sections = sections_of(inspect.cleandoc(cls.__doc__ or ""))
    options = tuple(
        Option(f.name.replace("_", "-"), _type_name(f.type), _default(f))
        for f in dataclasses.fields(cls.options_type)
    )
    devices = tuple(
        device.name
        for device in DEVICES.values()
        if cls.name in set(_names(default_pipeline(device)))
    )
    return Manual(
        cls.name, summary, sections, options, cls.requires, cls.ensures, _tolerance(cls), devices
    )


def _tolerance(cls: type[Pass[Any]]) -> float:
    # A tolerance can follow from the options: then only an instance has it.
    try:
        return cls().tolerance
    except (TypeError, EdgeccError):  # options without defaults, or defaults that are refused
        return cls.tolerance


def _type_name(type_: Any) -> str:
    return type_ if isinstance(type_, str) else getattr(type_, "__name__", str(type_))


def _default(field: dataclasses.Field[Any]) -> str:
    return "none" if field.default is dataclasses.MISSING else print_value(field.default)


def _names(passes: Sequence[Pass[Any]]) -> Iterator[str]:
    for item in passes:
        yield item.name
        if isinstance(item, Repeat):
            yield from _names(item.passes)
