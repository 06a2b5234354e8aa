"""Memory that can be taken, from the files of machines of several kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgecc.backends.memory import available_bytes

MEMINFO = "MemTotal:       24684000 kB\nMemAvailable:   20000000 kB\n"
MACHINE = 20000000 * 1024


def root(folder: Path, **files: str) -> Path:
    """A file system with files by their paths, `_` for `/`."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert available_bytes(root(tmp_path, proc__meminfo=MEMINFO)) == MACHINE


def test_nothing_tells(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    assert available_bytes(root(tmp_path, proc__meminfo="MemAvailable: much\n")) is None


@pytest.mark.parametrize(
    ("limit", "current", "stat", "expected"),
    [
        ("max", "5", "", MACHINE),
        ("8000000000", "3000000000", "", 5000000000),
        ("8000000000", "3000000000", "active_file 400\ninactive_file 600\n", 5000001000),
        ("8000000000", "9000000000", "", 0),
        ("9223372036854771712", "5", "", MACHINE),
    ],
)
def test_a_limit_of_the_second_version(
    tmp_path: Path, limit: str, current: str, stat: str, expected: int
) -> None:
    files = {"memory.max": limit, "memory.current": current, "memory.stat": stat}
    made = root(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="0::/a/b\n",
        **{f"sys__fs__cgroup__a__{name}": text for name, text in files.items()},
    )
    assert available_bytes(made) == expected


def test_a_limit_of_the_first_version(tmp_path: Path) -> None:
    made = root(
        tmp_path,
        proc__meminfo=MEMINFO,
        proc__self__cgroup="9:cpu:/x\n4:memory:/pod\n",
        **{
            "sys__fs__cgroup__memory__memory.limit_in_bytes": "7000",
            "sys__fs__cgroup__memory__memory.usage_in_bytes": "1000",
            "sys__fs__cgroup__memory__pod__memory.limit_in_bytes": "9000",
            "sys__fs__cgroup__memory__pod__memory.usage_in_bytes": "4000",
        },
    )
    assert available_bytes(made) == 5000


def test_this_machine() -> None:
    found = available_bytes()
    assert found is None or found > 0
