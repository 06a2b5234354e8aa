"""The example packages work as a user would have them installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "drop-identity-slice"
NAME = "drop-identity-slice"

IR = """\
edgecc.module v1 "m"

graph @main(
  %x: f32[4, 8] activation
) {
  %all = slice(%x) {axis = 1, start = 0, stop = 8} : f32[4, 8]
  %half = slice(%all) {axis = 1, start = 0, stop = 4} : f32[4, 4]
  return
    y = %half activation
}
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the example's modules and metadata, as an installer leaves them."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
    site = tmp_path / "site"
    site.mkdir()
    for module in project["tool"]["setuptools"]["py-modules"]:
        shutil.copy(EXAMPLE / f"{module}.py", site)
    about = project["project"]
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {about['name']}", f"Version: {about['version']}", ""]
    (info / "METADATA").write_text("\n".join(lines), encoding="utf-8")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in about["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups), encoding="utf-8")
    return site


def run(site: Path, *arguments: str, text: str = "") -> str:
    answer = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=site.parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT / "compiler"), str(site)))},
        input=text,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_the_pass_is_listed_with_its_manual(installed):
    assert f"\n{NAME}  " in run(installed, "edgecc", "passes")
    assert "Remove slices that take all of an axis" in run(installed, "edgecc", "passes", NAME)


def test_it_runs_in_a_pipeline(installed):
    text = run(installed, "edgecc", "opt", "-p", f"{NAME},dce", "-", text=IR)
    assert "%half = slice(%x) {axis = 1, start = 0, stop = 4}" in text
    assert "%all" not in text


def test_its_own_tests_pass(installed):
    shutil.copy(EXAMPLE / f"test_{NAME.replace('-', '_')}.py", installed.parent)
    assert "1 passed" in run(installed, "pytest", "-q", "-p", "no:cacheprovider", ".")


def test_it_is_short():
    """A pass with its test is less than a page."""
    lines = [line for path in EXAMPLE.glob("*.py") for line in path.read_text().splitlines()]
    assert len(lines) < 40
