"""MkDocs hook: the table of rules, and one page for each.

A page is the manual in the docstring of the rule, and the ids of its findings. Nothing that is made
here is committed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from edgecc.contract.rule import Manual, manual_of
from edgecc.contract.rules import RULES

INDEX = "check.md"
TABLE = "<!-- table of rules -->"
"""Where the index page wants the table."""

MANUALS = tuple(manual_of(rule) for rule in RULES)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages below the index page in the navigation."""
    for entry in config.nav or ():
        if isinstance(entry, dict) and entry.get("Checking pairs") == INDEX:
            entry["Checking pairs"] = [INDEX, *({m.name: path(m.name)} for m in MANUALS)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for manual in MANUALS:
        files.append(File.generated(config, path(manual.name), content=rule_page(manual)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put the table into the index page."""
    if page.file.src_uri != INDEX:
        return markdown
    return markdown.replace(TABLE, table(MANUALS))


def path(name: str) -> str:
    """The page of a rule, relative to the folder of the documentation."""
    return f"rules/{name}.md"


def table(manuals: Iterable[Manual]) -> str:
    """One row for each rule."""
    lines = ["| rule | what holds | findings |", "| --- | --- | --- |"]
    for m in manuals:
        ids = ", ".join(f"`{id}`" for id in m.ids)
        lines.append(f"| [{m.name}]({path(m.name)}) | {m.summary} | {ids} |")
    return "\n".join(lines)


def rule_page(manual: Manual) -> str:
    """The page of one rule."""
    parts = [f"# {manual.name}", manual.summary]
    for heading, text in manual.sections.items():
        parts += [f"## {heading}", text]
    rows = [f"| `{id}` | {meaning} |" for id, meaning in manual.ids.items()]
    parts += ["## Findings", "\n".join(["| id | meaning |", "| --- | --- |", *rows])]
    return "\n\n".join(parts) + "\n"
