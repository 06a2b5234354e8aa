"""`speed`: plain against speculative decoding of the shipped pair, alternating in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import edgecc
from benchmarks.pairs import SHIPPED, Settings, bundle, prompts
from benchmarks.results import Result, Table, ratio, spread

NEW_TOKENS = 64


def run(settings: Settings) -> Result:
    """Tokens per second after the first token, for each number of proposals."""
    with edgecc.load(bundle(SHIPPED, settings.work)) as generator:
        cases = prompts(generator.tokenizer)
        draft = generator.model.draft
        counts = range(1, draft.num_speculative_tokens + 1 if draft else 1)
        rows, data = [], {}
        for count in counts:
            pairs = list(_pairs(generator, cases, count, settings.repeats))
            ratios = [s.tokens_per_second / p.tokens_per_second for p, s in pairs]
            speculative = [s for _, s in pairs]
            figures = {
                "ratio": spread(ratios),
                "plain_tokens_per_second": spread([p.tokens_per_second for p, _ in pairs]),
                "tokens_per_second": spread([s.tokens_per_second for s in speculative]),
                "tokens_per_step": _tokens_per_step(speculative),
                "draft_share": _share(speculative, "draft_seconds"),
                "host_share": _share(speculative, "host_seconds"),
            }
            data[str(count)] = figures
            rows.append(_row(count, ratios, figures))
    return Result("speed", [_table(rows, len(cases), settings.repeats)], data)


def _pairs(generator: Any, cases: Any, count: int, repeats: int) -> Iterator[tuple[Any, Any]]:
    """Statistics of plain and speculative runs, right after each other; the first is a warm-up."""
    for ids in cases.values():
        for repeat in range(repeats + 1):
            plain = _generate(generator, ids, speculation=False)
            speculative = _generate(generator, ids, num_speculative_tokens=count)
            if plain.token_ids != speculative.token_ids:
                raise SystemExit(f"speculative text differs from plain text: N = {count}, {ids}")
            if repeat:
                yield plain.stats, speculative.stats


def _generate(generator: Any, ids: Sequence[int], **options: Any) -> Any:
    return generator.generate(token_ids=ids, max_new_tokens=NEW_TOKENS, ignore_eos=True, **options)


def _tokens_per_step(stats: Sequence[Any]) -> float:
    return float(1 + sum(s.accepted for s in stats) / sum(s.rounds for s in stats))


def _share(stats: Sequence[Any], name: str) -> float:
    return float(np.median([getattr(s, name) / s.decode_seconds for s in stats]))


def _row(count: int, ratios: Sequence[float], figures: dict[str, Any]) -> list[object]:
    return [
        count,
        ratio(ratios),
        f"{figures['plain_tokens_per_second']['median']:.0f}",
        f"{figures['tokens_per_second']['median']:.0f}",
        f"{figures['tokens_per_step']:.2f}",
        f"{figures['draft_share']:.0%}",
        f"{figures['host_share']:.1%}",
    ]


def _table(rows: Sequence[Sequence[object]], cases: int, repeats: int) -> Table:
    return Table(
        "Shipped pair: speculative against plain decoding (measured)",
        (
            "N",
            "speculative / plain",
            "plain tokens/s",
            "speculative tokens/s",
            "tokens per step",
            "time in draft",
            "time in host",
        ),
        rows,
        (
            f"{cases} prompts, {NEW_TOKENS} new tokens each, end tokens ignored; plain and "
            f"speculative runs alternate, {repeats} of each per prompt after a warm-up",
            "the ratio is the median over all alternating pairs, with quartiles; every "
            "speculative text was compared with the plain one and is equal",
        ),
    )
