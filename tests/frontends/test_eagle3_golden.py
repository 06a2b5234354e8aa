"""The shipped EAGLE3 pair by the interpreter against values computed by transformers.

See tests/data/pairs/README.md. Both run the target with its NVFP4 weights dequantized; theirs
computes in float32, so differences are its rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from helpers.lifted import Array, Lifted

PAIRS = Path(__file__).parents[1] / "data" / "pairs"
TARGET = PAIRS / "tiny-qwen3-nvfp4"
DRAFT = PAIRS / "tiny-qwen3-eagle3"
NUM_TOKENS = 4095
STOPS = (4094, 4092)

Goldens = Mapping[str, Mapping[str, Array]]


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    values: dict[str, dict[str, Array]] = {}
    with safe_open(PAIRS / "goldens-tiny-qwen3-eagle3.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 (a safetensors handle, not a dict)
            prompt, _, key = name.partition(".")
            values.setdefault(prompt, {})[key] = file.get_tensor(name)
    return values


@pytest.fixture(scope="module")
def pair() -> Lifted:
    return Lifted(TARGET, DRAFT, dtype=np.float32, max_model_len=128)


def relative(found: Array, expected: Array) -> float:
    """Largest difference, relative to the largest reference value."""
    assert found.shape == expected.shape
    return float(np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("prompt", ["p0", "p1"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_first_block(
    goldens: Goldens, prompt: str, dtype: type[np.float32] | type[np.float64]
) -> None:
    pair = Lifted(TARGET, DRAFT, dtype=dtype, max_model_len=64)
    golden = goldens[prompt]
    ids, first = golden["ids"].tolist(), int(golden["greedy"][0])
    states = pair.target(ids)["hidden_tap"]
    if prompt == "p0":
        assert relative(states, golden["draft_input_states"]) <= 1e-5
    block = pair.draft_chain(states, [*ids[1:], first])
    assert relative(block["draft_logits"], golden["block_logits"]) <= 1e-5
    assert block["proposals"].tolist() == golden["block_tokens"].tolist()


@pytest.mark.parametrize(("prompt", "count"), [("p0", 3), ("p1", 2), ("p2", 1), ("p3", 2)])
def test_rounds(pair: Lifted, goldens: Goldens, prompt: str, count: int) -> None:
    """Draft, verify, accept: every proposal and every accepted count of the first rounds."""
    golden = goldens[prompt]
    ids = golden["ids"].tolist()
    pair.reset()
    out = pair.target(ids)
    features, committed = out["hidden_tap"], [*ids, _best(out["logits"][-1])]
    rounds = []
    for _ in range(count):
        following = committed[len(committed) - len(features) :]
        proposed = pair.draft_chain(features, following)["proposals"].tolist()
        rows = pair.target([committed[-1], *proposed], keep=0)
        choices = [_best(row) for row in rows["logits"]]
        accepted = next(
            (i for i, p in enumerate(proposed) if choices[i] != p or p in STOPS), len(proposed)
        )
        committed += choices[: accepted + 1]
        features = rows["hidden_tap"][: accepted + 1]
        pair.lengths["target"] += accepted + 1
        rounds.append((proposed, accepted))
    assert [r[0] for r in rounds] == golden["proposals"][:count].tolist()
    assert [r[1] for r in rounds] == golden["accepted"][:count].tolist()
    text = committed[len(ids) :][: len(golden["greedy"])]
    assert text == golden["greedy"][: len(text)].tolist()


def _best(row: Array) -> int:
    return int(row[:NUM_TOKENS].argmax())
