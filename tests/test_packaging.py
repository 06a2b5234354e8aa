"""The layout that packaging rests on: see docs/adr/0001-layout.md."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import edgecc

ROOT = Path(__file__).parents[1]
LINKED = ("passes", "frontends", "backends")


@pytest.mark.parametrize("name", LINKED)
def test_link_is_relative_and_reaches_the_folder_at_the_top(name: str) -> None:
    link = ROOT / "compiler" / "edgecc" / name

    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../../{name}"
    assert link.resolve() == (ROOT / name).resolve()


def test_the_source_root_holds_one_package() -> None:
    visible = {
        path.name
        for path in (ROOT / "compiler").iterdir()
        if path.suffix != ".egg-info" and path.name != "__pycache__"
    }

    assert visible == {"edgecc"}


def test_every_folder_of_modules_is_a_package() -> None:
    roots = [ROOT / "compiler" / "edgecc", *(ROOT / name for name in LINKED)]
    folders = {path.parent for root in roots for path in root.rglob("*.py")}
    assert folders

    bare = [str(path.relative_to(ROOT)) for path in folders if not (path / "__init__.py").is_file()]

    assert bare == []


def test_no_top_level_module_but_edgecc(tmp_path: Path) -> None:
    names = ("compiler", *LINKED, "edgecc")
    program = f"from importlib.util import find_spec; print([n for n in {names} if find_spec(n)])"

    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "compiler")},
        capture_output=True,
        text=True,
        check=True,
    )

    assert answer.stdout.strip() == "['edgecc']"


def test_version_agrees_with_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert edgecc.__version__ == project["version"]


def test_core_dependencies_are_light() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    heavy = ("torch", "transformers", "tensorrt")
    assert [name for name in project["dependencies"] if name.startswith(heavy)] == []


def test_type_information_is_shipped() -> None:
    assert (ROOT / "compiler" / "edgecc" / "py.typed").is_file()
