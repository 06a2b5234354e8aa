"""Markov heads of DSpark drafts and reduced vocabularies, against float64 NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgecc.errors import InputError, UnsupportedError
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import Tensors, nvfp4

from .test_dspark import IDS, VOCAB, Pair, close

RANK, HIDDEN, REDUCED = 16, 32, 90
Change = Callable[[Tensors], Tensors | None]


def gate(bias: bool = True, scale: float = 1.0) -> Change:
    """A gate over the hidden state and the embedding, in this order."""
    random = np.random.default_rng(5)

    def change(tensors: Tensors) -> None:
        weight = random.normal(0, scale, (RANK, HIDDEN + RANK)).astype(np.float32)
        tensors["markov_head.gate_proj.weight"] = weight
        if bias:
            tensors["markov_head.gate_proj.bias"] = random.normal(0, 1, RANK).astype(np.float32)

    return change


def cell(bias: bool = True, scale: float = 1.0) -> Change:
    """A recurrent cell over state, embedding and hidden state, in this order."""
    random = np.random.default_rng(7)

    def change(tensors: Tensors) -> None:
        weight = random.normal(0, scale, (3 * RANK, 2 * RANK + HIDDEN)).astype(np.float32)
        tensors["markov_head.joint_proj.weight"] = weight
        if bias:
            vector = random.normal(0, 1, 3 * RANK).astype(np.float32)
            tensors["markov_head.joint_proj.bias"] = vector

    return change


def chosen(last: int = NUM_TOKENS) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Target ids of a reduced vocabulary, increasing."""
    return np.sort(np.random.default_rng(6).choice(last, REDUCED, replace=False))


def reduce(marks: bool = True) -> Change:
    """Keep some rows of the head and of W2, with the map that speculators stores."""
    kept = chosen()

    def change(tensors: Tensors) -> None:
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            tensors[name] = tensors[name][kept]
        tensors["d2t"] = kept - np.arange(len(kept))
        if marks:
            tensors["t2d"] = np.isin(np.arange(VOCAB), kept)

    return change


def both(*changes: Change) -> Change:
    def change(tensors: Tensors) -> None:
        for one in changes:
            one(tensors)

    return change


def packed(tensors: Tensors) -> None:
    """NVFP4 as published conversions have it: W2, not W1."""
    tensors |= nvfp4("markov_head.markov_w2", tensors["markov_head.markov_w2.weight"])


def pair(folder: Path, change: Change, **options: Any) -> Pair:
    sizes = {"markov_rank": RANK, "own_head": True, "block_size": 5, "markov_head_type": "vanilla"}
    return Pair(folder, change=change, **{**sizes, **options})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_gated(tmp_path: Path, bias: bool, first: int) -> None:
    """In both layouts: the gate reads the state of the slot that predicts."""
    made = pair(
        tmp_path,
        gate(bias),
        markov_head_type="gated",
        sample_from_anchor=not first,
        first=first,
    )
    made.check()


def test_the_gate_decides(tmp_path: Path) -> None:
    plain = pair(tmp_path / "plain", lambda tensors: None).found(IDS, 79)
    gated = pair(tmp_path / "gated", gate(), markov_head_type="gated").found(IDS, 79)
    assert close(plain["base_logits"], gated["base_logits"])
    assert not close(plain["draft_logits"], gated["draft_logits"])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [0, 1])
def test_recurrent(tmp_path: Path, bias: bool, first: int) -> None:
    """In both layouts."""
    options = {"sample_from_anchor": not first, "first": first}
    pair(tmp_path, cell(bias), markov_head_type="rnn", **options).check()


def test_the_state_goes_from_slot_to_slot_and_not_from_round_to_round(tmp_path: Path) -> None:
    """Columns of the state change every slot but the first, also after another round."""

    def forgetful(tensors: Tensors) -> None:
        tensors["markov_head.joint_proj.weight"][:, :RANK] = 0

    made = pair(tmp_path / "with", cell(), markov_head_type="rnn")
    with_state = made.found(IDS, 79)
    without = pair(tmp_path / "without", both(cell(), forgetful), markov_head_type="rnn")
    first, *later = zip(
        with_state["draft_logits"], without.found(IDS, 79)["draft_logits"], strict=True
    )
    assert close(*first)
    assert not any(close(*slot) for slot in later)
    again = made.found(IDS, 79)
    assert {name: a.tobytes() for name, a in again.items()} == {
        name: a.tobytes() for name, a in with_state.items()
    }


def test_reduced_and_recurrent_and_packed(tmp_path: Path) -> None:
    changes = both(cell(), reduce(), packed)
    pair(tmp_path, changes, markov_head_type="rnn", aux_hidden_state_layer_ids=[1, 3]).check()


@pytest.mark.parametrize("marks", [True, False])
def test_reduced(tmp_path: Path, marks: bool) -> None:
    """Logits of draft ids, proposals and previous tokens of target ids."""
    made = pair(tmp_path, reduce(marks), draft_vocab_size=REDUCED)
    found = made.found(IDS, 79)
    assert found["draft_logits"].shape == (5, REDUCED)
    assert set(found["proposals"].tolist()) <= set(chosen().tolist())
    made.check()


def test_reduced_and_gated_and_packed(tmp_path: Path) -> None:
    changes = both(gate(), reduce(), packed)
    pair(tmp_path, changes, markov_head_type="gated", aux_hidden_state_layer_ids=[1, 3]).check()


def test_the_size_in_the_config_alone_reduces_nothing(tmp_path: Path) -> None:
    """Speculators writes its default whether there is a map or not: tensors decide."""
    made = pair(tmp_path, lambda tensors: None, own_head=False, draft_vocab_size=100)
    assert made.found(IDS, 79)["draft_logits"].shape == (5, VOCAB)
    made.check()


def drop(*names: str) -> Change:
    def change(tensors: Tensors) -> None:
        for name in names:
            del tensors[name]

    return change


def shifted(tensors: Tensors) -> None:
    tensors["d2t"] = tensors["d2t"] + 1


@pytest.mark.parametrize(
    ("change", "options", "error", "id"),
    [
        (gate(), {}, InputError, "draft/markov-type"),
        (lambda t: None, {"markov_head_type": "gated"}, InputError, "draft/markov-type"),
        (lambda t: None, {"markov_head_type": "rnn"}, InputError, "draft/markov-type"),
        (lambda t: None, {"markov_head_type": "lstm"}, UnsupportedError, "draft/markov-type"),
        (cell(), {"markov_head_type": "gated"}, InputError, "draft/markov-type"),
        (cell(), {"markov_head_type": "vanilla"}, InputError, "draft/markov-type"),
        (both(cell(), gate()), {"markov_head_type": "rnn"}, InputError, "draft/markov-type"),
        (both(reduce(), drop("d2t")), {}, InputError, "draft/no-vocabulary-map"),
        (both(reduce(), drop("lm_head.weight")), {}, InputError, "bind/vocab-mismatch"),
        (both(reduce(), shifted), {}, InputError, "draft/vocabulary-map"),
        (reduce(), {"draft_vocab_size": 91}, InputError, "draft/vocabulary-size"),
    ],
)  # fmt: skip
def test_what_is_refused(
    tmp_path: Path, change: Change, options: dict[str, Any], error: Any, id: str
) -> None:
    with pytest.raises(error) as caught:
        pair(tmp_path, change, **options)
    assert id in {d.id for d in caught.value.diagnostics}
