"""Downloads told to our own callback, in place of the bars of the hub's library."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]


def reporter(stage: str, progress: Progress | None) -> type[Any]:
    """A bar class for the library that draws nothing.

    Args:
        stage: What is told to be done.
        progress: Told the stage, bytes that have come, and all bytes.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]  # bars of the hub can be switched off

    class Reporter(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)  # of a group of bars of the library
            options |= {"file": io.StringIO(), "disable": False}
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> bool | None:
            """Count, and tell bytes."""
            drawn: bool | None = super().update(n)
            if self.total:
                self._tell(int(self.total))
            return drawn

        def close(self) -> None:
            """Tell how much has come: bytes may be counted before their total is known."""
            if self.n:
                self._tell(max(int(self.n), int(self.total or 0)))
            super().close()

        def _tell(self, total: int) -> None:
            if progress is not None and getattr(self, "unit", "") == "B":
                progress(stage, int(self.n), total)

    return Reporter
