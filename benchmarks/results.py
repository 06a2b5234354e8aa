"""What a benchmark returns, and how it is printed and written."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Table:
    """One table of results; cells are printed as they are."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """The table in Markdown, title and notes included."""
        lines = [f"### {self.title}", "", _row(self.columns), _row(["---"] * len(self.columns))]
        lines += [_row(row) for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Result:
    """Results of one benchmark.

    Attributes:
        name: Its name on the command line.
        tables: For people.
        data: Every figure, JSON-compatible; times in seconds, sizes in bytes.
    """

    name: str
    tables: Sequence[Table]
    data: dict[str, Any] = field(default_factory=dict)


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code; nothing that names the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        **{name: version(name) for name in ("onnxruntime", "numpy", "edgecc")},
    }


def load_average() -> float:
    """Runnable processes over the last minute: above 1 with nothing of ours running is noise."""
    return round(os.getloadavg()[0], 2)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles and minimum."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {
        "median": float(middle),
        "q25": float(low),
        "q75": float(high),
        "min": float(min(values)),
    }


def ratio(values: Sequence[float]) -> str:
    """Median ratio with its quartiles."""
    s = spread(values)
    return f"**{s['median']:.2f}** ({s['q25']:.2f} to {s['q75']:.2f})"


def write_json(path: Path, results: Sequence[Result], command: str, loads: Sequence[float]) -> None:
    """Write all results with the machine and the command."""
    document = {
        "command": command,
        "machine": machine(),
        "load_average": list(loads),
        "results": {r.name: r.data | {"tables": [asdict(t) for t in r.tables]} for r in results},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _row(cells: Sequence[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    fields = dict(
        line.split(":", 1) for line in text.split("\n\n")[0].replace("\t", "").splitlines()
    )
    flags = fields.get("flags", "").split()
    widest = next((f for f in ("avx512f", "avx2", "asimd") if f in flags), "no vector flags")
    return f"{fields.get('model name', platform.machine()).strip()} ({widest})"
