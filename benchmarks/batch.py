"""`batch`: several sequences decoded together against the same one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import edgecc
from benchmarks.pairs import SHIPPED, Settings, bundle, prompts
from benchmarks.results import Result, Table, ratio, spread

NEW_TOKENS = 64
SEQUENCES = 8
SIZES = (1, 2, 4, 8)
MODES: Mapping[str, Mapping[str, Any]] = {
    "plain": {"speculation": False},
    "speculative": {},
}


def run(settings: Settings) -> Result:
    """Tokens per second of eight requests, by how many are decoded at a time."""
    rows: list[list[object]] = []
    data: dict[str, Any] = {}
    for size in SIZES:
        path = bundle(SHIPPED, settings.work, max_batch_size=size)
        with edgecc.load(path) as generator:
            ids = list(prompts(generator.tokenizer).values())[:SEQUENCES]
            for mode, options in MODES.items():
                ratios, speeds = _compare(generator, ids, options, settings.repeats)
                figures = {"ratio": spread(ratios), "tokens_per_second": spread(speeds)}
                data[f"{size} {mode}"] = figures
                speed = f"{figures['tokens_per_second']['median']:.0f}"
                rows.append([size, mode, ratio(ratios), speed])
    return Result("batch", [_table(rows, settings.repeats)], data)


def _compare(
    generator: Any, prompts: Sequence[Sequence[int]], options: Mapping[str, Any], repeats: int
) -> tuple[list[float], list[float]]:
    """Speed together over speed alone, right after each other, and speed together; a warm-up first.

    Raises:
        SystemExit: A text differs.
    """
    asked = [
        {"token_ids": p, "max_new_tokens": NEW_TOKENS, "ignore_eos": True, **options}
        for p in prompts
    ]
    ratios, speeds = [], []
    for repeat in range(repeats + 1):
        begin = perf_counter()
        alone = [generator.generate(**one) for one in asked]
        middle = perf_counter()
        together = generator.generate_batch([generator.request(**one) for one in asked])
        end = perf_counter()
        if [a.token_ids for a in alone] != [b.token_ids for b in together]:
            raise SystemExit(f"a text in a batch differs from the text alone: {dict(options)}")
        if repeat:
            ratios.append((middle - begin) / (end - middle))
            speeds.append(sum(len(a.token_ids) for a in together) / (end - middle))
    return ratios, speeds


def _table(rows: Sequence[Sequence[object]], repeats: int) -> Table:
    return Table(
        "Shipped pair: sequences decoded together (measured)",
        ("at a time", "decoding", "together / one after the other", "tokens/s together"),
        rows,
        (
            f"{SEQUENCES} prompts, {NEW_TOKENS} new tokens each, end tokens ignored; a bundle "
            f"compiled for each size; the two ways alternate, {repeats} times after a warm-up",
            "whole requests, prompts included; every text was compared with the one alone and is "
            "equal",
        ),
    )
