"""Names whose numbers are counted within one graph, so that graphs of equal layers read alike."""

from __future__ import annotations


class RelativeNames:
    """Renumbers the numeric components of dotted names in the order in which they are first seen.

    `layers.12.mlp` becomes `layers.0.mlp` if 12 is the first number seen behind `layers`, and what
    is called `layers.13` afterwards becomes `layers.1`. Different names stay different: each number
    has one place among those behind the same components.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], dict[str, str]] = {}

    def __call__(self, name: str) -> str:
        """The name as it is within the graph."""
        made: tuple[str, ...] = ()
        for part in name.split("."):
            if part.isdecimal():
                known = self._seen.setdefault(made, {})
                part = known.setdefault(part, str(len(known)))
            made = (*made, part)
        return ".".join(made)
