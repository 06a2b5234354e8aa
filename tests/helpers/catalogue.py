"""What a registered pass must come with, and the function that lists what is missing."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from edgecc.errors import EdgeccError
from edgecc.passes.base import Pass
from edgecc.passes.manual import HEADINGS, manual_of
from edgecc.testing.golden import Case, Kind, read_golden

ROOT = Path(__file__).parents[2]

NEVER_CHANGES = {"legalize"}
"""Passes that only look."""

OTHER_LAWS = {
    "bind-shared-weights": "there are no values before: compared with drafts that ship the tensors",
    "choose-tokens": "an output comes: the others are compared, and it with NumPy",
    "drop-outputs": "outputs go: what stays is compared",
}
"""Passes whose property tests cannot be `check_pass`, and what they check instead."""


def load_hook(name: str = "pass_pages") -> ModuleType:
    """A hook that makes pages of the documentation: of passes, unless told otherwise."""
    path = ROOT / "docs" / "hooks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


def missing(cls: type[Pass[Any]], *, golden: Path, tests: Path, table: str) -> list[str]:
    """What a pass lacks.

    Args:
        cls: The pass.
        golden: Folder of the golden files.
        tests: Folder of the tests of passes.
        table: The table of passes in the documentation.
    """
    found = _manual(cls) + _golden(cls.name, golden) + _property_test(cls, tests)
    if f"| [{cls.name}](passes/{cls.name}.md) |" not in table:
        found.append("docs: no row in the table of passes")
    return found


def _manual(cls: type[Pass[Any]]) -> list[str]:
    manual = manual_of(cls)
    found = [] if manual.summary.endswith(".") else ["manual: the summary is not a sentence"]
    found += [f"manual: no section {h!r}" for h in HEADINGS if not manual.sections.get(h)]
    found += [f"manual: unknown section {h!r}" for h in manual.sections if h not in HEADINGS]
    if not found and tuple(manual.sections) != HEADINGS:
        found.append("manual: the sections are in another order")
    options = manual.sections.get("Options", "")
    return found + [
        f"manual: option {o.name} is not explained"
        for o in manual.options
        if f"`{o.name}`" not in options
    ]


def _golden(name: str, folder: Path) -> list[str]:
    try:
        cases = read_golden(folder / f"{name}.eir").cases
    except EdgeccError as error:
        return [f"golden: {error.diagnostics[0].message}"]
    kinds = {c.outcome.kind for c in cases if c.outcome is not None}
    found = []
    if Kind.AFTER not in kinds and name not in NEVER_CHANGES:
        found.append("golden: no case where it applies")
    if not kinds & {Kind.UNCHANGED, Kind.ERROR}:
        found.append("golden: no case where it does not apply")
    if len(cases) < 2:
        found.append("golden: fewer than two cases")
    return found + [f"golden: {c.title!r} does not run it" for c in cases if not _runs(c, name)]


def _runs(case: Case, name: str) -> bool:
    return name in re.findall(r"[\w-]+", case.pipeline)


def _property_test(cls: type[Pass[Any]], folder: Path) -> list[str]:
    path = folder / f"test_{cls.name.replace('-', '_')}.py"
    if not path.is_file():
        return [f"tests: no {path.name}"]
    functions = {
        f.name: f
        for f in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(f, ast.FunctionDef)
    }
    properties = [f for f in functions.values() if f.name.startswith("test_") and _is_given(f)]
    if not properties:
        return [f"tests: no test with @given in {path.name}"]
    wanted = {cls.__name__} if cls.name in OTHER_LAWS else {cls.__name__, "check_pass"}
    if not any(wanted <= _names(f, functions) for f in properties):
        return [f"tests: no test with @given in {path.name} uses {' and '.join(sorted(wanted))}"]
    return []


def _is_given(function: ast.FunctionDef) -> bool:
    calls = [d.func for d in function.decorator_list if isinstance(d, ast.Call)]
    return any(isinstance(c, ast.Name) and c.id == "given" for c in calls)


def _names(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """Names a function uses, and those that functions of the same file it uses use."""
    todo, seen = [function.name], set[str]()
    while todo:
        body = functions.get(todo.pop())
        names = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)} if body else set()
        todo += names - seen
        seen |= names
    return seen
