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
from edgecc.backends.tensorrt.child import run_in_child
from edgecc.backends.tensorrt.estimate import Estimate
from edgecc.errors import BackendError

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
    """

    file: str
    key: Callable[[], CacheKey | None]
    build: Callable[[Path, Progress], Facts]
    estimate: Estimate


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

    def make(
        self, jobs: Sequence[Job], before_build: Callable[[Sequence[Estimate]], None]
    ) -> dict[str, Facts]:
        """Put engines into the bundle.

        Args:
            jobs: The engines.
            before_build: Called once, with the estimates of those that the cache does not have.

        Returns:
            What the manifest says about each, by name, in the order of the jobs.

        Raises:
            UnsupportedError: The builder refuses a network.
            LegalizeError: An op or encoding has no lowering.
            ResourceError: Disk or memory.
            BackendError: The builder crashed.
        """
        found: dict[str, Facts] = {}
        missing: list[tuple[Job, CacheKey | None, str]] = []
        for done, job in enumerate(jobs):
            name = job.estimate.name
            self.progress("look up engines", done, len(jobs))
            begin, key = monotonic(), job.key()
            facts, reason = self._fetch(key, job)
            if facts is None:
                missing.append((job, key, reason))
            else:
                found[name] = facts
                self._note(job, reason, True, monotonic() - begin)
        self.progress("look up engines", len(jobs), len(jobs))
        before_build([job.estimate for job, *_ in missing])
        for job, key, reason in missing:
            begin = monotonic()
            facts = found[job.estimate.name] = self._build(job, key)
            self._note(job, reason, False, monotonic() - begin)
            if key is not None:
                self._keep(key, job, facts)
        return {job.estimate.name: found[job.estimate.name] for job in jobs}

    def _note(self, job: Job, reason: str, cached: bool, seconds: float) -> None:
        expected = job.estimate
        self.made.append(
            BuiltEngine(expected.name, reason, cached, seconds, expected.seconds, expected.bytes)
        )

    def _fetch(self, key: CacheKey | None, job: Job) -> tuple[Facts | None, str]:
        """What the cache has for a key, and why it has nothing."""
        if key is None:
            reason = "nothing tells the GPU of this machine"
            return None, f"engine {job.estimate.name} built anew: {reason}"
        path = self.directory / job.file
        with storage_errors(path), tempfile.TemporaryDirectory(dir=path.parent) as folder:
            found = self.cache.get(key, Path(folder))
            if not found:
                return None, found.reason
            facts: Facts = json.loads(Path(folder, FACTS).read_text(encoding="utf-8"))
            os.replace(Path(folder, PLAN), path)
        return facts, found.reason

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
        name, path, begin = job.estimate.name, self.directory / job.file, monotonic()
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
