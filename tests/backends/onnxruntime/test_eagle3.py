"""EAGLE3 pairs lowered and run by the engine: golden rounds, with caches updated in place.

`edgecc compile` refuses these pairs until the runtime drives them; the graphs themselves lower and
run, and this holds them to it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from edgecc.backends.onnxruntime import OrtEngine
from edgecc.roles import Role
from helpers.lowered_pairs import PAIRS, REAL_TARGET, LoweredPair, target_inputs

NUM_TOKENS = 4095
STOPS = (4094, 4092)
TOLERANCE = 1e-5

Goldens = Mapping[str, NDArray[np.float32]]


@pytest.fixture(scope="module", params=["cpu", "onnx"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OrtEngine:
    folder = tmp_path_factory.mktemp("eagle3") / request.param
    draft = PAIRS / "tiny-qwen3-eagle3"
    pair = LoweredPair(folder, REAL_TARGET, draft, device=request.param, max_model_len=128)
    return pair.engine()


@pytest.fixture(scope="module")
def goldens() -> Goldens:
    with safe_open(PAIRS / "goldens-tiny-qwen3-eagle3.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


class Sequence:
    """One sequence: how many rows of each graph's caches are valid."""

    def __init__(self, engine: OrtEngine) -> None:
        self.target, self.draft = engine.entry("target"), engine.entry("draft")
        self.target_rows = self.draft_rows = 0

    def verify(self, ids: list[int]) -> tuple[list[int], NDArray[np.float32]]:
        """The target's choice after each token, and the tapped states `[T, n*H]`."""
        inputs = target_inputs(ids, self.target_rows)
        out = self.target.run(inputs, [Role.LOGITS, Role.HIDDEN_TAP])
        choices = np.argmax(out[Role.LOGITS][0, :, :NUM_TOKENS], axis=-1).tolist()
        return choices, out[Role.HIDDEN_TAP][0].copy()

    def propose(
        self, features: NDArray[np.float32], following: list[int]
    ) -> tuple[list[int], NDArray[np.float32]]:
        """Proposals, and logits over the draft's vocabulary."""
        inputs = {
            Role.FEATURES: np.ascontiguousarray(features[None]),
            Role.NEXT_TOKEN_IDS: np.array([following]),
            Role.CACHE_LENGTH: np.array([self.draft_rows]),
        }
        out = self.draft.run(inputs, [Role.PROPOSALS, Role.DRAFT_LOGITS])
        self.draft_rows += len(features)
        return out[Role.PROPOSALS][0].tolist(), out[Role.DRAFT_LOGITS][0].copy()


@pytest.mark.parametrize("prompt", ["p0", "p1"])
def test_logits_of_the_first_block(engine: OrtEngine, goldens: Goldens, prompt: str) -> None:
    sequence = Sequence(engine)
    ids = goldens[f"{prompt}.ids"].tolist()
    choices, states = sequence.verify(ids)
    proposals, logits = sequence.propose(states, [*ids[1:], choices[-1]])
    expected = goldens[f"{prompt}.block_logits"]
    assert proposals == goldens[f"{prompt}.block_tokens"].tolist()
    assert np.abs(logits - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("prompt", ["p0", "p1", "p2", "p3"])
def test_every_round(engine: OrtEngine, goldens: Goldens, prompt: str) -> None:
    """All proposals and accepted counts: what a round leaves in the caches does no harm."""
    sequence = Sequence(engine)
    ids = goldens[f"{prompt}.ids"].tolist()
    wanted = goldens[f"{prompt}.proposals"].tolist()
    choices, features = sequence.verify(ids)
    sequence.target_rows = len(ids)
    committed = [*ids, choices[-1]]
    accepted = []
    for proposals in wanted:
        following = committed[len(committed) - len(features) :]
        assert sequence.propose(features, following)[0] == proposals
        choices, states = sequence.verify([committed[-1], *proposals])
        count = next((i for i, p in enumerate(proposals) if choices[i] != p or p in STOPS), 7)
        committed += choices[: count + 1]
        features = states[: count + 1]
        sequence.target_rows += count + 1
        accepted.append(count)
    assert accepted == goldens[f"{prompt}.accepted"].tolist()
    greedy = goldens[f"{prompt}.greedy"].tolist()
    assert committed[len(ids) :][: len(greedy)] == greedy
