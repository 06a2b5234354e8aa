"""Builders need a package that not every environment has."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def trt():
    return pytest.importorskip("tensorrt_rtx", reason="pip install 'edgecc[rtx]'")
