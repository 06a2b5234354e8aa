"""How much memory a process may still take: what the machine has, and what its container allows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60


def available_bytes(root: Path = _ROOT) -> int | None:
    """Bytes that can be taken without swapping; None where nothing tells.

    The least of `MemAvailable` (Linux: free, and what can be dropped from caches) and of what the
    control groups of this process leave (cgroup v2 `memory.max`, v1 `memory.limit_in_bytes`, of
    the group and all above it; file pages in use there can be dropped as well).

    Args:
        root: The root of the file system, another one in tests.
    """
    found = [*_machine(root), *_groups(root)]
    return max(0, min(found)) if found else None


def _machine(root: Path) -> Iterator[int]:
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                yield 1024 * int(line.split()[1])


def _groups(root: Path) -> Iterator[int]:
    """What the limits of each control group leave."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, place = (*line.split(":", 2), "", "")[:3]
            if number == "0" and not controllers:
                base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
            elif "memory" in controllers.split(","):
                base = root / "sys/fs/cgroup/memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            else:
                continue
            folder = base / place.lstrip("/")
            for group in (folder, *folder.parents):
                yield from _left(group, *names)
                if group == base:
                    break


def _left(group: Path, limit: str, usage: str) -> Iterator[int]:
    """The limit of one group less what is used and cannot be dropped; nothing if it has none."""
    with suppress(OSError, ValueError):
        most = int((group / limit).read_text())  # "max" is no number: no limit
        if most >= _UNLIMITED:
            return
        used, dropped = int((group / usage).read_text()), 0
        with suppress(OSError, ValueError):
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            dropped = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
        yield most - used + dropped
