"""From a failing pipeline to the smallest IR text and pipeline that fail in the same way."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgecc.devices import Device
from edgecc.errors import EdgeccError, MismatchError
from edgecc.ir.clone import clone_module
from edgecc.ir.core import Module
from edgecc.ir.printer import print_module
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.instruments import Instrument
from edgecc.passes.manager import PassManager
from edgecc.passes.pipeline import print_pipeline
from edgecc.reduction import BUDGET, OnProgress, reduce

AUTOMATIC_BUDGET = 300
"""Most candidates tried when nobody asked for a reduction: seconds on modules of a few layers."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What makes two failures the same.

    Attributes:
        id: Of the error.
        pass_name: The pass that was running; empty before the first.
        kind: Of a crash the exception, of a mismatch whether there was a value to compare.
    """

    id: str
    pass_name: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.id} in {self.pass_name}" if self.pass_name else self.id


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The smallest failing case.

    Attributes:
        module: Self-contained where the failure does not depend on the bytes of a checkpoint.
        passes: The pipeline.
        failure: How it fails.
    """

    module: Module
    passes: tuple[Pass[Any], ...]
    failure: Failure


class _Watch(Instrument):
    """Keeps the module before the pass that runs."""

    def __init__(self, keep: bool) -> None:
        self.index = -1
        self.pass_name = ""
        self.module: Module | None = None
        self._keep = keep

    def before(self, item: Pass[Any], index: int, module: Module) -> None:
        """Note the pass."""
        self.index, self.pass_name = index, item.name
        self.module = clone_module(module) if self._keep else None


@dataclass(frozen=True, slots=True)
class Runner:
    """How a case is run.

    Attributes:
        device: Of the pipeline, if it has one.
        check: Sets of random inputs for translation validation; 0 for none.
    """

    device: Device | None = None
    check: int = 0

    def failure(self, module: Module, passes: Sequence[Pass[Any]]) -> Failure | None:
        """How a pipeline fails on a module, which is left alone; None if it does not."""
        return self._run(module, passes, _Watch(keep=False))

    def locate(
        self, module: Module, passes: Sequence[Pass[Any]]
    ) -> tuple[Failure, int, Module] | None:
        """The failure, the index of the pass, and the module right before it."""
        watch = _Watch(keep=True)
        found = self._run(module, passes, watch)
        if found is None:
            return None
        return found, max(watch.index, 0), watch.module or clone_module(module)

    def _run(self, module: Module, passes: Sequence[Pass[Any]], watch: _Watch) -> Failure | None:
        manager = PassManager(passes, instruments=(watch,), check=self.check)
        try:
            manager.run(clone_module(module), PassContext(self.device))
        except EdgeccError as error:
            return Failure(error.id, watch.pass_name, _kind(error))
        return None


def _kind(error: EdgeccError) -> str:
    if isinstance(error, MismatchError):
        return "values" if " output " in error.diagnostics[0].message else "no values"
    return type(error.__cause__).__name__ if error.__cause__ is not None else ""


def reproduce(
    module: Module,
    passes: Sequence[Pass[Any]],
    runner: Runner,
    *,
    budget: int = BUDGET,
    progress: OnProgress | None = None,
) -> Reproduction | None:
    """Reduce a failing pipeline and its module; None if it does not fail.

    The passes before the failing one are run for good where the failure then needs only that one;
    else as many passes as possible are left out.

    Args:
        module: The input; it is not changed.
        passes: The pipeline.
        runner: How to run it.
        budget: Most modules that are tried.
        progress: See `edgecc.reduction`.
    """
    found = runner.locate(module, passes)
    if found is None:
        return None
    failure, index, before = found
    kept = tuple(passes[: index + 1])
    if len(kept) > 1 and runner.failure(before, kept[-1:]) == failure:
        module, kept = before, kept[-1:]
    for item in kept[:-1]:
        shorter = tuple(p for p in kept if p is not item)
        if runner.failure(module, shorter) == failure:
            kept = shorter
    smallest = reduce(
        module, lambda m: runner.failure(m, kept) == failure, budget=budget, progress=progress
    )
    return Reproduction(smallest, kept, failure)


def command_line(path: Path | str, found: Reproduction, runner: Runner) -> str:
    """The command that shows the failure."""
    words = ["edgecc", "opt", str(path)]
    if found.passes:
        words += ["-p", print_pipeline(found.passes)]
    if runner.device is not None:
        words += ["--device", runner.device.name]
    if runner.check:
        words += ["--check", str(runner.check)]
    return shlex.join(words)


class KeepReproducer:
    """Writes what reproduces a mismatch to a file; for `PassManager(on_mismatch=...)`.

    Args:
        runner: How the pipeline runs.
        folder: Where the file goes.
    """

    def __init__(self, runner: Runner, folder: Path) -> None:
        self.runner = runner
        self.folder = folder

    def __call__(self, module: Module, item: Pass[Any], error: MismatchError) -> list[str]:
        """Reduce, write, and say where and how."""
        found = reproduce(module, [item], self.runner, budget=AUTOMATIC_BUDGET)
        if found is None:
            return []
        try:
            path = write_new(self.folder, item.name, print_module(found.module))
        except OSError as problem:
            return [f"what reproduces it could not be written: {problem}"]
        return [
            f"reproduce: {command_line(path, found, self.runner)}",
            f"make it smaller: {shlex.join(_reduce_words(path, found, self.runner))}",
        ]


def _reduce_words(path: Path, found: Reproduction, runner: Runner) -> list[str]:
    words = shlex.split(command_line(path, found, runner))
    return ["edgecc", "reduce", *words[2:], "-o", str(path.with_suffix(".small.eir"))]


def write_new(folder: Path, name: str, text: str) -> Path:
    """Write text to `edgecc-NAME-N.eir`, with the first N for which there is no such file.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = re.sub(r"[^a-z0-9-]+", "-", name)
    for number in range(1, 10_000):
        path = folder / f"edgecc-{stem}-{number}.eir"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            continue
    raise OSError(f"too many files edgecc-{stem}-*.eir in {folder}")
