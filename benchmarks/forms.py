"""`forms`: quantized linear layers as float32 and as 8-bit codes (`--linear-form`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.pairs import SHIPPED, Settings, bundle
from benchmarks.results import Result, Table, spread
from benchmarks.steps import Calls, alternate
from edgecc.backends.base import Role

FORMS = ("dense", "int8-split")
ROWS = (1, 2, 4, 8)
PREFILL = 64


def run(settings: Settings) -> Result:
    """Both forms side by side, with one thread and with two."""
    tables, data = [], {}
    for pair in settings.pairs:
        paths = [bundle(pair, settings.work, linear_form=form) for form in FORMS]
        repeats = 10 * settings.repeats if pair == SHIPPED else 2 * settings.repeats
        rows = []
        for threads in (1, 2):
            found = _compare(paths, threads, repeats)
            data[f"{pair}, {threads} threads"] = found
            rows += _rows(threads, found)
        tables.append(_table(pair, rows))
    return Result("forms", tables, data)


def _compare(paths: Sequence[Path], threads: int, repeats: int) -> dict[str, Any]:
    opened = [Calls.open(path, threads) for path in paths]
    logits = [c.verify(8)[Role.LOGITS].astype(np.float64) for c in opened]
    error = float(np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max())
    cases: dict[str, Callable[[], object]] = {}
    for rows in (*ROWS, PREFILL):
        for form, calls in zip(FORMS, opened, strict=True):
            call = partial(calls.prefill, rows) if rows == PREFILL else partial(calls.verify, rows)
            cases[f"{form} {rows}"] = call if rows > 1 else calls.plain
    times = alternate(cases, repeats, inner=2)
    for calls in opened:
        calls.engine.close()
    return {
        "times": {name: spread(values) for name, values in times.items()},
        "ratios": {
            str(rows): spread(
                np.array(times[f"{FORMS[1]} {rows}"]) / np.array(times[f"{FORMS[0]} {rows}"])
            )
            for rows in (*ROWS, PREFILL)
        },
        "logits_error": error,
    }


def _rows(threads: int, found: dict[str, Any]) -> list[list[object]]:
    made = []
    for form in FORMS:
        cells: list[object] = [threads, form]
        for rows in (*ROWS, PREFILL):
            cell = f"{1e3 * found['times'][f'{form} {rows}']['median']:.1f}"
            if form == FORMS[1]:
                cell += f" (**{found['ratios'][str(rows)]['median']:.2f}**)"
            cells.append(cell)
        error = f"{found['logits_error']:.1e}" if form == FORMS[1] else "0"
        made.append([*cells, error])
    return made


def _table(pair: str, rows: Sequence[Sequence[object]]) -> Table:
    return Table(
        f"{pair}: forms of quantized linear layers (measured)",
        (
            "threads",
            "form",
            *(f"{r} row{'s' if r > 1 else ''} ms" for r in ROWS),
            f"prefill {PREFILL} ms",
            "logits error",
        ),
        rows,
        (
            "in brackets: median ratio to the dense form",
            "`memory` has the resident memory of both",
            "logits error: largest difference to the dense form, relative to the largest logit",
        ),
    )
