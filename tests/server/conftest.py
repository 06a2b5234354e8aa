"""A real server on the shipped pair, three sequences at a time, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import edgecc
from edgecc.backends.runtime import Generator
from helpers.goldens import DRAFT, TARGET

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


@contextmanager
def serving(generator: Generator, **options: Any) -> Iterator[Server]:
    """A server that listens at a free port."""
    from edgecc.backends.server import Server, ServerOptions, bind

    started = threading.Event()
    server = Server(
        generator,
        ServerOptions(model_name="tiny", **options),
        bind("127.0.0.1", 0),
        on_start=lambda url: started.set(),
        shutdown_timeout_s=10,
    )
    thread = threading.Thread(target=server.serve_until_told, daemon=True)
    thread.start()
    try:
        assert started.wait(30)
        yield server
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


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
