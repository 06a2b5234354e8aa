"""`host`: what one step costs outside the engine's own work."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

import edgecc
from benchmarks.pairs import SHIPPED, Settings, bundle, prompts
from benchmarks.results import Result, Table
from benchmarks.steps import Calls

CALLS = 300


def run(settings: Settings) -> Result:
    """Host time per round of generations, and Python time per call of an executable."""
    path = bundle(SHIPPED, settings.work)
    calls = Calls.open(path)
    overhead = {
        "target call, 8 rows": _overhead(calls.target, lambda: calls.verify(8)),
        "draft call": _overhead(calls.draft, calls.propose),
    }
    calls.engine.close()
    with edgecc.load(path) as generator:
        rounds = {
            "plain round": _round(generator, speculation=False),
            "speculative round": _round(generator),
        }
    rows = [
        [name, f"{1e6 * seconds:.0f}", f"{1e6 * whole:.0f}", f"**{seconds / whole:.1%}**"]
        for name, (seconds, whole) in (overhead | rounds).items()
    ]
    table = Table(
        "Shipped pair: time outside ONNX Runtime (measured)",
        ("what", "outside us", "whole us", "share"),
        rows,
        (
            "calls: Python time of `OrtExecutable.run` with its sessions left out, and whole call",
            "rounds: acceptance, text and stop rules (`host_seconds`), and whole round; they do "
            "not include the rows above",
            "medians",
        ),
    )
    data = {name: {"outside": a, "whole": b} for name, (a, b) in (overhead | rounds).items()}
    return Result("host", [table], data)


def _overhead(executable: Any, call: Callable[[], object]) -> tuple[float, float]:
    """Median seconds of a call without its sessions, and of the whole call."""
    call()
    whole = _median(call)
    plan = next(reversed(executable._plans.values()))  # that of the call just made
    steps, plan.steps = plan.steps, []
    try:
        return _median(call), whole
    finally:
        plan.steps = steps


def _median(call: Callable[[], object]) -> float:
    times = []
    for _ in range(CALLS):
        begin = perf_counter()
        call()
        times.append(perf_counter() - begin)
    return float(np.median(times))


def _round(generator: Any, **options: Any) -> tuple[float, float]:
    """Median host seconds and whole seconds per round."""
    host, whole = [], []
    for ids in prompts(generator.tokenizer).values():
        for _ in range(2):
            stats = generator.generate(token_ids=ids, max_new_tokens=64, **options).stats
        host.append(stats.host_seconds / stats.rounds)
        whole.append(stats.decode_seconds / stats.rounds)
    return float(np.median(host)), float(np.median(whole))
