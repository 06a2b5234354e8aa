"""Compiles the synthetic 27B pair, one device after the other, and says what that took.

Random weights in the shapes, names and encodings of Qwen3.8-27B (FP8 and NVFP4), and of either
revision of its DSpark draft. Bundles are removed when they have been measured: the checkpoints take
26 GB, a bundle 24 GB. `--layers 8` makes a target of the same widths that takes a third of it.

    python -m benchmarks.large_pair --work /large/disk
    python -m benchmarks.large_pair --work /large/disk --layers 8 --device sm120
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.engines import FamilyPeak
from benchmarks.pairs import manifest
from benchmarks.results import Result, Table, load_average, machine, write_json
from benchmarks.synthetic import write_preset

TARGET = "qwen3.8-27b"
DRAFTS = {"current": f"{TARGET}-dspark", "first": f"{TARGET}-dspark-first"}
"""Revisions of the draft: two networks under one name."""

_COLUMNS = (
    "device",
    "s",
    "CPU s",
    "peak MB",
    "peak RSS MB",
    "plans",
    "plans MB",
    "weight file MB",
    "bundle / checkpoints",
    "shared MB",
    "to run MB",
)
_NOTES = (
    "the whole command, `--verify none` unless asked for otherwise; other work on the machine "
    "lengthens s, and CPU s far less",
    "peak MB: anonymous memory of all processes of the compile; peak RSS: with mapped files",
    "plans: files of engines; graphs of equal layers have one",
    "shared: bytes of head and embedding that the draft would need for itself",
    "to run: computed, what `--dry-run` says",
)


def run(work: Path, draft: str, layers: int | None, devices: list[str], flags: list[str]) -> Result:
    """Make the checkpoints that are missing, compile for each device, and measure.

    Args:
        work: Folder for checkpoints and bundles.
        draft: A key of `DRAFTS`.
        layers: Of the target; all of them if None.
        devices: Names of devices.
        flags: Further arguments of `edgecc compile`.
    """
    folders = _checkpoints(work, draft, layers)
    encoded = sum(p.stat().st_size for f in folders for p in f.glob("*.safetensors"))
    rows, data = [], {}
    for device in devices:
        out = work / f"bundle-{device}"
        found = _compiled(folders, out, device, flags) | {"checkpoint_bytes": encoded}
        shutil.rmtree(out)
        rows.append(_row(device, found))
        data[device] = found
    title = f"{TARGET}, {layers or 'all'} layers, {draft} draft, `{' '.join(flags)}` (measured)"
    return Result("large-pair", [Table(title, _COLUMNS, rows, _NOTES)], data)


def _checkpoints(work: Path, draft: str, layers: int | None) -> tuple[Path, Path]:
    made = []
    for name, sizes in (
        (TARGET, {"layers": layers}),
        (DRAFTS[draft], {"target_layers": layers}),
    ):
        folder = work / f"{name}-{layers or 'all'}"
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            write_preset(name, partial, **sizes).rename(folder)
        made.append(folder)
    return made[0], made[1]


def _compiled(
    folders: tuple[Path, Path], out: Path, device: str, flags: list[str]
) -> dict[str, Any]:
    target, draft = map(str, folders)
    command = [sys.executable, "-m", "edgecc", "compile", target, "--draft", draft, "-o", str(out)]
    command += ["--device", device, "--no-cache", "--json", "--progress", "plain", *flags]
    begin, before = perf_counter(), _cpu_seconds()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with FamilyPeak(process.pid, seconds=1.0) as peak:
        text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    report, made = json.loads(text), manifest(out)
    engines = made["artifacts"][device].get("engines", {}).values()
    files = made["files"]
    return {
        "seconds": perf_counter() - begin,
        "cpu_seconds": _cpu_seconds() - before,
        "peak": peak.bytes,
        "peak_rss": peak.rss,
        "plans": {e["file"]: e["bytes"] for e in engines},
        "graphs": len(engines),
        "weight_file_bytes": sum(f["bytes"] for n, f in files.items() if n.startswith("weights/")),
        "bundle_bytes": sum(f["bytes"] for f in files.values()),
        "shared_bytes": sum(item["bytes"] for item in made["shared"]),
        "memory": report["memory"],
        "engines": report["engines"],
    }


def _cpu_seconds() -> float:
    """Of all processes that were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _row(device: str, found: dict[str, Any]) -> list[str]:
    def mb(value: float) -> str:
        return f"{value / 1e6:.0f}"

    return [
        device,
        f"{found['seconds']:.0f}",
        f"{found['cpu_seconds']:.0f}",
        mb(found["peak"]),
        mb(found["peak_rss"]),
        str(len(found["plans"])),
        mb(sum(found["plans"].values())),
        mb(found["weight_file_bytes"]),
        f"{found['bundle_bytes'] / found['checkpoint_bytes']:.3f}",
        mb(found["shared_bytes"]),
        mb(found["memory"][0]["total_bytes"]),
    ]


def main(argv: list[str] | None = None) -> None:
    """Print the table and write the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.large_pair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for files")
    parser.add_argument("--draft", choices=DRAFTS, default="current", help="revision of the draft")
    parser.add_argument("--layers", type=int, metavar="N", help="the target's first N layers")
    parser.add_argument("--device", action="append", help="default: cpu, then sm120")
    parser.add_argument("--verify", default="none", choices=["none", "fast", "full"])
    parser.add_argument("--max-model-len", type=int, default=65536)
    parser.add_argument("--max-input-len", type=int, default=32768)
    parser.add_argument("--max-batch-size", type=int, default=1)
    given = parser.parse_args(argv)
    flags = ["--verify", given.verify, "--max-model-len", str(given.max_model_len)]
    flags += ["--max-input-len", str(given.max_input_len)]
    flags += ["--max-batch-size", str(given.max_batch_size)]
    given.work.mkdir(parents=True, exist_ok=True)
    loads = [load_average()]
    devices = given.device or ["cpu", "sm120"]
    result = run(given.work, given.draft, given.layers, devices, flags)
    loads.append(load_average())
    command = " ".join(["python -m benchmarks.large_pair", *(argv or sys.argv[1:])])
    print(f"`{command}`\n\n{', '.join(f'{k} {v}' for k, v in machine().items())}, load {loads}\n")
    print(result.tables[0].markdown())
    write_json(given.work / "large-pair.json", [result], command, loads)


if __name__ == "__main__":
    main()
