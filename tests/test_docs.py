"""The documentation names what there is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import click
import pytest

from edgecc.cli.main import COMMANDS

DOCS = Path(__file__).parents[1] / "docs"


def parameters(name: str) -> list[click.Parameter]:
    """The parameters of a command, and of those below it."""
    command = importlib.import_module(COMMANDS[name]).command
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return [p for c in (command, *below) for p in c.params]


def options(name: str) -> list[str]:
    """The first long spelling of every visible option of a command."""
    return [
        next(o for o in p.opts if o.startswith("--"))
        for p in parameters(name)
        if isinstance(p, click.Option) and not p.hidden
    ]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_and_option_is_in_the_reference(name):
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    assert re.search(rf"^edgecc {name}\s", text, re.MULTILINE)
    command = importlib.import_module(COMMANDS[name]).command
    if isinstance(command, click.Group):
        assert [c for c in command.commands if f"`{name} {c}`" not in text] == []
    short = {"--output": "-o", "--num-speculative-tokens": "-k", "--context": "-U"}
    short |= {"--pass-pipeline": "-p", "--verbose": "-v", "--quiet": "-q"}
    short |= {"--verify-each": "--no-verify-each"}
    missing = [o for o in options(name) if not re.search(f"`(?:{o}|{short.get(o, o)})[ `]", text)]
    assert missing == []


def test_no_option_is_documented_that_does_not_exist():
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    known = {o for name in COMMANDS for o in _all_spellings(name)} | {"--version", "--help"}
    named = set(re.findall(r"`(--[a-z-]+)", text))
    assert named - known == set()


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_choice_is_taken_as_it_is_documented(name):
    """The words on the page are those that the command line takes, and all of them."""
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    choices = [p for p in parameters(name) if isinstance(p.type, click.Choice)]
    assert choices
    for option in choices:
        for choice in option.type.choices:
            assert option.type.convert(str(choice), option, None) == choice
            assert f"`{choice}`" in text, (option.opts[0], choice)


def test_every_page_is_in_the_index():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    pages = {p.name for p in DOCS.glob("*.md")} - {"index.md"}
    assert {p for p in pages if f"({p})" not in index} == set()


def _all_spellings(name: str) -> list[str]:
    return [
        spelling
        for p in parameters(name)
        if isinstance(p, click.Option)
        for spelling in (*p.opts, *p.secondary_opts)
    ]


def test_every_decision_is_listed():
    index = (DOCS / "adr" / "index.md").read_text(encoding="utf-8")
    nav = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    pages = sorted(p.name for p in (DOCS / "adr").glob("0*.md"))
    assert pages
    for page in pages:
        assert f"({page})" in index
        assert f"adr/{page}" in nav
