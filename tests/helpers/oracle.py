"""The second oracle in tests: PyTorch on each device, beside the interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from edgecc.backends.torch import TorchExecutor
from edgecc.ir import Module
from helpers.ops import Cases, MakeEvaluator

Array: TypeAlias = NDArray[Any]

FLOATS: Mapping[type[np.floating[Any]], torch.dtype] = {
    np.float32: torch.float32,
    np.float64: torch.float64,
}

on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
"""The CPU always, and a GPU with `-m gpu`."""


def oracle(device: str, **options: Any) -> MakeEvaluator:
    """Makes executors on a device the way interpreters are made."""

    def make(module: Module, dtype: type[np.floating[Any]]) -> TorchExecutor:
        return TorchExecutor(module, FLOATS[dtype], device, **options)

    return make


def op_cases() -> dict[str, Any]:
    """The cases of every op family in tests/ir, by name: each has its own written-down formula."""
    found: dict[str, Any] = {}
    for path in sorted((Path(__file__).parents[1] / "ir").glob("test_ops_*.py")):
        cases: Cases = getattr(importlib.import_module(f"ir.{path.stem}"), "CASES", {})
        assert not found.keys() & cases.keys()
        found |= cases
    return found


def assert_close(
    found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float
) -> None:
    """Integers equal; floats within the tolerance relative to the largest expected value."""
    assert list(found) == list(expected)
    for name, want in expected.items():
        have = found[name]
        assert have.shape == want.shape, name
        if want.dtype.kind != "f":
            assert have.dtype == want.dtype, name
            np.testing.assert_array_equal(have, want, err_msg=name)
            continue
        scale = max(1e-30, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(have, want, rtol=0, atol=tolerance * scale, err_msg=name)
