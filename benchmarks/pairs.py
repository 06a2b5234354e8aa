"""The pairs that are measured, and their bundles: compiled on first use into the work folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

import edgecc
from benchmarks.synthetic import write_preset

PAIRS = Path(__file__).parents[1] / "tests" / "data" / "pairs"
SHIPPED = "shipped"
GOLDEN_PROMPTS = ("p0", "p1", "p2", "p3")
CODE_PROMPTS = (
    "def fibonacci(n):",
    "import os\nimport sys\n\n\ndef main(argv=None):\n",
    'class Stack:\n    """A last-in, first-out list."""\n\n    def __init__(self):\n',
    "    for key, value in sorted(self.items()):\n        if value is None:\n",
)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a benchmark run is made.

    Attributes:
        work: Folder for checkpoints and bundles.
        repeats: Repetitions of each comparison.
        large: Also measure the synthetic pair of the 0.6B shape.
        target: BF16 checkpoint of the shipped target, for `quantization`.
    """

    work: Path
    repeats: int
    large: bool
    target: Path | None = None

    @property
    def pairs(self) -> tuple[str, ...]:
        """Names of the pairs to measure."""
        return (SHIPPED, "qwen3-0.6b") if self.large else (SHIPPED,)


def checkpoints(pair: str, work: Path) -> tuple[Path, Path]:
    """Folders of a pair's target and draft; synthetic ones are made when they are missing."""
    if pair == SHIPPED:
        return PAIRS / "tiny-qwen3-nvfp4", PAIRS / "tiny-qwen3-dspark"
    folders = []
    for preset in (pair, f"{pair}-dspark"):
        folder = work / "checkpoints" / preset
        if not folder.exists():
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            write_preset(preset, partial).rename(folder)
        folders.append(folder)
    return folders[0], folders[1]


def compile_options(pair: str) -> dict[str, Any]:
    """Options of `edgecc.compile`: large pairs get short caches and no reference run."""
    return {} if pair == SHIPPED else {"max_model_len": 1024, "verify": "none"}


def bundle(pair: str, work: Path, **options: Any) -> Path:
    """A pair's bundle, compiled anew: another version of the code may have left one."""
    name = "-".join([pair, *(f"{key}-{value}" for key, value in sorted(options.items()))])
    out = work / "bundles" / name
    target, draft = checkpoints(pair, work)
    edgecc.compile(target, draft, out=out, force=True, **compile_options(pair), **options)
    return out


def prompts(tokenizer: Any) -> dict[str, Sequence[int]]:
    """Token ids of the golden prompts and the code prompts above, by name."""
    with safe_open(PAIRS / "goldens-tiny-qwen3-dspark.safetensors", "numpy") as file:
        found = {name: file.get_tensor(f"{name}.ids").tolist() for name in GOLDEN_PROMPTS}
    return found | {f"c{i}": list(tokenizer.encode(p)) for i, p in enumerate(CODE_PROMPTS)}


def manifest(path: Path) -> dict[str, Any]:
    """A bundle's manifest."""
    loaded: dict[str, Any] = json.loads((path / "bundle.json").read_text(encoding="utf-8"))
    return loaded
