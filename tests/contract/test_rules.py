"""Every finding has a rule, every rule a manual and a page."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import Files

from edgecc.contract.rule import HEADINGS, find_manual, manual_of
from edgecc.contract.rules import RULES
from edgecc.errors import InputError
from helpers.catalogue import ROOT, load_hook

SOURCES = (
    "frontends",
    "compiler/edgecc/contract",
    "compiler/edgecc/hub",
    "passes/bind_shared_weights.py",
)
_ID = re.compile(
    r"(bind|checkpoint|config|draft|head|hub|quant|rope|target|tokenizer|vision)/[a-z0-9]+(-[a-z0-9]+)*"
)
hook = load_hook("rule_pages")


def ids_in(path: Path) -> set[str]:
    """Ids that a module can give; those that a rule only explains are keys of a dictionary."""
    tree = ast.parse(path.read_text("utf-8"))
    keys = {id(k) for n in ast.walk(tree) if isinstance(n, ast.Dict) for k in n.keys}
    texts = [
        n.value
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in keys
    ]
    return {text for text in texts if _ID.fullmatch(text)}


def test_every_finding_is_explained_by_one_rule() -> None:
    """Add the id of a new finding to a rule in compiler/edgecc/contract/rules."""
    files = [
        file
        for source in SOURCES
        for file in ([ROOT / source] if source.endswith(".py") else (ROOT / source).rglob("*.py"))
    ]
    given = {id: file.name for file in files for id in ids_in(file)}
    assert len(given) > 90
    explained = Counter(id for rule in RULES for id in rule.ids)
    assert {id: name for id, name in given.items() if id not in explained} == {}
    assert [id for id, count in explained.items() if count > 1] == []


def test_no_rule_explains_what_is_never_found() -> None:
    folders = ("frontends", "passes", "backends/runtime", "compiler/edgecc")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    given = {id for file in files for id in ids_in(file)} | {"bind/no-embed-tokens"}  # made up
    areas = {id.partition("/")[0] for rule in RULES for id in rule.ids}
    assert areas - {"chat"} == {id.partition("/")[0] for id in given}
    explained = {id for rule in RULES for id in rule.ids if not id.startswith("chat/")}
    assert explained - given == set()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_manuals(rule) -> None:
    manual = manual_of(rule)
    assert manual.summary.endswith(".")
    assert tuple(manual.sections) == HEADINGS
    assert all(manual.sections.values())
    assert "\n" not in manual.why
    assert all(meaning and not meaning.endswith(".") for meaning in manual.ids.values())
    assert find_manual(rule.name, RULES) == manual
    assert all(find_manual(id, RULES) == manual for id in manual.ids)
    text = str(manual)
    assert all(id in text for id in manual.ids)


def test_names_are_unique() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_an_unknown_id() -> None:
    with pytest.raises(InputError, match="'quant/bad-scal'") as caught:
        find_manual("quant/bad-scal", RULES)
    assert caught.value.diagnostics[0].help == "did you mean 'quant/bad-scale'?"
    with pytest.raises(InputError, match="zzz") as caught:
        find_manual("zzz", RULES)
    assert "edgecc check" in caught.value.diagnostics[0].help


# --- pages of the documentation -------------------------------------------------------------------


def test_every_rule_has_a_page_and_a_row() -> None:
    config = load_config(str(ROOT / "mkdocs.yml"), plugins=[])
    config = config.plugins.on_config(config)
    files = config.plugins.on_files(Files([]), config=config)
    texts = {file.src_uri: file.content_string for file in files}
    nav = next(entry["Checking pairs"] for entry in config.nav if "Checking pairs" in entry)
    table = hook.table(hook.MANUALS)
    for rule in RULES:
        manual, page = manual_of(rule), texts[f"rules/{rule.name}.md"]
        assert page.startswith(f"# {rule.name}\n\n{manual.summary}\n")
        assert {f"## {heading}" for heading in HEADINGS} < set(page.splitlines())
        assert all(f"| `{id}` | {meaning} |" in page for id, meaning in manual.ids.items())
        assert {rule.name: f"rules/{rule.name}.md"} in nav
        assert f"| [{rule.name}](rules/{rule.name}.md) | {manual.summary} |" in table


def test_the_index_page_gets_the_table() -> None:
    class Source:
        def __init__(self, uri: str) -> None:
            self.file = self
            self.src_uri = uri

    text = (ROOT / "docs" / "check.md").read_text("utf-8")
    assert text.count(hook.TABLE) == 1
    assert hook.table(hook.MANUALS) in hook.on_page_markdown(text, Source("check.md"))
    assert hook.on_page_markdown(text, Source("cli.md")) == text
