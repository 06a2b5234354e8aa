"""Docstrings that are manuals: a sentence, then sections."""

from __future__ import annotations

import inspect


def sections_of(text: str) -> tuple[str, dict[str, str]]:
    """The first sentence of a docstring, and its sections by heading.

    A heading is a line of its own, the text below it is indented. Text in no section is left out.
    """
    head, _, body = text.partition("\n\n")
    summary = " ".join(line.strip() for line in head.splitlines())
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in body.splitlines():
        if line and not line[0].isspace():
            lines = found.setdefault(line.rstrip(":"), [])
        else:
            lines.append(line)
    return summary, {name: inspect.cleandoc("\n".join(part)) for name, part in found.items()}
