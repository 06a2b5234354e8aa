"""MkDocs hook: the table of passes, and one page for each.

A page is made of the manual in the docstring of the pass and of the cases in its golden file, so it
shows what the tests check. Nothing that is made here is committed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from edgecc.passes import PASSES, get_pass
from edgecc.passes.manual import Manual, manual_of
from edgecc.testing.golden import Case, Kind, Outcome, read_golden

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
INDEX = "passes.md"
TABLE = "<!-- table of passes -->"
"""Where the index page wants the table."""

_BLOCK = re.compile(r"^```(\w*)\n(.*?)\n```$", re.MULTILINE | re.DOTALL)

_VERDICT = {
    Kind.AFTER: "becomes",
    Kind.UNCHANGED: "stays as it is.",
    Kind.ERROR: "is refused:",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages below the index page in the navigation."""
    for entry in config.nav or ():
        if isinstance(entry, dict) and entry.get("Passes") == INDEX:
            entry["Passes"] = [INDEX, *({name: path(name)} for name in sorted(PASSES))]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for name in PASSES:
        files.append(
            File.generated(config, path(name), content=pass_page(manual_of(get_pass(name))))
        )
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put the table into the index page."""
    if page.file.src_uri != INDEX:
        return markdown
    return markdown.replace(TABLE, table(manual_of(get_pass(name)) for name in sorted(PASSES)))


def path(name: str) -> str:
    """The page of a pass, relative to the folder of the documentation."""
    return f"passes/{name}.md"


def table(manuals: Iterable[Manual]) -> str:
    """One row for each pass."""
    lines = [
        "| pass | what it does | values | requires | ensures | default pipelines |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for m in manuals:
        cells = [f"[{m.name}]({path(m.name)})", m.summary, *_facts(m)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def pass_page(manual: Manual) -> str:
    """The page of one pass."""
    return "\n\n".join([*_manual(manual), *_cases(manual.name)]) + "\n"


def _facts(m: Manual) -> list[str]:
    return [m.values, _codes(m.requires), _codes(m.ensures), ", ".join(m.devices) or "none"]


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "nothing"


def _manual(m: Manual) -> Iterator[str]:
    yield f"# {m.name}"
    yield m.summary
    yield (
        "| values | requires | ensures | default pipelines |\n| --- | --- | --- | --- |\n"
        f"| {' | '.join(_facts(m))} |"
    )
    for heading, text in m.sections.items():
        yield f"## {heading}"
        yield _highlighted(text)
        if heading == "Options" and m.options:
            rows = [f"| `{o.name}` | `{o.type}` | `{o.default}` |" for o in m.options]
            yield "\n".join(["| option | type | default |", "| --- | --- | --- |", *rows])


def _highlighted(text: str) -> str:
    """Blocks of code as paragraphs of their own; those that name no language hold IR."""

    def block(match: re.Match[str]) -> str:
        return f"\n{_fence(match[1] or 'eir', match[2])}\n"

    return _BLOCK.sub(block, text).strip("\n")


def _cases(name: str) -> Iterator[str]:
    yield "## Cases"
    yield "Each is a test: the pass gives exactly this text."
    for case in read_golden(GOLDEN / f"{name}.eir").cases:
        yield f"### {case.title[:1].upper()}{case.title[1:]}"
        yield case.description
        if case.pipeline != name or case.device:
            yield _how(case)
        yield _fence("eir", case.before)
        if case.outcome is not None:
            yield from _outcome(case.outcome)


def _how(case: Case) -> str:
    device = f" for `{case.device}`" if case.device else ""
    return f"Pipeline `{case.pipeline}`{device}."


def _outcome(outcome: Outcome) -> Iterator[str]:
    yield _VERDICT[outcome.kind]
    if outcome.ir:
        yield _fence("eir", outcome.ir)
    if outcome.notes:
        yield _fence("text", "\n".join(outcome.notes))


def _fence(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
