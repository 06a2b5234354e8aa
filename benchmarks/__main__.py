"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter

from benchmarks import (
    acceptance,
    batch,
    engines,
    forms,
    host,
    memory,
    passes,
    quantization,
    speed,
    steps,
)
from benchmarks.pairs import Settings
from benchmarks.results import Result, load_average, machine, write_json

BENCHMARKS: Mapping[str, Callable[[Settings], Result]] = {
    "speed": speed.run,
    "acceptance": acceptance.run,
    "batch": batch.run,
    "steps": steps.run,
    "host": host.run,
    "memory": memory.run,
    "engines": engines.run,
    "forms": forms.run,
    "passes": passes.run,
    "quantization": quantization.run,
}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmarks named, print Markdown to stdout and write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure edgecc. Ratios within one run are the result: times depend on the "
        "machine and on what else it does.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--large",
        action="store_true",
        help="also measure a synthetic pair of the Qwen3-0.6B shape (1 GB on disk, 7 GB of memory)",
    )
    parser.add_argument(
        "--target", type=Path, help="BF16 checkpoint of the shipped target, for `quantization`"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each comparison (default 3)")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for files")
    parser.add_argument("--json", type=Path, help="default WORK/results.json")
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    settings = Settings(
        arguments.work, max(1, arguments.repeats), arguments.large, arguments.target
    )
    command = " ".join(["python -m benchmarks", *(argv if argv is not None else sys.argv[1:])])
    print(f"`{command}`\n\n{', '.join(f'{k} {v}' for k, v in machine().items())}\n")
    results, loads = [], [load_average()]
    for name in arguments.names or BENCHMARKS:
        begin = perf_counter()
        result = BENCHMARKS[name](settings)
        loads.append(load_average())
        results.append(result)
        for table in result.tables:
            print(table.markdown() + "\n")
        print(f"`{name}`: {perf_counter() - begin:.0f} s, load average {loads[-1]}\n", flush=True)
    path = arguments.json or settings.work / "results.json"
    write_json(path, results, command, loads)
    print(f"figures: {path}")


if __name__ == "__main__":
    main()
