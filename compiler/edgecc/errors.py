"""The exception tree and the diagnostics every error carries.

```
EdgeccError                what went wrong, as one or more Diagnostics      exit code
├── UsageError             a flag or argument that cannot be used           2
├── InputError             a checkpoint, config, pair or IR text is bad     3
│   ├── BundleError        a bundle directory is damaged or not ours        3
│   └── RequestError       a prompt or generation setting is out of range   2
├── VerifyError            an IR module breaks a rule of the verifier       3
├── UnsupportedError       understood, but edgecc cannot do it (yet)        4
│   └── LegalizeError      the device has no way to run an op               4
├── MismatchError          numbers differ from the reference                5
├── ResourceError          memory, disk or permissions                      6
├── HubError               network or model hub                             7
└── InternalError          a bug of ours: pass, lowering, invariant         1
    ├── PassError          a pass broke the module
    └── BackendError       a backend produced something unusable
```

This module imports nothing but the standard library: the runtime, the IR and every backend use it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar


class Severity(StrEnum):
    """How bad a finding is: an error stops, a warning changes numbers or speed, a note informs."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding, written for the user who has to act on it.

    Attributes:
        id: Stable identifier `area/what-is-wrong`, for example `bind/vocab-mismatch`.
        message: What was found and what was expected.
        where: File, tensor, config key or graph node the finding is about.
        notes: Further facts, one line each.
        help: The one thing to do next.
        severity: Error, warning or note.
    """

    id: str
    message: str
    where: str = ""
    notes: tuple[str, ...] = ()
    help: str = ""
    severity: Severity = Severity.ERROR

    def render(self) -> str:
        """The finding as text, in the layout compilers use (several lines, no colour)."""
        lines = [f"{self.severity.value}[{self.id}]: {self.message}"]
        if self.where:
            lines.append(f"  --> {self.where}")
        lines += [f"  note: {note}" for note in self.notes]
        if self.help:
            lines.append(f"  help: {self.help}")
        return "\n".join(lines)

    def with_note(self, *notes: str) -> Diagnostic:
        """The same finding with more notes at its end."""
        return replace(self, notes=(*self.notes, *notes))


class EdgeccError(Exception):
    """Base of every error edgecc raises on purpose.

    Build it from Diagnostics, or from the fields of a single one:
    `InputError("bind/no-head", "the draft has no lm_head", where="draft/", help="pass --draft")`.
    """

    exit_code: ClassVar[int] = 1

    def __init__(
        self,
        first: str | Diagnostic,
        message: str | Diagnostic = "",
        *more: Diagnostic,
        where: str = "",
        notes: Iterable[str] = (),
        help: str = "",
    ) -> None:
        diagnostics: tuple[Diagnostic, ...]
        if isinstance(first, Diagnostic):
            rest = (message,) if isinstance(message, Diagnostic) else ()
            diagnostics = (first, *rest, *more)
        else:
            diagnostics = (Diagnostic(first, str(message), where, tuple(notes), help),)
        self.diagnostics = diagnostics
        super().__init__("\n".join(d.render() for d in diagnostics))

    def __reduce__(self) -> tuple[type[EdgeccError], tuple[Diagnostic, ...]]:
        """Pickling keeps the diagnostics: an error may come from another process."""
        return type(self), self.diagnostics

    @property
    def id(self) -> str:
        """The id of the first diagnostic: the stable name of this error."""
        return self.diagnostics[0].id


class UsageError(EdgeccError):
    """Flags or arguments that cannot be used together or have a bad value."""

    exit_code = 2


class InputError(EdgeccError):
    """A checkpoint, config, draft/target pair or IR text is bad."""

    exit_code = 3


class BundleError(InputError):
    """A bundle directory is damaged, incomplete, of another version, or not ours."""


class RequestError(InputError):
    """A prompt or a generation setting is out of range (too long, unknown token id, empty)."""

    exit_code = 2


class VerifyError(EdgeccError):
    """An IR module breaks a rule of the verifier."""

    exit_code = 3


class UnsupportedError(EdgeccError):
    """Understood, but edgecc does not support it."""

    exit_code = 4


class LegalizeError(UnsupportedError):
    """The device has no way to run an operation, or a weight is still unbound."""


class MismatchError(EdgeccError):
    """Computed numbers differ from the reference by more than the stated tolerance."""

    exit_code = 5


class ResourceError(EdgeccError):
    """Not enough memory or disk, or a path cannot be read or written."""

    exit_code = 6


class HubError(EdgeccError):
    """The network or the model hub refused or failed."""

    exit_code = 7


class InternalError(EdgeccError):
    """A bug in edgecc: please report it with the message."""


class PassError(InternalError):
    """A pass raised, or left the module in a state the verifier rejects."""


class BackendError(InternalError):
    """A backend produced something its own engine does not accept."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A help line that lists the valid choices, nearest first.

    Args:
        name: What the user wrote.
        choices: What would have been valid.

    Returns:
        `did you mean 'x'? valid: x, y, z`, or only the list when nothing is near.
    """
    known = sorted(choices)
    near = difflib.get_close_matches(name, known, n=1)
    listed = "valid: " + ", ".join(known)
    return f"did you mean '{near[0]}'? {listed}" if near else listed
