"""Who may import whom, and what starting up may load.

The contracts live in pyproject.toml. They are run on the real tree, and on a small copy of its
outline with one forbidden import planted, which shows that each of them can fail. Contracts do not
see that importing a module also runs the `__init__` of every package around it; the tests that look
at `sys.modules` in a fresh interpreter do.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

OUTLINE = (
    "edgecc/__init__.py",
    "edgecc/cli.py",
    "edgecc/devices.py",
    "edgecc/driver.py",
    "edgecc/errors.py",
    "edgecc/fp8.py",
    "edgecc/integers.py",
    "edgecc/nvfp4.py",
    "edgecc/roles.py",
    "edgecc/ir/__init__.py",
    "edgecc/ir/interpreter.py",
    "edgecc/ir/recipes.py",
    "edgecc/ir/rope.py",
    "edgecc/passes/__init__.py",
    "edgecc/frontends/__init__.py",
    "edgecc/backends/__init__.py",
    "edgecc/backends/base.py",
    "edgecc/backends/bundle.py",
    "edgecc/backends/onnx/__init__.py",
    "edgecc/backends/onnxruntime/__init__.py",
    "edgecc/backends/runtime/__init__.py",
    *(
        f"edgecc/backends/server/{name}.py"
        for name in (
            "__init__",
            "answers",
            "app",
            "chat_page",
            "engine_thread",
            "errors",
            "http",
            "metrics",
            "middleware",
            "options",
            "protocol",
            "formats",
            "tools",
            "tool_calls",
            "reading",
            "replies",
            "response_models",
            "running",
            "service",
        )
    ),
    "edgecc/backends/tensorrt/__init__.py",
    "edgecc/backends/torch/__init__.py",
)

ALLOWED = (
    ("edgecc/driver.py", "edgecc.passes"),
    ("edgecc/driver.py", "edgecc.backends.onnxruntime"),
    ("edgecc/passes/__init__.py", "edgecc.ir"),
    ("edgecc/ir/__init__.py", "edgecc.devices"),
    ("edgecc/devices.py", "edgecc.errors"),
    ("edgecc/fp8.py", "numpy"),
    ("edgecc/integers.py", "numpy"),
    ("edgecc/nvfp4.py", "numpy"),
    ("edgecc/backends/onnx/__init__.py", "edgecc.ir"),
    ("edgecc/backends/onnxruntime/__init__.py", "edgecc.backends.onnx"),
    ("edgecc/backends/runtime/__init__.py", "edgecc.backends.bundle"),
    ("edgecc/backends/server/__init__.py", "edgecc.backends.runtime"),
    ("edgecc/backends/server/service.py", "edgecc.backends.server.engine_thread"),
    ("edgecc/backends/tensorrt/__init__.py", "edgecc.backends.onnx"),
    ("edgecc/backends/torch/__init__.py", "edgecc.backends.base"),
    ("edgecc/backends/torch/__init__.py", "edgecc.ir"),
    ("edgecc/backends/torch/__init__.py", "torch"),
)

FORBIDDEN = (
    ("edgecc/errors.py", "edgecc.ir"),
    ("edgecc/errors.py", "edgecc.devices"),
    ("edgecc/roles.py", "edgecc.errors"),
    ("edgecc/devices.py", "edgecc.ir"),
    ("edgecc/devices.py", "numpy"),
    ("edgecc/fp8.py", "edgecc.ir"),
    ("edgecc/integers.py", "edgecc.ir"),
    ("edgecc/nvfp4.py", "edgecc.ir"),
    ("edgecc/ir/__init__.py", "edgecc.passes"),
    ("edgecc/ir/__init__.py", "edgecc.backends.base"),
    ("edgecc/ir/__init__.py", "edgecc.driver"),
    ("edgecc/ir/__init__.py", "onnx"),
    ("edgecc/ir/__init__.py", "torch"),
    ("edgecc/frontends/__init__.py", "edgecc.passes"),
    ("edgecc/frontends/__init__.py", "edgecc.backends"),
    ("edgecc/passes/__init__.py", "edgecc.frontends"),
    ("edgecc/passes/__init__.py", "edgecc.backends.base"),
    ("edgecc/backends/onnx/__init__.py", "edgecc.frontends"),
    ("edgecc/backends/onnx/__init__.py", "edgecc.backends.onnxruntime"),
    ("edgecc/backends/onnxruntime/__init__.py", "edgecc.passes"),
    ("edgecc/backends/onnxruntime/__init__.py", "edgecc.backends.runtime"),
    ("edgecc/backends/runtime/__init__.py", "edgecc.ir"),
    ("edgecc/backends/runtime/__init__.py", "edgecc.passes"),
    ("edgecc/backends/runtime/__init__.py", "edgecc.backends.onnx"),
    ("edgecc/backends/runtime/__init__.py", "edgecc.backends.onnxruntime"),
    ("edgecc/backends/runtime/__init__.py", "edgecc.backends.torch"),
    ("edgecc/backends/runtime/__init__.py", "edgecc.backends.server"),
    ("edgecc/backends/server/engine_thread.py", "edgecc.backends.server.answers"),
    ("edgecc/backends/server/reading.py", "edgecc.backends.server.replies"),
    ("edgecc/backends/tensorrt/__init__.py", "edgecc.passes"),
    ("edgecc/backends/tensorrt/__init__.py", "edgecc.backends.onnxruntime"),
    ("edgecc/backends/torch/__init__.py", "edgecc.passes"),
    ("edgecc/backends/torch/__init__.py", "edgecc.backends.onnx"),
    ("edgecc/backends/torch/__init__.py", "edgecc.backends.onnxruntime"),
    ("edgecc/backends/torch/__init__.py", "edgecc.backends.runtime"),
    ("edgecc/backends/torch/__init__.py", "edgecc.ir.interpreter"),
    ("edgecc/backends/torch/__init__.py", "edgecc.nvfp4"),
    ("edgecc/backends/base.py", "edgecc.ir"),  # the runtime imports base
)


def lint_imports(source_root: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts of pyproject.toml on the package below `source_root`."""
    program = "from importlinter.cli import lint_imports_command as main; main()"
    config = ROOT / "pyproject.toml"
    return subprocess.run(
        [sys.executable, "-c", program, str(config), "--no-cache"],
        cwd=source_root,
        env=os.environ | {"PYTHONPATH": str(source_root)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def outline(tmp_path: Path) -> Path:
    """A package with the modules the contracts name, and the one import that `base` always has."""
    for name in OUTLINE:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    plant(tmp_path, "edgecc/backends/runtime/__init__.py", "edgecc.backends.base")
    return tmp_path


def plant(root: Path, module: str, target: str) -> None:
    with (root / module).open("a", encoding="utf-8") as file:
        file.write(f"import {target}\n")


def test_contracts_hold() -> None:
    answer = lint_imports(ROOT / "compiler")

    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_contracts_allow_the_intended_imports(outline: Path) -> None:
    for module, target in ALLOWED:
        plant(outline, module, target)

    answer = lint_imports(outline)

    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(("module", "target"), FORBIDDEN)
def test_contracts_catch_a_planted_import(outline: Path, module: str, target: str) -> None:
    plant(outline, module, target)

    answer = lint_imports(outline)

    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "BROKEN" in answer.stdout


def test_contracts_name_every_engine() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = {contract["id"]: contract for contract in tool["importlinter"]["contracts"]}
    named = set(re.findall(r"\w+", " ".join(contracts["backends"]["layers"])))

    folders = {path.parent.name for path in (ROOT / "backends").glob("*/__init__.py")}

    assert folders
    assert folders <= named, "add it to the layers of the contract `backends` in pyproject.toml"


def python(program: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "compiler")},
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout


def loaded_by(module: str, *prefixes: str) -> list[str]:
    """The modules under `prefixes` that a fresh interpreter has after importing `module`."""
    names = python(f"import sys, {module}; print(*sys.modules)").split()
    return [name for name in names if any(f"{name}.".startswith(f"{p}.") for p in prefixes)]


COMPILER = ("edgecc.ir", "edgecc.passes", "edgecc.frontends", "edgecc.driver")
FRAMEWORKS = ("onnx", "onnx_ir", "onnxscript", "torch", "transformers")


def test_runtime_starts_without_the_compiler() -> None:
    assert loaded_by("edgecc.backends.runtime", *COMPILER, *FRAMEWORKS, "networkx") == []


def test_engines_open_without_the_compiler() -> None:
    assert loaded_by("edgecc.backends.tensorrt", *COMPILER, *FRAMEWORKS, "networkx") == []


def test_the_cache_knows_no_engine() -> None:
    assert loaded_by("edgecc.backends.cache", *COMPILER, *FRAMEWORKS, "numpy", "networkx") == []


def test_importing_edgecc_loads_nothing_heavy() -> None:
    heavy = ("numpy", "networkx", "onnxruntime", "tokenizers", "safetensors", "rich", "click")

    assert loaded_by("edgecc", *COMPILER, *FRAMEWORKS, *heavy, "edgecc.backends") == []


@pytest.mark.parametrize(
    "module", ["edgecc.driver", "edgecc.cli.main", "edgecc.backends.torch", "edgecc.ir"]
)
def test_pytorch_is_loaded_when_it_is_asked_for(module: str) -> None:
    assert loaded_by(module, "torch") == []


def test_importing_edgecc_is_quick() -> None:
    def seconds(program: str) -> float:
        start = time.perf_counter()
        python(program)
        return time.perf_counter() - start

    bare = min(seconds("pass") for _ in range(5))
    ours = min(seconds("import edgecc") for _ in range(5))

    assert ours - bare < 0.3
