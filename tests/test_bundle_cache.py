"""Bundles by what decides them: hits, misses, damage, and two that want the same one."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import edgecc
from edgecc.bundle_cache import bundle_key, cached_bundle
from edgecc.errors import InputError, UsageError
from helpers.goldens import DRAFT, TARGET

OPTIONS: dict[str, Any] = {"max_model_len": 64, "prefill_chunk": 16, "verify": "none"}


class Builds:
    """Compiles, and counts."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.count = 0
        self.lock = threading.Lock()

    def __call__(self, out: Path) -> None:
        with self.lock:
            self.count += 1
        edgecc.compile(self.target, out=out, **OPTIONS)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TARGET, tmp_path / "target"))


def test_the_second_time_nothing_is_compiled(tmp_path: Path, target: Path) -> None:
    build = Builds(target)
    first = cached_bundle(tmp_path / "cache", target, None, OPTIONS, build)
    second = cached_bundle(tmp_path / "cache", target, None, OPTIONS, build)

    assert first == second
    assert build.count == 1
    (first / "bundle.json").write_text("{", encoding="utf-8")
    assert cached_bundle(tmp_path / "cache", target, None, OPTIONS, build) == first
    assert build.count == 2
    with edgecc.load(first) as generator:
        assert generator.generate("def", max_new_tokens=2).token_ids


def test_two_that_want_the_same_one(tmp_path: Path, target: Path) -> None:
    build = Builds(target)
    with ThreadPoolExecutor(2) as pool:
        paths = set(
            pool.map(
                lambda _: cached_bundle(tmp_path / "cache", target, None, OPTIONS, build), range(2)
            )
        )

    assert len(paths) == 1
    assert build.count == 1


def test_what_decides(target: Path) -> None:
    key = bundle_key(target, None, OPTIONS)
    assert bundle_key(target, None, dict(OPTIONS)) == key
    others = {key, bundle_key(target, DRAFT, OPTIONS), bundle_key(target, None, {})}
    weights = next(target.glob("*.safetensors"))
    os.utime(weights, ns=(1, 1))
    others.add(bundle_key(target, None, OPTIONS))
    config = target / "config.json"
    config.write_text(config.read_text(encoding="utf-8") + " ", encoding="utf-8")
    others.add(bundle_key(target, None, OPTIONS))
    (target / "generation_config.json").write_text('{"temperature": 0.5}', encoding="utf-8")
    others.add(bundle_key(target, None, OPTIONS))

    assert len(others) == 6


def test_a_checkpoint_that_changes_meanwhile(tmp_path: Path, target: Path) -> None:
    build = Builds(target)

    def meddle(out: Path) -> None:
        build(out)
        (target / "config.json").touch()
        (target / "new.json").write_text("{}", encoding="utf-8")

    with pytest.raises(InputError, match="changed while"):
        cached_bundle(tmp_path / "cache", target, None, OPTIONS, meddle)
    assert list((tmp_path / "cache" / "bundles").glob("target-*")) == []


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        cached_bundle(tmp_path / "cache", tmp_path / "missing", None, OPTIONS, lambda out: None)
