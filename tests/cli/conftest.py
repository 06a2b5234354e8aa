"""A small pair and its bundle, and the command line to try on them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from helpers.checkpoints import write_draft, write_target
from helpers.command_line import SMALL, TAPS, Command, in_process


@pytest.fixture
def edgecc(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, in process, without variables of the developer's shell."""
    for name in ("EDGECC_LOG", "EDGECC_NUM_THREADS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return in_process(capsys)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return write_target(tmp_path_factory.mktemp("cli") / "target", **SMALL)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An unquantized target; not to be changed."""
    return write_target(tmp_path_factory.mktemp("cli") / "dense", **SMALL, quantized=False)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    return write_draft(tmp_path_factory.mktemp("cli") / "draft", **SMALL, **TAPS)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, target: Path, draft: Path) -> Path:
    """The pair, compiled for 64 tokens; not to be changed."""
    import edgecc

    out = tmp_path_factory.mktemp("cli") / "bundle"
    edgecc.compile(target, draft, out=out, max_model_len=64)
    return out


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    """A bundle to break."""
    return Path(shutil.copytree(bundle, tmp_path / "copy"))
