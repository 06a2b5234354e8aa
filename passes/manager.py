"""Runs a list of passes: verifies, checks properties, compares values, measures, dumps."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgecc.errors import EdgeccError, PassError, UsageError
from edgecc.ir.core import Module
from edgecc.ir.printer import print_module
from edgecc.ir.verifier import verify, verify_or_raise
from edgecc.passes import get_pass
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.check import CheckPasses, OnMismatch
from edgecc.passes.instruments import Instrument
from edgecc.passes.running import require, run_pass

Observer = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class PassTiming:
    """One line of the timing table: seconds, peak Python memory of the pass, size afterwards.

    `check_seconds` is what comparing values before and after the pass took, if that was done.
    """

    name: str
    seconds: float
    peak_bytes: int
    nodes: int
    weights: int
    changed: bool
    check_seconds: float = 0.0


_OURS = "edgecc.passes."


class PassManager:
    """Runs passes in order on one module.

    Args:
        passes: Instances, or names of passes with default options.
        verify_each: Verify the module after each pass that changed it.
        dump_dir: Write `000-input.eir`, then `NNN-pass-name.eir` after each pass.
        measure_memory: Also record the peak memory of each pass (slows Python down).
        observer: Called before each pass with its name, its index and the number of passes.
        instruments: Told about every pass; see `edgecc.passes.instruments`.
        check: Compare values before and after each pass on so many sets of random inputs.
        on_mismatch: See `edgecc.passes.check`.
    """

    def __init__(
        self,
        passes: Sequence[Pass[Any] | str],
        *,
        verify_each: bool = True,
        dump_dir: Path | None = None,
        measure_memory: bool = False,
        observer: Observer | None = None,
        instruments: Sequence[Instrument] = (),
        check: int = 0,
        on_mismatch: OnMismatch | None = None,
    ) -> None:
        if check < 0:
            raise UsageError("usage/check", f"check must be 0 or more, got {check}")
        if isinstance(passes, str):
            raise UsageError(
                "usage/passes",
                f"{passes!r} is text, expected a list of passes",
                help="parse it with edgecc.passes.parse_pipeline",
            )
        self.passes = [get_pass(p)() if isinstance(p, str) else p for p in passes]
        for item in self.passes:
            if not isinstance(item, Pass):
                raise UsageError("usage/passes", f"{item!r} is neither a pass nor the name of one")
        self.verify_each = verify_each
        self.dump_dir = dump_dir
        self.measure_memory = measure_memory
        self.observer = observer
        self.checker = CheckPasses(check, on_mismatch=on_mismatch) if check else None
        self.instruments = (*instruments, *([self.checker] if self.checker else ()))
        self.timings: list[PassTiming] = []

    def __str__(self) -> str:
        return ",".join(map(str, self.passes))

    def unchecked(self) -> list[str]:
        """Outputs that `check` could not compare, and why, one line for each pass and reason."""
        return self.checker.unchecked() if self.checker else []

    def run(self, module: Module, ctx: PassContext | None = None) -> Module:
        """Run all passes in place and return the module.

        Raises:
            EdgeccError: A pass refused the module (its own error, with the pass named), crashed or
                left it broken (PassError), changed what it computes (MismatchError), or it was
                broken before (VerifyError).
        """
        ctx = ctx or PassContext()
        if self.verify_each:
            verify_or_raise(module, "before the first pass")
        self._dump(module, 0, "input")
        for index, item in enumerate(self.passes):
            if self.observer:
                self.observer(item.name, index, len(self.passes))
            for instrument in self.instruments:
                instrument.before(item, index, module)
            require(module, item, "requires")
            try:
                changed, seconds, peak = self._timed(module, item, ctx)
            except EdgeccError as error:
                for instrument in self.instruments:
                    instrument.failed(item, index, module, error)
                raise
            for instrument in self.instruments:
                instrument.after(item, index, module, changed)
            self._accept(module, item, index, changed)
            self.timings.append(self._timing(module, item, changed, seconds, peak))
        return module

    def _accept(self, module: Module, item: Pass[Any], index: int, changed: bool) -> None:
        """Check what a pass left behind.

        When one of ours says that it changed nothing, the module is as it was verified before: the
        tests hold every one of them to that answer. Passes of other packages are not taken at their
        word.
        """
        if self.verify_each and (changed or not type(item).__module__.startswith(_OURS)):
            findings = verify(module)
            if findings:
                raise PassError(*[f.with_note(f"after pass {item.name}") for f in findings])
        require(module, item, "ensures")
        self._dump(module, index + 1, item.name)
        for instrument in self.instruments:
            instrument.accepted(item, index, module)

    def _timing(
        self, module: Module, item: Pass[Any], changed: bool, seconds: float, peak: int
    ) -> PassTiming:
        nodes = sum(len(g.nodes) for g in module.graphs.values())
        checked = self.checker.seconds if self.checker else 0.0
        return PassTiming(item.name, seconds, peak, nodes, len(module.weights), changed, checked)

    def _timed(self, module: Module, item: Pass[Any], ctx: PassContext) -> tuple[bool, float, int]:
        if self.measure_memory:
            tracemalloc.start()
        start = time.perf_counter()
        try:
            changed = run_pass(item, module, ctx)
        finally:
            seconds = time.perf_counter() - start
            peak = tracemalloc.get_traced_memory()[1] if self.measure_memory else 0
            if self.measure_memory:
                tracemalloc.stop()
        return changed, seconds, peak

    def _dump(self, module: Module, index: int, name: str) -> None:
        if self.dump_dir is not None:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            path = self.dump_dir / f"{index:03d}-{name}.eir"
            path.write_text(print_module(module, locations=True), encoding="utf-8")
