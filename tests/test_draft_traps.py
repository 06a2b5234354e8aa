"""Each row of tests/data/draft_traps.toml has its tests.

None of them can be renamed, emptied or left out unnoticed.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.broken_cases import CASES

TESTS = Path(__file__).parent
ROWS: list[dict[str, Any]] = tomllib.loads(
    (TESTS / "data" / "draft_traps.toml").read_text("utf-8")
)["row"]
COUNTS = {"9": 36, "11": 14, "12.symptom": 9, "12.check": 10}
"""Rows of each table."""


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    """Tests of a file, those in classes as well."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node


@cache
def functions_of(file: str) -> Mapping[str, ast.FunctionDef]:
    return {test.name: test for test in functions(TESTS / file)}


def named(name: str) -> list[ast.FunctionDef]:
    """What `file::function` names, or all tests of a file."""
    file, _, function = name.partition("::")
    found = functions_of(file)
    return [found[function]] if function else list(found.values())


def says_something(test: ast.FunctionDef) -> bool:
    """Whether it may fail: it asserts, or calls something that expects or asserts."""
    body = [node for statement in test.body for node in ast.walk(statement)]
    return any(isinstance(node, ast.Assert | ast.Call) for node in body)


def has_mark(test: ast.FunctionDef, *marks: str) -> bool:
    """Whether a decorator marks all its cases: a mark of a single parameter does not count."""
    pattern = rf"pytest\.mark\.({'|'.join(marks)})\b"
    return any(re.match(pattern, ast.unparse(d)) for d in test.decorator_list)


def check_name(name: str) -> None:
    """A test that exists, runs and can fail, or a finding that a broken pair gives."""
    if ".py" not in name:
        assert name in {case.id for case in CASES}, f"no broken pair gives {name}"
        return
    for test in named(name):
        assert says_something(test), f"{name} says nothing"
        assert not has_mark(test, "skip", "skipif", "xfail"), f"{name} may be left out"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['id']}: {row['about']}")
def test_every_row_has_its_tests(row: dict[str, Any]) -> None:
    """And one of them runs by default."""
    for name in row["tests"]:
        check_name(name)
    always = [n for n in row["tests"] if ".py" not in n or not has_mark(named(n)[0], "slow")]
    assert always


def test_no_row_is_missing() -> None:
    assert [row["id"] for row in ROWS] == [
        f"{table}.{number}" for table, count in COUNTS.items() for number in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    "name", ["no/finding", "test_draft_traps.py::test_that_is_not_there", "test_not_there.py"]
)
def test_a_name_of_nothing_is_noticed(name: str) -> None:
    with pytest.raises((AssertionError, KeyError, FileNotFoundError)):
        check_name(name)


@pytest.mark.parametrize(
    ("text", "speaks", "left_out"),
    [
        ("def test_a():\n    '''Text.'''\n    x = 1", False, False),
        ("def test_a():\n    assert x", True, False),
        ("def test_a():\n    check(x)", True, False),
        ("@pytest.mark.skipif(True, reason='x')\ndef test_a():\n    assert x", True, True),
        (
            "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.skip)])\n"
            "def test_a(x):\n    assert x",
            True,
            False,
        ),
    ],
)
def test_tests_that_say_nothing_are_noticed(text: str, speaks: bool, left_out: bool) -> None:
    (test,) = ast.parse(text).body
    assert isinstance(test, ast.FunctionDef)
    assert says_something(test) is speaks
    assert has_mark(test, "skip", "skipif", "xfail") is left_out
