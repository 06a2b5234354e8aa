"""Drafts that are read wrongly: the symptoms that users report, and what never changes.

Everything fits in these pairs, so nothing can refuse them: configs and tensors are those of another
draft. What is lost is acceptance. The text stays, token for token, and a draft of which nothing is
accepted is told.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import edgecc
from edgecc.backends.runtime import SpeculationWarning, Stats
from edgecc.backends.runtime.stats import BLOCK_CAUSES
from helpers.checkpoints import Tensors, edit_json, edit_tensors
from helpers.goldens import SHIPPED, ShippedPair, read_goldens

PROMPTS = ("p0", "p2")
TOKENS = 48

Change = Callable[[Path], None]


def config(**keys: object) -> Change:
    return lambda draft: edit_json(draft / "config.json", **keys)


def tensors(change: Callable[[Tensors], Tensors | None]) -> Change:
    return lambda draft: edit_tensors(draft, change)


def no_markov(stored: Tensors) -> None:
    stored["markov_head.markov_w2.weight"] *= 0


def markov_of_another_token(stored: Tensors) -> None:
    """The table read one row off: each slot is told a token that is not the one before it."""
    name = "markov_head.markov_w1.weight"
    stored[name] = np.roll(stored[name], 1, axis=0)


WRONG: dict[str, tuple[str, Change]] = {
    "the layout of the block": ("qwen3", config(sample_from_anchor=False)),
    "inputs of layers taken for outputs": (
        "qwen3",
        config(target_layer_ids=None, aux_hidden_state_layer_ids=[1, 3, 5]),
    ),
    "the mask token": ("qwen3", config(mask_token_id=17)),
    "no Markov head": ("qwen3", tensors(no_markov)),
    "the token before": ("qwen3", tensors(markov_of_another_token)),
    "the rotary embedding": (
        "qwen3",
        config(rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    ),
    "tapped layers of EAGLE3": ("eagle3", config(eagle_aux_hidden_state_layer_ids=[1, 2, 3])),
}
"""Which pair a mistake is made to, and how, by what is wrong."""

MOST = 0.9
"""Tokens per step that a mistake leaves at most, as a share."""


def measured(pair: ShippedPair, folder: Path, change: Change | None = None) -> Stats:
    """What a draft does for the prompts; their text is checked."""
    draft, goldens = pair.draft, read_goldens(pair.goldens)
    if change is not None:
        draft = folder / "draft"
        shutil.copytree(pair.draft, draft)
        change(draft)
    edgecc.compile(
        pair.target,
        draft,
        out=folder / "bundle",
        max_model_len=384,
        prefill_chunk=64,
        verify="none",
    )
    total = Stats()
    with edgecc.load(folder / "bundle", num_threads=1) as generator:
        for prompt in PROMPTS:
            ids = goldens[prompt]["ids"]
            found = generator.generate(token_ids=ids, max_new_tokens=TOKENS, ignore_eos=True)
            plain = generator.generate(
                token_ids=ids, max_new_tokens=TOKENS, ignore_eos=True, speculation=False
            )
            assert found.token_ids == plain.token_ids
            expected = goldens[prompt]["greedy"].tolist()[:TOKENS]
            assert found.token_ids[: len(expected)] == expected
            total.accepted_by_round += found.stats.accepted_by_round
            total.proposed_by_round += found.stats.proposed_by_round
    return total


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stats]:
    names = {name for name, _ in WRONG.values()}
    return {name: measured(SHIPPED[name], tmp_path_factory.mktemp(name)) for name in names}


@pytest.mark.parametrize("name", WRONG)
def test_acceptance_falls_and_the_text_stays(
    name: str, right: dict[str, Stats], tmp_path: Path
) -> None:
    pair, change = WRONG[name]
    found = measured(SHIPPED[pair], tmp_path, change)
    assert found.tokens_per_step < MOST * right[pair].tokens_per_step


def test_a_wrong_head_is_told(tmp_path: Path) -> None:
    """Each proposal is another token than the one that was meant: slot 0 is never accepted."""
    pair = SHIPPED["qwen3"]

    def other_head(stored: Tensors) -> None:
        shape = stored["markov_head.markov_w1.weight"].shape[0], stored["norm.weight"].shape[0]
        random = np.random.default_rng(0).standard_normal(shape)
        stored["lm_head.weight"] = random.astype(ml_dtypes.bfloat16)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", SpeculationWarning)
        found = measured(pair, tmp_path, tensors(other_head))
    assert found.acceptance_by_position[0] == 0
    told = [str(w.message) for w in caught if w.category is SpeculationWarning]
    assert len(told) == 1
    assert BLOCK_CAUSES.none in told[0]
