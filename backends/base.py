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
    "Engine",
    "Executable",
    "FloatArray",
    "IntArray",
    "Progress",
    "Role",
]

Array: TypeAlias = NDArray[Any]
IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]


class Executable(Protocol):
    """One entry, ready to run.

    It owns what lives between calls, which is allocated and bound once: caches, states, logs of
    states. A call with CACHE_LENGTH 0 begins a sequence: its states start from zero.
    """

    @property
    def capacity(self) -> int:
        """Rows each KV cache holds: no call may make `cache_length + new rows` exceed it."""
        ...

    @property
    def log_rows(self) -> int:
        """Rows the logs of states hold, the most of a call whose rows are not final.

        0 for entries without states, which do not take the counts to replay and to commit.
        """
        ...

    def run(self, inputs: Mapping[Role, Array], outputs: Sequence[Role]) -> dict[Role, Array]:
        """Run the entry once; caches are updated in place.

        Args:
            inputs: Every input of the entry that it does not own, by role, in the dtype and shape
                of `Role`.
            outputs: Roles wanted. Work that only other outputs need is skipped; an empty sequence
                still updates what the entry owns.

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
class Artifact:
    """What a backend wrote into a bundle.

    Attributes:
        manifest: The backend's own part of `bundle.json` (`artifacts.<device>`), JSON-compatible.
        files: Files written, relative to the bundle, in a fixed order.
    """

    manifest: Mapping[str, Any]
    files: tuple[str, ...] = field(default=())


class Backend(Protocol):
    """Lowers a legalized module for one device."""

    def lower(self, module: Module, directory: Path, progress: Progress) -> Artifact:
        """Write engines and weights below `directory`, streaming weights tensor by tensor."""
        ...
