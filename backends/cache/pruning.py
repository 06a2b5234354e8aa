"""Keeping a cache small: what goes, whatever it is that lies there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Kept(Protocol):
    """What the cache keeps: an artifact, a bundle."""

    @property
    def path(self) -> Path:
        """Its folder."""

    @property
    def used_ns(self) -> int:
        """Time of the last use, nanoseconds since the epoch."""

    @property
    def title(self) -> str:
        """What it is, for people: `engine target.body for sm120`."""


@dataclass(frozen=True, slots=True)
class Found:
    """A folder of the cache.

    Attributes:
        path: Where it is.
        bytes: What it takes on the disk.
        entry: Its content; None if it is damaged.
        damage: In which way; empty if it is not.
        in_use: Whether a process holds it: it stays, whatever is asked for.
    """

    path: Path
    bytes: int
    entry: Kept | None = None
    damage: str = ""
    in_use: bool = False

    @property
    def used_ns(self) -> int:
        """Time of the last use; 0 if it is damaged."""
        return self.entry.used_ns if self.entry else 0


@dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning did.

    Attributes:
        removed: Entries that were removed, in this order.
        damaged: How many damaged entries were removed.
        leftovers: How many working directories of killed processes were removed.
        freed_bytes: The sizes of all these.
        kept: How many entries are left.
        kept_bytes: Their size.
    """

    removed: tuple[Kept, ...]
    damaged: int
    leftovers: int
    freed_bytes: int
    kept: int
    kept_bytes: int


class Shelf(Protocol):
    """A directory of entries of one kind."""

    def scan(self) -> list[Found]:
        """All entries, whole or damaged."""

    def sweep(self) -> tuple[int, int]:
        """Remove what killed processes have left; returns how many folders, and bytes."""

    def remove(self, path: Path) -> bool:
        """Remove an entry; False if it is gone already, or in use."""


def prune(
    shelves: Sequence[Shelf],
    *,
    max_bytes: int,
    older_than_s: float | None = None,
    everything: bool = False,
) -> Pruned:
    """Remove what was left by killed processes, what is damaged, and what is too much.

    Args:
        shelves: Where to look.
        max_bytes: Remove what was not used for longest until the rest is this small.
        older_than_s: Remove entries that were not used for so many seconds.
        everything: Remove all entries.

    Raises:
        OSError: A directory cannot be read, or something cannot be removed.
    """
    swept = [shelf.sweep() for shelf in shelves]
    freed = sum(nbytes for _, nbytes in swept)
    found = [(shelf, item) for shelf in shelves for item in shelf.scan()]
    found.sort(key=lambda pair: (pair[1].used_ns, pair[1].path.name))
    total = sum(item.bytes for _, item in found)
    latest_ns = time.time_ns() - int((older_than_s or 0) * 1e9)
    removed: list[Kept] = []
    kept = damaged = 0
    for shelf, item in found:
        expired = older_than_s is not None and item.used_ns < latest_ns
        wanted = item.entry and not (everything or expired or total > max_bytes)
        if wanted or item.in_use:
            kept += 1
            continue
        total -= item.bytes
        if shelf.remove(item.path):
            freed += item.bytes
            damaged += item.entry is None
            removed += [item.entry] if item.entry else []
    return Pruned(tuple(removed), damaged, sum(n for n, _ in swept), freed, kept, total)
