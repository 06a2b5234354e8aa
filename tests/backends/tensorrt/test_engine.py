"""What is said where nothing can be built or run."""

from __future__ import annotations

import builtins
import sys

import pytest

from edgecc.backends.tensorrt import open_engine
from edgecc.backends.tensorrt.library import load_library
from edgecc.errors import UnsupportedError


@pytest.mark.parametrize(
    ("name", "extra"), [("tensorrt_rtx", "edgecc[rtx]"), ("tensorrt", "edgecc[tensorrt]")]
)
def test_a_missing_package_says_what_to_install(monkeypatch, name, extra):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match="is not installed") as caught:
        load_library(name)
    assert caught.value.exit_code == 4
    assert caught.value.diagnostics[0].help == f"pip install '{extra}'"


def test_a_library_that_does_not_load(monkeypatch):
    real = builtins.__import__
    monkeypatch.delitem(sys.modules, "tensorrt_rtx", raising=False)

    def broken(name):
        raise OSError("libnvinfer.so: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", broken)
    with pytest.raises(UnsupportedError, match="cannot be loaded: libnvinfer"):
        load_library("tensorrt_rtx")
    assert builtins.__import__ is real


def test_opening_says_why_not(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    artifact = {"library": "tensorrt_rtx", "compute_capabilities": [89, 120]}
    with pytest.raises(UnsupportedError, match="cannot run them yet") as caught:
        open_engine(object(), artifact)
    notes = caught.value.diagnostics[0].notes
    assert notes == (
        "the engines are for GPUs of compute capability 8.9, 12.0",
        "tensorrt_rtx is not installed here",
    )


def test_a_foreign_manifest_imports_nothing():
    with pytest.raises(UnsupportedError) as caught:
        open_engine(object(), {"library": "antigravity"})
    assert "antigravity" not in sys.modules
    assert "no library of ours" in caught.value.diagnostics[0].notes[1]
