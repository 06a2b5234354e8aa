"""Every pass comes with a manual, golden cases, a property test and a page of the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest
from mkdocs.config import load_config
from mkdocs.structure.files import Files

from edgecc.errors import InputError
from edgecc.passes import PASSES, get_pass
from edgecc.passes.base import NoOptions, Pass
from edgecc.passes.manual import HEADINGS, manual_of
from edgecc.testing.golden import read_golden
from helpers.catalogue import NEVER_CHANGES, OTHER_LAWS, ROOT, load_hook, missing

GOLDEN = ROOT / "tests" / "golden"
TESTS = ROOT / "tests" / "passes"

hook = load_hook()
TABLE = hook.table(manual_of(get_pass(name)) for name in sorted(PASSES))


@pytest.mark.parametrize("name", sorted(PASSES))
def test_every_pass_is_complete(name):
    assert missing(get_pass(name), golden=GOLDEN, tests=TESTS, table=TABLE) == []


def test_every_golden_file_belongs_to_a_pass():
    assert {path.stem for path in GOLDEN.iterdir()} == set(PASSES)
    assert {path.suffix for path in GOLDEN.iterdir()} == {".eir"}


def test_exceptions_are_passes():
    assert set(PASSES) > NEVER_CHANGES | set(OTHER_LAWS)


# --- what is missing is reported ------------------------------------------------------------------


class Undocumented(Pass[NoOptions]):
    name = "undocumented"

    def run(self, module, ctx):
        return False


class Fuse(Pass[NoOptions]):
    """Fuse things.

    What it does
        Text.

    Why
        Text.

    Example:
        Text.

    Options
        None.

    Requires and ensures
        Nothing.

    Exactness
        Exact.

    Limits
        None.
    """

    name = "fuse"

    def run(self, module, ctx):
        return False


CASE = "// ---- case: {0}\n// Text.\n\ngraph @g(\n) {{\n}}\n\n// ---- {0}\n{1}\n"
APPLIED = CASE.format("after", "\ngraph @h(\n) {\n}\n")
STAYED = CASE.format("unchanged", "")
PROPERTY = """
    from hypothesis import given

    def check(module):
        check_pass(Fuse(), module)

    @given(modules())
    def test_any(module):
        check(module)
"""


def lacks(
    tmp_path: Path,
    cls: type[Pass] = Fuse,
    *,
    golden: str | None = APPLIED + "\n" + STAYED,
    tests: str | None = PROPERTY,
    table: str | None = None,
) -> list[str]:
    name = cls.name.replace("-", "_")
    if golden is not None:
        (tmp_path / f"{cls.name}.eir").write_text(golden, encoding="utf-8")
    if tests is not None:
        (tmp_path / f"test_{name}.py").write_text(dedent(tests), encoding="utf-8")
    table = hook.table([manual_of(cls)]) if table is None else table
    return missing(cls, golden=tmp_path, tests=tmp_path, table=table)


def test_a_complete_pass_lacks_nothing(tmp_path):
    assert lacks(tmp_path) == []


def test_a_pass_with_nothing(tmp_path):
    found = lacks(tmp_path, Undocumented, golden=None, tests=None, table=TABLE)
    assert found[0] == "manual: the summary is not a sentence"
    assert found[1 : 1 + len(HEADINGS)] == [f"manual: no section {h!r}" for h in HEADINGS]
    golden, tests, docs = found[1 + len(HEADINGS) :]
    assert golden.startswith("golden: cannot read golden cases")
    assert tests == "tests: no test_undocumented.py"
    assert docs == "docs: no row in the table of passes"


def described(text: str) -> type[Pass]:
    """A copy of `Fuse` with another docstring."""
    return type("Fuse", (Fuse,), {"__doc__": text})


@dataclass(frozen=True)
class Options:
    max_width: int = 8


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        (
            described(Fuse.__doc__.replace("Fuse things.", "Fuse things")),
            ["manual: the summary is not a sentence"],
        ),
        (
            described(Fuse.__doc__.replace("Limits\n        None.", "Limits")),
            ["manual: no section 'Limits'"],
        ),
        (
            described(Fuse.__doc__.replace("Why", "Because")),
            ["manual: no section 'Why'", "manual: unknown section 'Because'"],
        ),
        (
            described(
                Fuse.__doc__.replace("Why", "-").replace("Limits", "Why").replace("-", "Limits")
            ),
            ["manual: the sections are in another order"],
        ),
        (
            type("Fuse", (Fuse,), {"__doc__": Fuse.__doc__, "options_type": Options}),
            ["manual: option max-width is not explained"],
        ),
    ],
)
def test_manuals(tmp_path, cls, found):
    assert lacks(tmp_path, cls) == found


@pytest.mark.parametrize(
    ("golden", "found"),
    [
        ("// text", ["golden: no line `// ---- case: TITLE`"]),
        (APPLIED, ["golden: no case where it does not apply", "golden: fewer than two cases"]),
        (STAYED, ["golden: no case where it applies", "golden: fewer than two cases"]),
        (
            APPLIED + "\n" + STAYED.replace("// Text.", "// Text.\n// pipeline: fuse-qkv,dce"),
            ["golden: 'unchanged' does not run it"],
        ),
    ],
)
def test_golden_files(tmp_path, golden, found):
    assert lacks(tmp_path, golden=golden) == found


@pytest.mark.parametrize(
    ("tests", "found"),
    [
        (
            PROPERTY.replace("@given", "@pytest.mark.parametrize"),
            "no test with @given in test_fuse.py",
        ),
        (PROPERTY.replace("test_any", "any_"), "no test with @given in test_fuse.py"),
        (
            PROPERTY.replace("check_pass(", "print("),
            "no test with @given in test_fuse.py uses Fuse and check_pass",
        ),
        (
            PROPERTY.replace("Fuse()", "Dce()"),
            "no test with @given in test_fuse.py uses Fuse and check_pass",
        ),
        (
            PROPERTY.replace("        check(module)", "        pass"),
            "no test with @given in test_fuse.py uses Fuse and check_pass",
        ),
    ],
)
def test_property_tests(tmp_path, tests, found):
    assert lacks(tmp_path, tests=tests) == [f"tests: {found}"]


# --- pages of the documentation -------------------------------------------------------------------


@pytest.fixture(scope="module")
def pages():
    """The pages that building the documentation adds, and their place in the navigation."""
    config = load_config(str(ROOT / "mkdocs.yml"), plugins=[])
    config = config.plugins.on_config(config)
    files = config.plugins.on_files(Files([]), config=config)
    nav = next(entry["Passes"] for entry in config.nav if "Passes" in entry)
    return {file.src_uri: file.content_string for file in files}, nav


@pytest.mark.parametrize("name", sorted(PASSES))
def test_every_pass_has_a_page_with_its_manual_and_its_cases(pages, name):
    texts, nav = pages
    text = texts[f"passes/{name}.md"]
    manual, golden = manual_of(get_pass(name)), read_golden(GOLDEN / f"{name}.eir")
    assert text.startswith(f"# {name}\n\n{manual.summary}\n")
    assert {name: f"passes/{name}.md"} in nav
    lines = text.splitlines()
    assert {f"## {heading}" for heading in HEADINGS} < set(lines)
    for option in manual.options:
        assert f"| `{option.name}` | `{option.type}` | `{option.default}` |" in lines
    for case in golden.cases:
        for part in (case.title[1:], case.description, case.before, case.outcome.ir):
            assert part in text
        for note in case.outcome.notes:
            assert note in lines
        assert case.pipeline == name or f"Pipeline `{case.pipeline}`" in text
    assert text.count("```eir\n") + text.count("```text\n") == text.count("```") / 2


def test_blocks_of_code_in_manuals(tmp_path, monkeypatch):
    """They hold IR unless they say what else, and are paragraphs of their own."""
    example = (
        "```\n        %x\n        ```\n        becomes\n        ```text\n        y\n        ```"
    )
    cls = described(Fuse.__doc__.replace("Example:\n        Text.", f"Example:\n        {example}"))
    lacks(tmp_path, cls)
    monkeypatch.setattr(hook, "GOLDEN", tmp_path)
    page = hook.pass_page(manual_of(cls))
    assert "\n\n```eir\n%x\n```\n\nbecomes\n\n```text\ny\n```\n\n" in page


def test_a_pass_without_golden_cases_has_no_page():
    with pytest.raises(InputError, match="cannot read golden cases"):
        hook.pass_page(manual_of(Undocumented))


def test_the_index_page_gets_the_table():
    """And other pages none."""

    @dataclass
    class Source:
        src_uri: str

    @dataclass
    class Page:
        file: Source

    index = (ROOT / "docs" / "passes.md").read_text(encoding="utf-8")
    assert index.count(hook.TABLE) == 1
    assert TABLE in hook.on_page_markdown(index, Page(Source("passes.md")))
    assert hook.on_page_markdown(index, Page(Source("ir.md"))) == index
    assert len(TABLE.splitlines()) == 2 + len(PASSES)
