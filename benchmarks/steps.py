"""`steps`: time of a plain step, a draft call and a verification, and what follows from them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.pairs import SHIPPED, Settings, bundle, manifest
from benchmarks.results import Result, Table, spread
from edgecc.backends.base import Array, Executable, Role
from edgecc.backends.bundle import Bundle
from edgecc.backends.onnxruntime import OrtEngine, open_engine

PAST = 256
"""Rows in the caches before each measured call."""
CONTEXT = 4
"""New context rows of a draft call: what a round with three accepted proposals leaves."""


@dataclass(slots=True)
class Calls:
    """Single calls of a bundle's executables on random tokens: times do not depend on which.

    Attributes:
        engine: The open engine.
        target: Its target entry.
        draft: Its draft entry.
        ids: Token ids `[1, PAST]`.
        features: What the target hands to the draft for 64 rows.
    """

    engine: OrtEngine
    target: Executable
    draft: Executable
    ids: Array
    features: Array

    @classmethod
    def open(cls, path: Path, threads: int | None = None) -> Calls:
        """Open a bundle and fill its caches.

        Args:
            path: The bundle.
            threads: Threads of the engine; None leaves it to the engine.
        """
        opened = Bundle.open(path)
        engine = open_engine(opened, opened.artifact("cpu"), num_threads=threads)
        count = int(manifest(path)["target"]["num_tokens"])
        ids = np.random.default_rng(0).integers(0, count, (1, PAST))
        calls = cls(engine, engine.entry("target"), engine.entry("draft"), ids, ids)
        for start in range(0, PAST, 64):
            calls.features = calls.verify(64, start=start)[Role.HIDDEN_TAP].copy()
            calls.propose(64, start=start)
        return calls

    def plain(self) -> dict[Role, Array]:
        """A step of one token."""
        return self._target(1, PAST, (Role.LOGITS,))

    def verify(self, rows: int, start: int = PAST) -> dict[Role, Array]:
        """A verification of `rows - 1` proposals."""
        return self._target(rows, start, (Role.LOGITS, Role.HIDDEN_TAP))

    def prefill(self, rows: int) -> dict[Role, Array]:
        """A prompt call that wants the last logits only."""
        return self._target(rows, 0, (Role.LOGITS,), np.array([rows - 1]))

    def propose(self, rows: int = CONTEXT, start: int = PAST) -> dict[Role, Array]:
        """A draft call with `rows` new context rows."""
        inputs = {
            Role.FEATURES: self.features[:, :rows],
            Role.ANCHOR: self.ids[0, :1],
            Role.CACHE_LENGTH: np.array([start]),
        }
        return self.draft.run(inputs, (Role.PROPOSALS,))

    def _target(
        self, rows: int, start: int, outputs: tuple[Role, ...], logits: Array | None = None
    ) -> dict[Role, Array]:
        inputs = {
            Role.TOKEN_IDS: self.ids[:, :rows],
            Role.CACHE_LENGTH: np.array([start]),
            Role.LOGIT_ROWS: np.arange(rows) if logits is None else logits,
        }
        return self.target.run(inputs, outputs)


def alternate(
    calls: Mapping[str, Callable[[], object]], repeats: int, inner: int = 3
) -> dict[str, list[float]]:
    """Seconds of each call, round robin.

    Args:
        calls: By name.
        repeats: Rounds after a warm-up.
        inner: Calls in a row per round; the fastest counts, because only others can slow it down.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            best = min(_seconds(call) for _ in range(inner + (round_ == 0)))
            if round_:
                times[name].append(best)
    return times


def run(settings: Settings) -> Result:
    """Step times of each pair."""
    tables, data = [], {}
    for pair, options in _variants(settings):
        path = bundle(pair, settings.work, **options)
        calls = Calls.open(path)
        block = manifest(path)["draft"]["num_speculative_tokens"]
        cases: dict[str, Callable[[], object]] = {"plain": calls.plain, "draft": calls.propose}
        for count in range(1, block + 1):
            cases[f"verify{count}"] = _verification(calls, count)
        repeats = 20 * settings.repeats if pair == SHIPPED else 3 * settings.repeats
        times = alternate(cases, repeats)
        calls.engine.close()
        limit = weight_bytes(path, "target"), memory_rate(len(os.sched_getaffinity(0)))
        tables += _tables(path.name, times, block, _limit_note(times["plain"], *limit))
        data[path.name] = {
            "times": {name: spread(values) for name, values in times.items()},
            "target_weight_bytes": limit[0],
            "memory_bytes_per_second": limit[1],
        }
    return Result("steps", tables, data)


def weight_bytes(path: Path, entry: str) -> int:
    """Bytes of the float32 matrices that one call of an entry reads: a model runs once per step."""
    artifact = manifest(path)["artifacts"]["cpu"]
    tensors = artifact["tensors"]
    total = 0
    for step in artifact["programs"][entry]:
        for item in artifact["models"][step["graph"]]["expand"]:
            tensor = tensors[item["parts"]["weight"]]
            per_element = 8 if tensor["dtype"] == "U8" else 4  # two NVFP4 codes a byte
            total += per_element * prod(tensor["shape"])
    return total


def memory_rate(threads: int) -> float:
    """Bytes per second at which threads read arrays that fit no cache."""
    arrays = [np.ones(128 << 20, dtype=np.float32) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:

        def read() -> object:
            return list(pool.map(np.max, arrays))  # the reduction runs outside the interpreter lock

        seconds = min(_seconds(read) for _ in range(5))
    return sum(a.nbytes for a in arrays) / seconds


def _variants(settings: Settings) -> list[tuple[str, dict[str, int]]]:
    """Each pair; large ones also compiled for fewer proposals, which shortens the draft's chain."""
    large = [pair for pair in settings.pairs if pair != SHIPPED]
    return [
        *((pair, {}) for pair in settings.pairs),
        *((pair, {"num_speculative_tokens": 3}) for pair in large),
    ]


def _verification(calls: Calls, count: int) -> Callable[[], object]:
    return lambda: calls.verify(count + 1)


def _seconds(call: Callable[[], object]) -> float:
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _limit_note(plain: list[float], weights: int, rate: float) -> str:
    seconds = weights / rate
    return (
        f"a plain step reads {weights / 1e6:.0f} MB of float32 weights: {1e3 * seconds:.1f} ms, or "
        f"{seconds / float(np.median(plain)):.0%} of the step, at the {rate / 1e9:.1f} GB/s with "
        "which all cores read memory in this run; weights that fit the cache can be faster"
    )


def _tables(pair: str, times: Mapping[str, list[float]], block: int, limit: str) -> list[Table]:
    plain = np.array(times["plain"])
    draft = np.array(times["draft"])
    rows, gains = [], []
    for count in range(1, block + 1):
        verify = np.array(times[f"verify{count}"])
        relative = float(np.median((verify + draft) / plain))
        rows.append(
            [
                count,
                f"**{relative:.2f}**",
                f"{np.median(verify / plain):.2f}",
                f"{np.median(draft / plain):.2f}",
                f"{1e3 * np.median(plain):.1f}",
                f"{1e3 * np.median(verify):.1f}",
                f"{1e3 * np.median(draft):.1f}",
            ]
        )
        gains.append([count, *_gains(relative, count, block)])
    measured = Table(
        f"{pair}: step times (measured) and break-even acceptance length",
        ("N", "break-even", "verify / plain", "draft / plain", "plain ms", "verify ms", "draft ms"),
        rows,
        (
            f"{PAST} rows in the caches, {CONTEXT} new context rows per draft call; median over "
            "rounds of the fastest of three calls",
            "break-even: tokens per step above which speculation wins, (verify + draft) / plain",
            limit,
        ),
    )
    computed = Table(
        f"{pair}: speed against plain decoding by acceptance length "
        "(computed from the step times, not measured)",
        ("N", *(f"{length} per step" for length in range(1, block + 2))),
        gains,
        ("host time, below a few percent, is left out: see `host`",),
    )
    return [measured, computed]


def _gains(relative: float, count: int, block: int) -> list[str]:
    lengths = range(1, block + 2)
    return [f"{length / relative:.2f}" if length <= count + 1 else "" for length in lengths]
