"""The engines of a bundle: taken from the cache, or built in processes of their own."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from edgecc.backends.base import BuiltEngine, Progress
from edgecc.backends.cache import ArtifactCache, CacheKey
from edgecc.backends.storage import storage_errors
from edgecc.backends.tensorrt.artifact import engine_damage
from edgecc.backends.tensorrt.child import run_in_child
from edgecc.backends.tensorrt.estimate import Estimate
from edgecc.errors import BackendError

ENGINE_FOLDER = "engines"
"""Of a bundle."""

PLAN = "engine.plan"
FACTS = "engine.json"
"""Files of a cache entry: the plan, and what the manifest says about it."""

STEPS = 1000
"""Steps of a build's progress. Nearly all of its time passes in a few calls that report nothing,
so the bar goes by the estimate, and the last steps are left for the end."""

Facts: TypeAlias = dict[str, Any]
"""Of an engine, for the manifest; JSON-compatible."""


@dataclass(frozen=True, slots=True)
class Job:
    """One engine that a bundle needs.

    Attributes:
        file: The plan, relative to the bundle.
        key: Gives the cache key, after reading the weights; None if it is unknown what the builder
            would build for.
        build: Writes the plan to a path and gives what the manifest says about it. It reports
            phases of the builder.
        estimate: Of a build; it has the name of the graph.
        network: Jobs with the same one get one engine; empty if it is not known what it is like.
    """

    file: str
    key: Callable[[], CacheKey | None]
    build: Callable[[Path, Progress], Facts]
    estimate: Estimate
    network: str = ""


@dataclass(frozen=True, slots=True)
class _Missing:
    """An engine that has to be built, and why."""

    job: Job
    key: CacheKey | None
    reason: str


@dataclass(slots=True)
class Engines:
    """Puts engines into a bundle.

    Attributes:
        directory: Of the unfinished bundle.
        cache: Where engines are kept; one without a directory keeps nothing.
        progress: Told about each engine.
        made: What was done so far.
    """

    directory: Path
    cache: ArtifactCache
    progress: Progress
    made: list[BuiltEngine] = field(default_factory=list)
    _found: dict[str, Facts | None] = field(default_factory=dict)
    _missing: list[_Missing] = field(default_factory=list)
    _same: dict[str, str] = field(default_factory=dict)

    def look_up(self, jobs: Sequence[Job]) -> list[Estimate]:
        """Take from the cache what it has.

        Args:
            jobs: All engines of a device.

        Returns:
            What building the others is going to take.

        Raises:
            InputError: A weight cannot be read.
            ResourceError: The disk refused.
        """
        with storage_errors(self.directory):
            (self.directory / ENGINE_FOLDER).mkdir(exist_ok=True)
        self._same = same_engines(jobs)
        for done, job in enumerate(jobs):
            self.progress("cache", done, len(jobs))
            if job.estimate.name in self._same:
                self._found[job.estimate.name] = None
                continue
            begin, key = monotonic(), job.key()
            facts, reason = self._fetch(key, job)
            self._found[job.estimate.name] = facts
            if facts is None:
                self._missing.append(_Missing(job, key, reason))
            else:
                self._note(job, reason, True, monotonic() - begin)
        self.progress("cache", len(jobs), len(jobs))
        return [item.job.estimate for item in self._missing]

    def build(self) -> dict[str, Facts]:
        """Build what the cache does not have.

        Returns:
            What the manifest says about each engine, by name, in the order of the jobs.

        Raises:
            UnsupportedError: The builder refuses a network.
            LegalizeError: An op or encoding has no lowering.
            ResourceError: Disk or memory.
            BackendError: The builder crashed.
        """
        for item in self._missing:
            begin = monotonic()
            facts = self._found[item.job.estimate.name] = self._build(item.job, item.key)
            self._note(item.job, item.reason, False, monotonic() - begin)
            if item.key is not None:
                self._keep(item.key, item.job, facts)
        for name, other in self._same.items():
            self._found[name] = self._found[other]
        return {name: facts for name, facts in self._found.items() if facts is not None}

    def _note(self, job: Job, reason: str, cached: bool, seconds: float) -> None:
        expected = job.estimate
        if expected.name not in reason:  # of the key, which all parts of a graph have in common
            reason = f"{expected.name}: {reason}"
        self.made.append(
            BuiltEngine(expected.name, reason, cached, seconds, expected.seconds, expected.bytes)
        )

    def _fetch(self, key: CacheKey | None, job: Job) -> tuple[Facts | None, str]:
        """What the cache has for a key, and why it has nothing."""
        if key is None:
            reason = "nothing tells the GPU of this machine"
            expected = job.estimate
            return None, f"engine {expected.name} for {expected.device} built anew: {reason}"
        path = self.directory / job.file
        with storage_errors(path), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            found = self.cache.get(key, Path(folder), damage_of=lambda made: _damage(made, key))
            if not found:
                return None, found.reason
            facts: Facts = json.loads(Path(folder, FACTS).read_text(encoding="utf-8"))
            os.replace(Path(folder, PLAN), path)
        return {**facts, "file": job.file}, found.reason  # it may have served another graph

    def _keep(self, key: CacheKey, job: Job, facts: Facts) -> None:
        if self.cache.directory is None:
            return
        path = self.directory / job.file
        with storage_errors(path), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            described = Path(folder, FACTS)
            described.write_text(json.dumps(facts) + "\n", encoding="utf-8")
            self.cache.put(key, {PLAN: path, FACTS: described})

    def _build(self, job: Job, key: CacheKey | None) -> Facts:
        """Build in a child, which writes the plan: it never comes into this process."""
        name = f"{job.estimate.name} for {job.estimate.device}"
        path, begin = self.directory / job.file, monotonic()
        digest = key.digest if key else None
        stage, phase = f"build {name}", ""

        def work(report: Progress) -> Facts:
            return {"file": job.file, "key": digest, **job.build(path, report)}

        def told(text: str, done: int, total: int) -> None:
            nonlocal phase
            phase = f": {text.lower()}"

        def tick() -> None:
            share = min(0.97, (monotonic() - begin) / max(job.estimate.seconds, 0.1))
            self.progress(stage + phase, int(share * STEPS), STEPS)

        facts = run_in_child(work, told, tick, name=name)
        if not path.is_file():
            raise BackendError("tensorrt/no-plan", f"the builder of {name} wrote no plan")
        self.progress(stage, STEPS, STEPS)
        return facts


def same_engines(jobs: Sequence[Job]) -> dict[str, str]:
    """Names of the graphs that are served by the engine of another one, and that one's name."""
    first: dict[str, str] = {}
    found = {}
    for job in jobs:
        name = job.estimate.name
        if job.network and (other := first.setdefault(job.network, name)) != name:
            found[name] = other
    return found


def _damage(folder: Path, key: CacheKey) -> str:
    """What is wrong with an entry whose hashes agree; empty if nothing is."""
    try:
        size = Path(folder, PLAN).stat().st_size
        facts = json.loads(Path(folder, FACTS).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, RecursionError) as error:
        return f"{FACTS} cannot be used: {error}"
    if finding := engine_damage(facts):
        return f"{FACTS} cannot be used: {finding}"
    found = (facts["key"], facts["bytes"])
    return "" if found == (key.digest, size) else f"{FACTS} is of another engine"
