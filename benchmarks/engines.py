"""`engines`: time, memory and size of building TensorRT engines.

With weights and head placed both ways, and once more from the cache.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any

import edgecc
from benchmarks.pairs import Settings, checkpoints, manifest
from benchmarks.results import Result, Table
from edgecc.backends.cache import ArtifactCache

DEVICE = "sm120"
CASES = (("embed", "share"), ("embed", "copy"), ("bind", "share"), ("bind", "copy"))
"""Choices of `--weights` and `--lm-head`."""

OPTIONS: dict[str, Any] = {"max_model_len": 2048, "verify": "none"}

KNOWN = (
    ("NVFP4, head dense", "1", "8.9", "3201", "843", "860"),
    ("NVFP4, no head", "1", "8.4", "2250", "531", "548"),
    ("NVFP4, no head", "2", "16.1", "2447", "531", "563"),
    ("BF16, head tied", "1", "8 to 11", "4435", "1192", "1215"),
)
"""One bare network of the Qwen3-0.6B shape for sm120 with TensorRT-RTX 1.7.1, built by a script
without a compiler around it: profiles, seconds, peak RSS in MB (mapped pages counted), MB of
weights and of the plan. All layers had the same block scales, which the plan then held once."""


def run(settings: Settings) -> Result:
    """Build every pair for each case in a process of its own, and once more from the cache."""
    rows, data = [], {}
    for pair in settings.pairs:
        encoded = _encoded_bytes(checkpoints(pair, settings.work))
        for weights, head in CASES:
            out = settings.work / "bundles" / f"{pair}-{DEVICE}-{weights}-{head}"
            cache = out.with_name(f"{out.name}-cache")
            shutil.rmtree(cache, ignore_errors=True)
            made = _measured(pair, weights, head, out, settings.work)
            again = _measured(pair, weights, head, out, settings.work)
            shutil.rmtree(cache)
            sizes = _sizes(out)
            rows.append(_row(pair, weights, head, made, again, sizes, encoded))
            data[f"{pair}, {weights}, {head}"] = {
                "build": made,
                "again": again,
                "checkpoint_bytes": encoded,
                **sizes,
            }
    tables = [Table(f"Engines for {DEVICE} (measured)", _COLUMNS, rows, _NOTES)]
    columns = ("network", "profiles", "s", "peak RSS MB", "weights MB", "plan MB")
    tables.append(Table("One network of the 0.6B shape, built by hand (given)", columns, KNOWN))
    return Result("engines", tables, data)


_COLUMNS = (
    "pair",
    "weights",
    "lm_head",
    "s",
    "CPU s",
    "from cache CPU s",
    "estimated s",
    "peak MB",
    "peak RSS MB",
    "estimated MB",
    "plans MB",
    "weights in them MB",
    "ratio",
    "bundle / checkpoint",
)
_NOTES = (
    "s: the whole compile without a check of numbers; engines are built one after the other, on "
    "one core, so CPU s is what they take on a machine that does nothing else",
    "from cache: the same compile again; its bundle has the same bytes",
    "peak MB: anonymous memory of all processes of the compile (PSS), so mapped files are not "
    "counted; peak RSS MB: of the largest process, with mapped files; in 10^6 bytes",
    "estimated: what the compiler said before; memory is that of the largest engine",
    "ratio: bytes of the plans over bytes of the weights in them; kernels are the difference",
    "bundle / checkpoint: plans and weight file over the encoded tensors of both checkpoints",
)


def _row(
    pair: str,
    weights: str,
    head: str,
    made: dict[str, Any],
    again: dict[str, Any],
    sizes: dict[str, int],
    encoded: int,
) -> list[str]:
    held, plans = sizes["embedded_bytes"], sizes["plan_bytes"]
    return [
        pair,
        weights,
        head,
        f"{made['seconds']:.1f}",
        f"{made['cpu_seconds']:.1f}",
        f"{again['cpu_seconds']:.1f}",
        f"{made['estimated_seconds']:.0f}",
        _mb(made["peak"]),
        _mb(made["peak_rss"]),
        _mb(made["estimated_bytes"]),
        _mb(plans),
        _mb(held),
        f"{plans / held:.3f}" if held else "-",
        f"{(plans + sizes['weight_file_bytes']) / encoded:.3f}",
    ]


def _mb(value: float) -> str:
    return f"{value / 1e6:.0f}"


def _encoded_bytes(folders: tuple[Path, Path]) -> int:
    """Bytes of all tensors of two checkpoints."""
    files = [p for folder in folders for p in folder.glob("*.safetensors")]
    return sum(p.stat().st_size for p in files)


def _sizes(out: Path) -> dict[str, int]:
    made = manifest(out)
    engines = made["artifacts"][DEVICE]["engines"].values()
    files = made["files"]
    plans = {e["file"]: e["bytes"] for e in engines}  # graphs of equal layers have one
    return {
        "plan_bytes": sum(plans.values()),
        "embedded_bytes": sum(e["weight_bytes"] for e in engines),
        "weight_file_bytes": sum(
            f["bytes"] for name, f in files.items() if name.startswith("weights/")
        ),
        "bundle_bytes": sum(f["bytes"] for f in files.values()),
    }


def _measured(pair: str, weights: str, head: str, out: Path, work: Path) -> dict[str, Any]:
    arguments = [pair, weights, head, str(out), str(work)]
    command = [sys.executable, "-m", "benchmarks.engines", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with FamilyPeak(process.pid) as peak:
        text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    figures: dict[str, Any] = json.loads(text.splitlines()[-1])
    return figures | {"peak": peak.bytes, "peak_rss": peak.rss}


class FamilyPeak:
    """Watches the memory of a process and its children from a thread (Linux).

    Args:
        pid: The process.
        seconds: Between two looks. One costs time where much memory is mapped.

    Attributes:
        bytes: Most anonymous memory of all of them.
        rss: Most resident memory of one of them.
    """

    def __init__(self, pid: int, seconds: float = 0.05) -> None:
        self.pid = pid
        self.seconds = seconds
        self.bytes = self.rss = 0

    def __enter__(self) -> FamilyPeak:
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(self.seconds):
            found = [_memory(pid) for pid in _family(self.pid)]
            self.bytes = max(self.bytes, sum(anonymous for anonymous, _ in found))
            self.rss = max([self.rss, *(rss for _, rss in found)])


def _family(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split():
                yield from _family(int(child))


def _memory(pid: int) -> tuple[int, int]:
    """Anonymous bytes, those shared by several processes in parts, and all resident bytes."""
    fields: dict[str, int] = {}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, _, value = line.partition(":")
            fields[name] = 1024 * int(value.split()[0])
    return fields.get("Pss_Anon", 0), fields.get("Rss", 0)


def main(arguments: list[str]) -> None:
    """Compile one case in this process and print the figures as JSON."""
    pair, weights, head, out, work = arguments
    target, draft = checkpoints(pair, Path(work))
    begin = perf_counter()
    report = edgecc.compile(
        target,
        draft,
        out=out,
        force=True,
        device=DEVICE,
        weights=weights,
        lm_head=head,
        cache=ArtifactCache(Path(f"{out}-cache")),
        **OPTIONS,
    )
    figures = {
        "seconds": perf_counter() - begin,
        "cpu_seconds": _cpu_seconds(),
        "estimated_seconds": sum(e.estimated_seconds for e in report.engines),
        "estimated_bytes": max(e.estimated_bytes for e in report.engines),
        "engines": {
            e.name: {"seconds": e.seconds, "estimated_seconds": e.estimated_seconds}
            for e in report.engines
        },
        "builder": _builder(),
    }
    print(json.dumps(figures))


def _cpu_seconds() -> float:
    """Of this process and of all that it has waited for."""
    used = (resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def _builder() -> str:
    try:
        return f"tensorrt_rtx {version('tensorrt_rtx')}"
    except PackageNotFoundError:
        return "tensorrt_rtx"


if __name__ == "__main__":
    main(sys.argv[1:])
