"""A real server on the shipped pair, three sequences at a time, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import edgecc
from edgecc.backends.runtime import Generator
from helpers.goldens import DRAFT, TARGET
from helpers.serving import serving

if TYPE_CHECKING:
    from edgecc.backends.server import Server

Serve = Callable[..., Any]


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("fastapi", "prometheus_client", "uvicorn"):
        pytest.importorskip(package)
    out = tmp_path_factory.mktemp("served") / "bundle"
    edgecc.compile(TARGET, DRAFT, out=out, max_model_len=384, prefill_chunk=64, max_batch_size=3)
    return out


@pytest.fixture(scope="session")
def loaded(bundle: Path) -> Iterator[Generator]:
    """One generator for all: each server holds it only while it runs."""
    with edgecc.load(bundle, num_threads=1) as generator:
        yield generator


@pytest.fixture(scope="module")
def server(loaded: Generator) -> Iterator[Server]:
    with serving(loaded) as running:
        yield running


@pytest.fixture
def serve(loaded: Generator) -> Serve:
    """Make a server with other options; not while `server` is in use."""

    def make(**options: Any) -> Any:
        return serving(loaded, **options)

    return make
