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
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Reporter(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            options |= {"file": io.StringIO(), "disable": False}
            super().__init__(*arguments, **options)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            """Count, and tell bytes."""
            drawn: bool | None = super().update(n)
            if progress is not None and getattr(self, "unit", "") == "B" and self.total:
                progress(stage, int(self.n), int(self.total))
            return drawn

    return Reporter
