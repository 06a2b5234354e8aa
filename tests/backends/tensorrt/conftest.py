"""Builders need a package that not every environment has."""

from __future__ import annotations

import pytest

from helpers.lowered_pairs import write_pair
from helpers.simulated_bundle import SimulatedBundle, lowered


@pytest.fixture(scope="session")
def trt():
    return pytest.importorskip("tensorrt_rtx", reason="pip install 'edgecc[rtx]'")


@pytest.fixture(scope="module")
def cuda_runtime():
    pytest.importorskip("cuda.bindings", reason="pip install cuda-bindings")
    from cuda.bindings import runtime

    return runtime


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A small pair of random weights; its rounds have five rows."""
    return write_pair(tmp_path_factory.mktemp("pair"), layers=2)


@pytest.fixture(scope="module")
def module(checkpoints):
    """The pair as it is lowered for the simulated GPU."""
    return lowered(*checkpoints)


@pytest.fixture
def make(tmp_path, trt, cuda_runtime, module):
    """Makes bundles on a simulated GPU, of that pair or of another module."""

    def made(other=None, **options):
        return SimulatedBundle(tmp_path, trt, cuda_runtime, other or module, **options)

    return made
