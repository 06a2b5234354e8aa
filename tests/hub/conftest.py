"""A hub with a small pair, and a cache for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from helpers.broken_pairs import write_pair
from helpers.hub_server import Hub, serving

TARGET, DRAFT = "org/tiny-target", "org/tiny-draft"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_pair(tmp_path / "served")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of `huggingface_hub`, empty."""
    path = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return path


@pytest.fixture
def hub(pair: tuple[Path, Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as found:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", found.url)
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for repository, folder in zip((TARGET, DRAFT), pair, strict=True):
            found.add(repository, folder)
        yield found
