"""Translation validation: evaluate a module before and after each pass, and compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from edgecc.errors import EdgeccError, InternalError, MismatchError
from edgecc.ir.clone import clone_module
from edgecc.ir.compare import equal
from edgecc.ir.core import Module
from edgecc.passes.base import Pass
from edgecc.passes.equivalence import Comparer, Difference
from edgecc.passes.instruments import Instrument

OnMismatch = Callable[[Module, Pass[Any], MismatchError], Sequence[str]]
"""Takes the module before the pass, the pass and the error; returns notes for the error."""


class CheckPasses(Instrument):
    """Compares what the module computes before and after every pass that changed it.

    Args:
        runs: Sets of random inputs for each pass.
        on_mismatch: Called before a mismatch is raised, to keep what reproduces it.

    Attributes:
        seconds: Time the last pass cost.
        skipped: Outputs that could not be compared, with the reason, by pass; the key is empty
            where a pass could not be checked at all.
    """

    def __init__(self, runs: int, *, on_mismatch: OnMismatch | None = None) -> None:
        self.runs = runs
        self.seconds = 0.0
        self.skipped: dict[str, dict[str, str]] = {}
        self._on_mismatch = on_mismatch
        self._before: Module | None = None
        self._comparer = Comparer(range(runs))

    def unchecked(self) -> list[str]:
        """What could not be compared, one line for each pass and reason."""
        lines = []
        for label, outputs in self.skipped.items():
            for reason in dict.fromkeys(outputs.values()):
                names = [name for name, why in outputs.items() if why == reason]
                what = ", ".join(filter(None, names)) or "the module"
                lines.append(f"check {label}: not compared: {what}: {reason}")
        return lines

    def before(self, item: Pass[Any], index: int, module: Module) -> None:
        """Keep a copy."""
        start = time.perf_counter()
        self._before = clone_module(module)
        self.seconds = time.perf_counter() - start

    def accepted(self, item: Pass[Any], index: int, module: Module) -> None:
        """Compare with the copy.

        Raises:
            MismatchError: Values differ by more than the pass may change them.
        """
        start = time.perf_counter()
        before = self._before
        assert before is not None
        try:
            if not equal(before, module):
                self._compare(item, f"{index + 1}: {item}", before, module)
        finally:
            self._before = None
            self.seconds += time.perf_counter() - start

    def _compare(self, item: Pass[Any], label: str, before: Module, after: Module) -> None:
        try:
            result = self._comparer.compare(before, after, item.tolerance, chained=True)
        except InternalError:
            raise
        except EdgeccError as error:  # nothing to compare with
            self.skipped[label] = {"": f"cannot be evaluated: {error.diagnostics[0].message}"}
            return
        if result.skipped:
            self.skipped[label] = dict(result.skipped)
        if result.difference is None:
            return
        raised = _error(item, result.difference, self.runs)
        if self._on_mismatch is not None:
            notes = tuple(self._on_mismatch(before, item, raised))
            raised = MismatchError(raised.diagnostics[0].with_note(*notes))
        raise raised


def _error(item: Pass[Any], found: Difference, runs: int) -> MismatchError:
    what = f"output {found.output} of graph @{found.graph}" if found.output else f"@{found.graph}"
    return MismatchError(
        "check/mismatch",
        f"pass {item.name} changed what is computed: {what}",
        where=f"pass {item}",
        notes=(found.message, f"random inputs of seed {found.seed}, of {runs} checked"),
        help="this is a bug in the pass: please report it",
    )
