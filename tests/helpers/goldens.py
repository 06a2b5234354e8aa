"""The shipped pairs and the values transformers computed for them: tests/data/pairs/README.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
TARGET = PAIRS / "tiny-qwen3-nvfp4"
DRAFT = PAIRS / "tiny-qwen3-dspark"
GOLDENS = PAIRS / "goldens-tiny-qwen3-dspark.safetensors"


@dataclass(frozen=True, slots=True)
class ShippedPair:
    """Folders of target and draft, the file of golden values, and the method of the draft."""

    target: Path
    draft: Path
    goldens: Path
    method: str = "dspark"


SHIPPED = {
    "qwen3": ShippedPair(TARGET, DRAFT, GOLDENS),
    "qwen3_5": ShippedPair(
        PAIRS / "tiny-qwen3_5-mixed",
        PAIRS / "tiny-qwen3_5-dspark",
        PAIRS / "goldens-tiny-qwen3_5-mixed-dspark.safetensors",
    ),
    "eagle3": ShippedPair(
        TARGET,
        PAIRS / "tiny-qwen3-eagle3",
        PAIRS / "goldens-tiny-qwen3-eagle3.safetensors",
        "eagle3",
    ),
}
"""A transformer, and a hybrid of recurrent and attention layers, each with its block draft; and the
first of them with a draft of another kind."""

PROMPTS = ("p0", "p1", "p2", "p3")


def read_goldens(path: Path = GOLDENS) -> dict[str, dict[str, NDArray[Any]]]:
    """Golden arrays by prompt and key."""
    values: dict[str, dict[str, NDArray[Any]]] = {}
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
            prompt, _, key = name.partition(".")
            values.setdefault(prompt, {})[key] = file.get_tensor(name)
    return values


def relative(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Largest difference, relative to the largest reference value."""
    assert found.shape == expected.shape
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())
