"""Golden cases of passes: a module before, and what the pipeline must make of it, as text.

A file `<pass>.eir` holds the cases of one pass, one after the other:

```
// ---- case: gate and up of one input become one product
// One sentence or more: what the case shows.
// pipeline: fuse-gate-up,dce
// device: cpu

symbol t: 1..8
weight @gate : dense<f32> [2, 2] = stored "target" {weight: "model.safetensors#gate"}
graph @main(...) {...}

// ---- after
// fuse-gate-up: applied at @main, %y = swiglu(%g, %u): @gate+up

...
```

`pipeline` is the pass itself unless given, `device` none. Modules have no header line; where nodes
came from is part of the text if the module before has a `loc(...)`. The last section of a case is
its outcome:

* `after`: the remarks of the passes as comments, then the module exactly as it prints;
* `unchanged`: the remarks; the module must print as it did before;
* `error`: the error as a user sees it, as comments.

Nobody writes outcomes by hand: `pytest --update-golden` does, and the difference is reviewed. Tests
and the documentation read the same files through this module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from edgecc.errors import InputError

_DIVIDER = re.compile(r"// ---- (\w+)(?:: *(.*))?")
_DIRECTIVE = re.compile(r"([a-z][a-z-]*): *(.*)")
_DIRECTIVES = ("pipeline", "device")


class Kind(StrEnum):
    """What becomes of a module: it changes, it stays, or it is refused."""

    AFTER = "after"
    UNCHANGED = "unchanged"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The last section of a case.

    Attributes:
        kind: Which section it is.
        notes: Lines of remarks, or of the error.
        ir: The module as it prints, without its first line; only for `after`.
    """

    kind: Kind
    notes: tuple[str, ...] = ()
    ir: str = ""

    def __str__(self) -> str:
        notes = "".join(f"// {note}".rstrip() + "\n" for note in self.notes)
        return f"// ---- {self.kind.value}\n{notes}" + (f"\n{self.ir}\n" if self.ir else "")


@dataclass(frozen=True, slots=True)
class Case:
    """One case.

    Attributes:
        title: Unique within its file; the name of the test.
        description: What it shows.
        pipeline: Passes to run.
        device: Name of the device being compiled for, or empty.
        before: Text of the module, without its first line.
        line: Where that text begins in the file, from 1.
        head: Everything above the outcome, as written.
        outcome: What is expected; None for a case that has not been run yet.
    """

    title: str
    description: str
    pipeline: str
    device: str
    before: str
    line: int
    head: str
    outcome: Outcome | None

    def __str__(self) -> str:
        return f"{self.head}\n" + (f"\n{self.outcome}" if self.outcome else "")


@dataclass(frozen=True, slots=True)
class GoldenFile:
    """The cases of one file, and the comments above the first."""

    preamble: str
    cases: tuple[Case, ...]

    def __str__(self) -> str:
        parts = [f"{self.preamble}\n"] if self.preamble else []
        return "\n".join([*parts, *map(str, self.cases)])

    def with_outcome(self, title: str, outcome: Outcome) -> GoldenFile:
        """The same file with another outcome of one case."""
        cases = tuple(replace(c, outcome=outcome) if c.title == title else c for c in self.cases)
        return replace(self, cases=cases)


def read_golden(path: Path) -> GoldenFile:
    """The cases of `<pass>.eir`.

    Raises:
        InputError: The file is missing or not text, or see `parse_golden`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            "golden/unreadable", f"cannot read golden cases: {error}", where=str(path)
        ) from error
    return parse_golden(text, path.stem, file=str(path))


def parse_golden(text: str, pass_name: str, *, file: str = "<text>") -> GoldenFile:
    """Split the text of a file into cases.

    Args:
        text: The file.
        pass_name: Pipeline of cases that name none.
        file: Name for messages.

    Raises:
        InputError: A section is unknown, missing or in the wrong place, or a title is used twice.
    """
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.startswith("// ---- case")]
    preamble = _joined(lines[: starts[0] if starts else len(lines)])
    if not starts:
        raise _error("golden/no-case", "no line `// ---- case: TITLE`", file, 1)
    for number, line in enumerate(preamble.splitlines(), 1):
        if line and (not line.startswith("//") or _DIVIDER.match(line)):
            raise _error("golden/stray-text", "expected `// ---- case: TITLE`", file, number)
    cases: list[Case] = []
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        case = _case(lines[start:stop], pass_name, file, start + 1)
        if case.title in {c.title for c in cases}:
            raise _error("golden/duplicate-title", f"two cases {case.title!r}", file, start + 1)
        cases.append(case)
    return GoldenFile(preamble, tuple(cases))


def _case(lines: Sequence[str], pass_name: str, file: str, first: int) -> Case:
    match = _DIVIDER.fullmatch(lines[0])
    title = (match[2] or "").strip() if match else ""
    if not title or "::" in title:
        raise _error("golden/title", "expected `// ---- case: TITLE` without `::`", file, first)
    dividers = [(i, m) for i, line in enumerate(lines) if i and (m := _DIVIDER.match(line))]
    for i, found in dividers[1:]:
        raise _error("golden/section", f"a second outcome: {found[0]}", file, first + i)
    end, divider = dividers[0] if dividers else (len(lines), None)
    body = next((i for i in range(1, end) if not lines[i].startswith("//")), end)
    facts = {"pipeline": pass_name, "device": ""}
    description = list(_description(lines[1:body], facts, file, first + 1))
    while body < end and not lines[body].strip():
        body += 1
    if body == end:
        raise _error("golden/no-module", f"case {title!r} has no module", file, first)
    if not description:
        raise _error("golden/description", f"case {title!r} does not say its point", file, first)
    outcome = None
    if divider is not None:
        outcome = _outcome(divider, lines[end + 1 :], file, first + end)
    before, head = _joined(lines[body:end]), _joined(lines[:end])
    return Case(
        title, " ".join(description), **facts, before=before, line=first + body, head=head,
        outcome=outcome,
    )  # fmt: skip


def _description(
    lines: Sequence[str], facts: dict[str, str], file: str, first: int
) -> Iterator[str]:
    """Yields the lines of prose; the others are directives and go to `facts`."""
    for number, line in enumerate(lines, first):
        text = line.removeprefix("//").strip()
        directive = _DIRECTIVE.fullmatch(text)
        if directive is None:
            yield text
        elif directive[1] in _DIRECTIVES:
            facts[directive[1]] = directive[2]
        else:
            raise _error(
                "golden/directive",
                f"unknown directive {directive[1]!r}, valid: {', '.join(_DIRECTIVES)}",
                file,
                number,
            )


def _outcome(divider: re.Match[str], lines: Sequence[str], file: str, first: int) -> Outcome:
    if divider[0] not in {f"// ---- {kind.value}" for kind in Kind}:
        valid = ", ".join(Kind)
        raise _error("golden/section", f"unknown section {divider[0]}, valid: {valid}", file, first)
    kind = Kind(divider[1])
    body = next((i for i, line in enumerate(lines) if not line.startswith("//")), len(lines))
    notes = tuple(line.removeprefix("//").removeprefix(" ") for line in lines[:body])
    ir = _joined(lines[body:]).strip("\n")
    if bool(ir) is not (kind is Kind.AFTER):
        verb = "has no module" if kind is Kind.AFTER else "must hold comments only"
        raise _error("golden/section", f"section {kind.value} {verb}", file, first)
    return Outcome(kind, notes, ir)


def _joined(lines: Sequence[str]) -> str:
    return "\n".join(lines).rstrip()


def _error(id: str, message: str, file: str, line: int) -> InputError:
    return InputError(id, message, where=f"{file}:{line}", help="the format: edgecc.testing.golden")
