"""Observers of a pass manager: printing the IR around passes.

An instrument hears `before`, `after`, `accepted` and `failed`; it must not change the module.
Verifying, timing and dumping are part of the manager itself, because every run wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from edgecc.ir.core import Module
from edgecc.ir.printer import print_module
from edgecc.passes.base import Pass


class Instrument:
    """Does nothing; subclasses override what they need."""

    def before(self, item: Pass[Any], index: int, module: Module) -> None:
        """Called before pass number `index` (from 0)."""

    def after(self, item: Pass[Any], index: int, module: Module, changed: bool) -> None:
        """Called after a pass that worked, with what it reported."""

    def accepted(self, item: Pass[Any], index: int, module: Module) -> None:
        """Called when what a pass left behind was verified and has the properties it ensures."""

    def failed(self, item: Pass[Any], index: int, module: Module, error: Exception) -> None:
        """Called when a pass raised, with the module as it left it."""


class PrintIr(Instrument):
    """Prints the module around passes.

    Args:
        write: Takes the text.
        before: Names of passes before which to print.
        after: Names of passes after which to print; None for all.
        on_change: After the passes in `after`, print only if they changed something.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        before: Collection[str] = (),
        after: Collection[str] | None = (),
        on_change: bool = False,
    ) -> None:
        self._write = write
        self._before = frozenset(before)
        self._after = None if after is None else frozenset(after)
        self._on_change = on_change

    def before(self, item: Pass[Any], index: int, module: Module) -> None:
        """Print if the pass was named."""
        if item.name in self._before:
            self._print(f"before {index + 1}: {item}", module)

    def after(self, item: Pass[Any], index: int, module: Module, changed: bool) -> None:
        """Print if the pass was named, or all are, and there is something new if that matters."""
        wanted = self._after is None or item.name in self._after
        if wanted and (changed or not self._on_change):
            self._print(f"after {index + 1}: {item}", module)

    def failed(self, item: Pass[Any], index: int, module: Module, error: Exception) -> None:
        """Print what a failing pass left behind."""
        self._print(f"failed {index + 1}: {item}", module)

    def _print(self, title: str, module: Module) -> None:
        self._write(f"// ---- {title}\n{print_module(module)}")
