"""Names of models on the hub."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_ID = re.compile(rf"(?P<repository>{_PART}/{_PART})(?:@(?P<revision>[\w./+-]+))?", re.ASCII)
MAX_LENGTH = 96
"""Longest `org/name` that the hub has."""


@dataclass(frozen=True, slots=True)
class HubId:
    """A model on the hub.

    Attributes:
        repository: `org/name`.
        revision: Branch, tag or commit that was asked for; None is the default branch.
    """

    repository: str
    revision: str | None = None

    @property
    def download(self) -> str:
        """The command that puts it into the hub's cache."""
        revision = "" if self.revision is None else f" --revision {self.revision}"
        return f"hf download {self.repository}{revision}"

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"


def parse_id(text: str) -> HubId | None:
    """Read `org/name` or `org/name@revision`; None if a text is no such name.

    A path of two parts looks the same: what exists as a path is one.
    """
    found = _ID.fullmatch(text)
    if found is None:
        return None
    repository = found["repository"]
    revision = found["revision"] or ""
    no_reference = ".." in revision or "//" in revision or revision.strip("/") != revision
    impossible = (
        no_reference or "--" in repository or ".." in repository or repository.endswith(".git")
    )
    if impossible or len(repository) > MAX_LENGTH:
        return None
    return HubId(repository, found["revision"])
