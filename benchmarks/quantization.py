"""`quantization`: what rounding a BF16 pair costs in accepted tokens, and saves in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import edgecc
from benchmarks.acceptance import acceptance
from benchmarks.pairs import PAIRS, Settings
from benchmarks.results import Result, Table

RUNS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "nvfp4": {"quantization": "nvfp4"},
    "nvfp4, head too": {"quantization": "nvfp4", "quantize_head": True},
    "nvfp4, head and draft too": {
        "quantization": "nvfp4",
        "quantize_head": True,
        "draft_quantization": "nvfp4",
    },
    "fp8, head too": {"quantization": "fp8", "quantize_head": True},
    "int8, head too": {"quantization": "int8", "quantize_head": True},
    "int4, head too": {"quantization": "int4", "quantize_head": True},
}
"""Options of `edgecc.compile` by the name of the row."""


def run(settings: Settings) -> Result:
    """Compile in every format and generate with and without speculation for every prompt."""
    if settings.target is None:
        return Result("quantization", [_table([])], {})
    data = {}
    for name, options in RUNS.items():
        out = settings.work / "bundles" / "quantization"
        draft = PAIRS / "tiny-qwen3-dspark"
        report = edgecc.compile(settings.target, draft, out=out, force=True, **options)
        with edgecc.load(out) as generator:
            data[name] = acceptance(generator)["all"] | {"weight_bytes": report.weight_bytes}
    rows = [
        [name, f"{d['weight_bytes'] / 1e6:.1f}", f"**{d['tokens_per_step']:.2f}**", d["positions"]]
        for name, d in data.items()
    ]
    return Result("quantization", [_table(rows)], data)


def _table(rows: list[list[object]]) -> Table:
    return Table(
        "BF16 pair, rounded while compiling: bytes and acceptance (measured)",
        ("format", "weights MB", "tokens per step", "accepted at position 1 to 7"),
        rows,
        (
            "prompts of `acceptance`; each speculative text equals the plain one of its bundle",
            "the BF16 target is not part of the repository: give one with --target DIR",
        ),
    )
