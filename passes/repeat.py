"""`repeat(...)`: run a group of passes until none of them changes anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgecc.errors import PassError
from edgecc.ir.core import Module
from edgecc.passes.base import NoOptions, Pass, PassContext
from edgecc.passes.running import require, run_pass


class Repeat(Pass[NoOptions]):
    """Run passes again and again until a round changes nothing.

    What it does
        Runs its passes in order; if any reports a change, runs all of them again.

    Why
        One clean-up makes another possible: a folded constant makes a node dead, a dead node makes
        two others equal.

    Example:
        `repeat(canonicalize,cse,dce)`.

    Options
        The passes, in parentheses.

    Requires and ensures
        What its passes do.

    Exactness
        That of its passes.

    Limits
        Stops with an error after 64 rounds: two passes undo each other's work.
    """

    name = "repeat"
    limit = 64

    def __init__(self, passes: Sequence[Pass[Any]]) -> None:
        super().__init__()
        self.passes = list(passes)
        self.tolerance = max((p.tolerance for p in self.passes), default=0.0)  # type: ignore[misc]

    def __str__(self) -> str:
        return f"repeat({','.join(map(str, self.passes))})"

    def run(self, module: Module, ctx: PassContext) -> bool:
        """Run to a fixed point.

        Raises:
            PassError: There is none, or a pass crashed or broke its promise.
            VerifyError: What a pass requires does not hold.
        """
        changed = False
        for _ in range(self.limit):
            again = [p.name for p in self.passes if _run(p, module, ctx)]
            if not again:
                return changed
            changed = True
        raise PassError(
            "pass/no-fixed-point",
            f"still changing after {self.limit} rounds: {', '.join(again)}",
            help="these passes undo each other's work",
        )


def _run(item: Pass[Any], module: Module, ctx: PassContext) -> bool:
    require(module, item, "requires")
    changed = run_pass(item, module, ctx)
    require(module, item, "ensures")
    return changed
