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
    "GreedyRound",
    "GreedyRounds",
    "Holding",
    "IntArray",
    "Progress",
    "Role",
    "greedy_rounds",
]

Array: TypeAlias = NDArray[Any]
IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]


class Executable(Protocol):
    """One entry, ready to run.

    It owns what lives between calls: caches, states, logs of states. It has them once for each of
    its *slots*, each of which holds one sequence. A call works on neighbouring slots, one for each
    of its sequences, and leaves the others alone. A sequence with CACHE_LENGTH 0 begins: its states
    start from zero.

    All sequences of a call have the same number of rows. One that has fewer is padded at the end:
    its own results do not depend on what the padding is, which must be valid ids, and what padding
    writes lies behind the valid rows, where the next call overwrites it. So a slot without a
    sequence can take part, with CACHE_LENGTH 0, and one with a sequence as well, if there is room
    for the rows and nothing to replay. Rows of a block draft's FEATURES cannot be padded: the block
    follows the last of them.
    """

    @property
    def slots(self) -> int:
        """Sequences it holds."""
        ...

    @property
    def batch_size(self) -> int:
        """Most sequences of one call."""
        ...

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

    def run(
        self, inputs: Mapping[Role, Array], outputs: Sequence[Role], *, slot: int = 0
    ) -> dict[Role, Array]:
        """Run the entry once; caches are updated in place.

        Args:
            inputs: Every input of the entry that it does not own, by role, in the dtype and shape
                of `Role`.
            outputs: Roles wanted. Work that only other outputs need is skipped; an empty sequence
                still updates what the entry owns.
            slot: Where the first sequence of the call is held; the others follow.

        Returns:
            The wanted outputs. The arrays may be reused by the next call: copy what must live on.
        """
        ...


@dataclass(frozen=True, slots=True)
class GreedyRound:
    """What a draft proposed and a target chose.

    Attributes:
        proposals: i64 `[N]`; empty if the draft took no part.
        chosen: i64, at least `[N + 1]`: row i is the target's token after the anchor and the first
            i proposals.
        confidence: f32 `[N]`, as of `Role.CONFIDENCE`; empty if the draft does not say.
    """

    proposals: IntArray
    chosen: IntArray
    confidence: FloatArray = field(default_factory=lambda: np.empty(0, dtype=np.float32))


class GreedyRounds(Protocol):
    """Greedy decoding of one sequence where the tokens are: on the device.

    A target's and a draft's executable with a shortcut between them: the target's taps become the
    draft's features, and the draft's proposals the target's tokens, without passing the host. What
    a round does to the caches is what the calls would do.
    """

    def run(
        self, following: IntArray, start: int, features: int, draft_length: int, replay: int = 0
    ) -> GreedyRound:
        """Draft, verify and choose.

        Where the target has states, the rows of a verification go to the log, and nothing is final
        until the next call replays them. The row of a round without the draft is final.

        Args:
            following: i64 `[max(features, 1)]`: the committed token after each row of features, or
                each new token itself; the last one is the anchor.
            start: Valid rows of the target's caches. All proposals of the draft are verified.
            features: New rows for the draft: how many of the first rows of HIDDEN_TAP, as the
                target's last call left them, it has to take; for one that reads tokens alone, how
                many of `following`, 1 or 2. 0 leaves out the draft: the target chooses one token.
            draft_length: Valid rows of the draft's caches.
            replay: Leading rows of the log that were accepted since; 0 for targets without states.
        """
        ...

    def features(self, rows: int) -> FloatArray:
        """The first rows of HIDDEN_TAP that the target's last call left, f32 `[1, rows, n*H]`."""
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


def greedy_rounds(engine: Engine) -> GreedyRounds | None:
    """The rounds of an engine that runs them on its device: its attribute `rounds`, if any."""
    rounds: GreedyRounds | None = getattr(engine, "rounds", None)
    return rounds


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
