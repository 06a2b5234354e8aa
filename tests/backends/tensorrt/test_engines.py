"""Engines in a bundle: what the cache gives is checked, though its hashes agree."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgecc.backends.cache import ArtifactCache, CacheKey
from edgecc.backends.tensorrt.engines import Engines, Job
from edgecc.backends.tensorrt.estimate import Estimate
from edgecc.errors import Diagnostic

PLAN = b"a plan"
KEY = CacheKey("engine", "lm_head", "sm120", "ir", "code", "tensorrt_rtx", "1.7", {}, {})
FACTS: dict[str, Any] = {
    "bytes": len(PLAN),
    "weight_bytes": 0,
    "bound": [],
    "bound_bytes": 0,
    "weights": {"target.head": {"precision": "nvfp4", "bytes": 9, "bound_bytes": 0}},
    "inputs": [],
    "outputs": [],
    "profiles": [],
}


def _build(path: Path, progress: object) -> dict[str, Any]:
    path.write_bytes(PLAN)
    return FACTS


ESTIMATE = Estimate("lm_head", "sm120", 0.1, 1 << 20, 1 << 20)
JOB = Job("engines/sm120-lm_head.plan", lambda: KEY, _build, ESTIMATE)


@pytest.fixture
def cached(tmp_path: Path) -> Callable[[str], tuple[list[bool], list[Diagnostic]]]:
    """Makes a bundle; gives whether each engine was taken from the cache, and what was told."""

    def make(name: str) -> tuple[list[bool], list[Diagnostic]]:
        told: list[Diagnostic] = []
        (tmp_path / name).mkdir()
        cache = ArtifactCache(tmp_path / "cache", report=told.append)
        engines = Engines(tmp_path / name, cache, lambda *step: None)
        engines.look_up([JOB])
        assert engines.build()["lm_head"] == {"file": JOB.file, "key": KEY.digest, **FACTS}
        assert (tmp_path / name / JOB.file).read_bytes() == PLAN
        assert [p.name for p in (tmp_path / name / "engines").iterdir()] == ["sm120-lm_head.plan"]
        return [e.cached for e in engines.made], told

    return make


def test_jobs_of_one_network_get_one_engine(tmp_path: Path) -> None:
    """Built once, kept once, and another time taken from the cache once."""
    jobs = [
        Job(f"engines/{name}.plan", lambda: KEY, _build, replace(ESTIMATE, name=name), network)
        for name, network in (("body.1", "a"), ("other", ""), ("body.2", "a"), ("more", ""))
    ]
    for cached in (False, True):
        folder = tmp_path / f"bundle-{cached}"
        folder.mkdir()
        engines = Engines(folder, ArtifactCache(tmp_path / "cache"), lambda *step: None)
        missing = engines.look_up(jobs)
        assert [e.name for e in missing] == ([] if cached else ["body.1", "other", "more"])
        found = engines.build()
        assert list(found) == ["body.1", "other", "body.2", "more"]
        assert found["body.2"] == found["body.1"]
        assert found["other"]["file"] == "engines/other.plan"
        assert [e.name for e in engines.made] == ["body.1", "other", "more"]
        assert sorted(p.name for p in (folder / "engines").iterdir()) == [
            "body.1.plan",
            "more.plan",
            "other.plan",
        ]


DAMAGES: dict[str, tuple[str, bytes | None, str]] = {
    "no plan": ("engine.plan", None, "engine.plan is missing"),
    "another plan": ("engine.plan", b"longer than the plan", "is of another engine"),
    "no facts": ("engine.json", None, "engine.json is missing"),
    "facts that are no JSON": ("engine.json", b"{", "engine.json cannot be used: "),
    "facts that are no text": ("engine.json", b"\xff", "engine.json cannot be used: "),
    "facts too deep": ("engine.json", b"[" * 100_000, "engine.json cannot be used: "),
    "facts that are a list": ("engine.json", b"[]", "engine.json cannot be used: "),
    "facts without sizes": ("engine.json", b'{"file": "x"}', "engine.json cannot be used: "),
    "facts of another engine": (
        "engine.json",
        json.dumps({"file": JOB.file, "key": "0" * 64, **FACTS}).encode(),
        "is of another engine",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_entry_whose_hashes_agree(cached, tmp_path: Path, damage: str) -> None:
    file, content, words = DAMAGES[damage]
    assert cached("first") == ([False], [])
    entry = tmp_path / "cache" / KEY.digest
    described = json.loads((entry / "key.json").read_text())
    if content is None:
        (entry / "files" / file).unlink()
        del described["files"][file]
    else:
        (entry / "files" / file).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        described["files"][file] = {"bytes": len(content), "sha256": digest}
    (entry / "key.json").write_text(json.dumps(described))
    made, told = cached("second")
    assert made == [False]
    assert [d.id for d in told] == ["cache/damaged"]
    assert words in told[0].message
    assert cached("third") == ([True], [])
