"""Contracts between the compiler driver, the engines and the runtime.

A backend lowers a legalized module to files (`Backend.lower`), and its engine opens those files
(`Engine`). An *entry* is one graph the runtime calls: `target` or `draft`. Inputs and outputs are
named after their role, so the runtime never guesses: see `Role`.

The runtime imports this module without the compiler, so IR types are named for type checkers only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.roles import Role

if TYPE_CHECKING:
    from edgecc.ir.core import Module

__all__ = [
    "Array",
    "Artifact",
    "Backend",
    "BuiltEngine",
    "Engine",
    "Executable",
    "FloatArray",
    "Holding",
    "IntArray",
    "Progress",
    "Role",
]

Array: TypeAlias = NDArray[Any]
IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]


class Executable(Protocol):
    """One entry, ready to run. It owns its caches: they are allocated and bound once."""

    @property
    def capacity(self) -> int:
        """Rows each KV cache holds: no call may make `cache_length + new rows` exceed it."""
        ...

    def run(self, inputs: Mapping[Role, Array], outputs: Sequence[Role]) -> dict[Role, Array]:
        """Run the entry once; caches are updated in place.

        Args:
            inputs: Every non-cache input of the entry, by role, in the dtype and shape of `Role`.
            outputs: Roles wanted. Work that only other outputs need is skipped; an empty sequence
                still updates the caches.

        Returns:
            The wanted outputs. The arrays may be reused by the next call: copy what must live on.
        """
        ...


class Engine(Protocol):
    """A bundle opened on one device."""

    def entry(self, name: str) -> Executable:
        """The executable of an entry (`target`, `draft`).

        Raises:
            BundleError: The bundle has no such entry.
        """
        ...

    def close(self) -> None:
        """Release sessions, mappings and caches."""
        ...


Progress: TypeAlias = Callable[[str, int, int], None]
"""`progress(stage, done, total)`: called as work goes on; `total` 0 means unknown."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """How an engine came into the bundle. The bundle does not tell: it is the same either way.

    Attributes:
        name: Of its graph.
        reason: Why it was built, or that it was taken from the cache.
        cached: It was taken from the cache.
        seconds: How long that took.
        estimated_seconds: Expected of a build, before it began.
        estimated_bytes: Memory expected of a build.
    """

    name: str
    reason: str
    cached: bool
    seconds: float
    estimated_seconds: float
    estimated_bytes: int

    def __str__(self) -> str:
        took = f"{self.seconds:.1f} s"
        if not self.cached:
            took += f", estimated {self.estimated_seconds:.1f} s"
        return f"{self.reason} ({took})"


@dataclass(frozen=True, slots=True)
class Holding:
    """Where an artifact has the bytes of a weight.

    Attributes:
        file: The weight file of the bundle; None where they lie inside of engines.
        copies: In how many places they lie.
    """

    file: str | None
    copies: int = 1


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a backend wrote into a bundle.

    Attributes:
        manifest: The backend's own part of `bundle.json` (`artifacts.<device>`), JSON-compatible.
        files: Files written, relative to the bundle, in a fixed order.
        weights: By symbol, every weight whose bytes the artifact uses.
        engines: How each engine was made, for those who wait for it.
    """

    manifest: Mapping[str, Any]
    files: tuple[str, ...] = field(default=())
    weights: Mapping[str, Holding] = field(default_factory=dict)
    engines: tuple[BuiltEngine, ...] = field(default=())


class Backend(Protocol):
    """Lowers a legalized module for one device."""

    def lower(self, module: Module, directory: Path, progress: Progress) -> Artifact:
        """Write engines and weights below `directory`, streaming weights tensor by tensor."""
        ...
