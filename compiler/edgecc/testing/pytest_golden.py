"""A pytest plugin: every case in `golden/<pass>.eir` is a test.

Enable it with `pytest_plugins = ["edgecc.testing.pytest_golden"]` in the top `conftest.py`.
`pytest --update-golden` writes the outcomes that differ back into the files.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgecc.errors import EdgeccError
from edgecc.testing.golden import Case, GoldenFile, read_golden
from edgecc.testing.golden_run import GoldenError, check_laws, run_case


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flag."""
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the outcomes of golden cases that differ",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to write files from several processes."""
    if config.getoption("--update-golden") and config.getoption("dist", "no") != "no":
        raise pytest.UsageError("--update-golden writes files: run it without -n")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect `.eir` files in folders called `golden`."""
    if file_path.suffix == ".eir" and file_path.parent.name == "golden":
        collector: GoldenCollector = GoldenCollector.from_parent(parent, path=file_path)
        return collector
    return None


class GoldenCollector(pytest.File):
    """One file."""

    golden: GoldenFile

    def collect(self) -> Iterator[pytest.Item]:
        """Yield one item for each case."""
        try:
            self.golden = read_golden(self.path)
        except EdgeccError as error:
            raise self.CollectError(str(error)) from error
        for case in self.golden.cases:
            item: GoldenItem = GoldenItem.from_parent(self, name=case.title, case=case)
            yield item


class GoldenItem(pytest.Item):
    """One case."""

    parent: GoldenCollector

    def __init__(self, *, case: Case, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case

    def runtest(self) -> None:
        """Run the case, compare or write its outcome, check the laws.

        Raises:
            GoldenError: It does not hold.
        """
        ran = run_case(self.case, file=str(self.path))
        if ran.outcome != self.case.outcome:
            if not self.config.getoption("--update-golden"):
                raise GoldenError(_difference(self.case, str(ran.outcome)))
            self.parent.golden = self.parent.golden.with_outcome(self.case.title, ran.outcome)
            self.path.write_text(str(self.parent.golden), encoding="utf-8")
        check_laws(ran)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show the message alone where it says everything."""
        if isinstance(excinfo.value, GoldenError | EdgeccError):
            return f"{self.path}:{self.case.line}: {self.case.title}\n\n{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        """Where the case is: file, line from 0, title."""
        return self.path, self.case.line - 1, self.case.title


def _difference(case: Case, found: str) -> str:
    expected = str(case.outcome) if case.outcome else ""
    lines = difflib.unified_diff(
        expected.splitlines(), found.splitlines(), "expected", "found", lineterm="", n=100
    )
    text = "\n".join(lines)
    return f"{text}\n\nIf this is right, run pytest --update-golden and review the difference."
