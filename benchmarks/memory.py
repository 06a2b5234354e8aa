"""`memory`: time and memory of compiling and loading, with the head shared and copied."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import edgecc
from benchmarks.pairs import Settings, checkpoints, compile_options, manifest
from benchmarks.results import Result, Table

VARIANTS = (("share", "dense"), ("copy", "dense"), ("share", "int8-split"))
"""Choices of `--lm-head` and `--linear-form`."""


def run(settings: Settings) -> Result:
    """Compile and load every pair in fresh processes."""
    rows, data = [], {}
    for pair in settings.pairs:
        checkpoints(pair, settings.work)
        for head, form in VARIANTS:
            out = settings.work / "bundles" / f"{pair}-{head}-{form}"
            made = _measured("compile", pair, head, form, out, settings.work)
            opened = _measured("load", pair, head, form, out, settings.work)
            size = sum(f["bytes"] for f in manifest(out)["files"].values())
            rows.append(
                [
                    pair,
                    head,
                    form,
                    f"{made['seconds']:.1f}",
                    _mb(made["peak"]),
                    _mb(size),
                    f"{opened['seconds']:.1f}",
                    _mb(opened["peak"]),
                    _mb(opened["resident"]),
                ]
            )
            data[f"{pair}, {head}, {form}"] = {
                "compile": made,
                "load": opened,
                "bundle_bytes": size,
            }
    table = Table(
        "Compile and load (measured)",
        (
            "pair",
            "lm_head",
            "linear form",
            "compile s",
            "peak MB",
            "bundle MB",
            "load s",
            "load peak MB",
            "resident MB",
        ),
        rows,
        (
            "a fresh process each; memory is anonymous (RssAnon), in 10^6 bytes: mapped files are "
            "not counted, the interpreter and its modules are",
            "the shipped pair is compiled with the default check against the reference, larger "
            "ones with `verify=none`, `max_model_len=1024`",
            "resident: after load and one generated token",
        ),
    )
    return Result("memory", [table], data)


def _mb(value: float) -> str:
    return f"{value / 1e6:.0f}"


def _measured(what: str, pair: str, head: str, form: str, out: Path, work: Path) -> dict[str, Any]:
    arguments = [what, pair, head, form, str(out), str(work)]
    command = [sys.executable, "-m", "benchmarks.memory", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def anonymous_bytes() -> int:
    """Anonymous resident memory of this process (Linux)."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise SystemExit("this benchmark needs Linux: /proc/self/status has no RssAnon")


class _Peak:
    """Watches anonymous memory from a thread while a block runs."""

    def __enter__(self) -> _Peak:
        self.bytes = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes())


def _timed(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    with _Peak() as peak:
        begin = perf_counter()
        made = work()
        seconds = perf_counter() - begin
    return made, {"seconds": seconds, "peak": peak.bytes, "resident": anonymous_bytes()}


def main(arguments: list[str]) -> None:
    """Measure one step in this process and print the figures as JSON."""
    what, pair, head, form, out, work = arguments
    if what == "compile":
        target, draft = checkpoints(pair, Path(work))
        options = compile_options(pair) | {"lm_head": head, "linear_form": form}
        _, figures = _timed(lambda: edgecc.compile(target, draft, out=out, force=True, **options))
    else:
        generator, figures = _timed(lambda: edgecc.load(out))
        generator.generate(token_ids=[1, 2, 3], max_new_tokens=2)
        figures["resident"] = anonymous_bytes()
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
