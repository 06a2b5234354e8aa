"""What a rule is: its manual, the findings it explains, and what it looks at."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from edgecc.contract.pair import Pair
from edgecc.docstrings import sections_of
from edgecc.errors import Diagnostic, InputError, did_you_mean

HEADINGS = ("What it checks", "Why it matters", "What to do")
"""The sections of the manual of every rule, in this order."""


class Rule:
    """A part of the contract.

    Its docstring is its manual: one sentence, then the sections of `HEADINGS`. Most rules are
    checked where a checkpoint is read, because lifting cannot do without them; those have no code
    here. `check` is for the rest.

    Class attributes:
        name: In pages and reports.
        ids: Ids of the findings it explains, with what each means in a few words.
    """

    name: ClassVar[str]
    ids: ClassVar[Mapping[str, str]]

    def check(self, pair: Pair) -> Iterable[Diagnostic]:
        """Warnings and notes that lifting does not give.

        Args:
            pair: What is examined.

        Raises:
            InputError: Something is bad.
            UnsupportedError: Something is not supported.
        """
        return ()


@dataclass(frozen=True, slots=True)
class Manual:
    """The manual of a rule.

    Attributes:
        name: Its name.
        summary: One sentence.
        sections: Text by heading, in the order of the docstring.
        ids: Ids of its findings, with their meaning.
    """

    name: str
    summary: str
    sections: Mapping[str, str]
    ids: Mapping[str, str]

    @property
    def why(self) -> str:
        """Why the rule matters, in one line."""
        return " ".join(self.sections["Why it matters"].split())

    @property
    def action(self) -> str:
        """What to do, in one line."""
        return " ".join(self.sections["What to do"].split())

    def __str__(self) -> str:
        """The manual as text for a terminal."""
        lines = [self.name, "", self.summary]
        for heading, text in self.sections.items():
            lines += ["", heading, *(f"    {line}".rstrip() for line in text.splitlines())]
        width = max(map(len, self.ids))
        lines += ["", "Findings", *(f"    {i:<{width}}  {text}" for i, text in self.ids.items())]
        return "\n".join(lines)


def manual_of(rule: type[Rule]) -> Manual:
    """The manual of a rule, from its docstring."""
    summary, sections = sections_of(inspect.cleandoc(rule.__doc__ or ""))
    return Manual(rule.name, summary, sections, rule.ids)


def find_manual(name: str, rules: Iterable[type[Rule]]) -> Manual:
    """The manual of the rule of that name, or of the one that explains a finding.

    Raises:
        InputError: There is no such rule or finding; near names are listed.
    """
    known: set[str] = set()
    for rule in rules:
        if name == rule.name or name in rule.ids:
            return manual_of(rule)
        known |= {rule.name, *rule.ids}
    area, _, rest = name.partition("/")
    if rest and not any(id.startswith(f"{area}/") for id in known):
        help = "findings about checkpoints have manuals; other errors say themselves what to do"
    else:
        near = did_you_mean(name, known).partition("? valid")
        help = f"{near[0]}?" if near[1] else "edgecc check lists the findings of a pair"
    raise InputError("explain/unknown-id", f"no rule and no finding is called {name!r}", help=help)
