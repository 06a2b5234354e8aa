"""The DFlash frontend against an independent float64 draft, in both layouts of the block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgecc.errors import InputError, UnsupportedError, UsageError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.drafts import read_draft
from edgecc.frontends.drafts.dflash import DFlash
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import DROP, Tensors, edit_json, edit_tensors, write_draft, write_target

from .test_dspark import IDS, VOCAB, Pair, agree

ZLAB: Mapping[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "markov_rank": 0,
    "confidence_head": False,
    "block_size": 5,
}
"""Arguments of `write_draft`: top-level block size, masks that fill their own positions."""


def nested(*keys: str, **more: Any) -> dict[str, object]:
    """Keys of the method moved into `dflash_config`, as z-lab and SpecForge write them."""
    values = {"mask_token_id": 287, "target_layer_ids": [0, 2], "block_size": 5}
    inner = {key: values[key] for key in keys}
    return {**dict.fromkeys(keys, DROP), "dflash_config": {**inner, **more}}


def pair(folder: Path, **options: Any) -> Pair:
    return Pair(folder, **{**ZLAB, "first": 1, **options})


def respelled(folder: Path, changes: Mapping[str, object]) -> DFlash:
    path = write_draft(folder / "d", target_layer_ids=(0, 2), mask_token_id=287, **ZLAB)
    edit_json(path / "config.json", markov_rank=DROP)
    edit_json(path / "config.json", **changes)
    draft = read_draft(Checkpoint.open(path, role="draft"))
    assert isinstance(draft, DFlash)
    return draft


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": 1},
        {"steps": 3},
        {"block_size": 2},
        {"block_size": 9},
        {"target_layer_ids": (-1, 1, 2)},
        {"layers": 1},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                             "original_max_position_embeddings": 16}},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
        {"own_head": True, "own_embedding": True},
    ],
    ids=str,
)  # fmt: skip
def test_masks_fill_their_own_positions(tmp_path: Path, options: dict[str, Any]) -> None:
    """Slot 0 is dropped: a block of b slots proposes b - 1 tokens."""
    made = pair(tmp_path, **options)
    assert made.steps == options.get("steps", made.block - 1)
    made.check()


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_that_of_the_target(tmp_path: Path, tied: bool) -> None:
    """`tie_word_embeddings` in a draft without an embedding speaks of the target."""
    made = pair(tmp_path, target={"tied": tied}, tie_word_embeddings=True)
    made.check()


def test_deepspec_without_heads_samples_from_the_anchor(tmp_path: Path) -> None:
    """Published under DSpark's name with rank 0: slots mean what DSpark's do."""
    options = {**ZLAB, "architectures": ["Qwen3DSparkModel"], "auto_map": DROP}
    made = Pair(tmp_path, **options)
    assert made.steps == made.block
    made.check()


@pytest.mark.parametrize("declared", [True, False, None])
@pytest.mark.parametrize("first", [0, 1])
def test_a_confidence_head_alone(tmp_path: Path, first: int, declared: bool | None) -> None:
    """Rank 0: it reads the hidden state of the slot that predicts, whatever the flag says."""
    options = {**ZLAB, "confidence_head": True, "sample_from_anchor": not first, "first": first}
    options["confidence_head_with_markov"] = declared
    made = Pair(tmp_path, **options)
    assert "confidence" in made.found(IDS, 79)
    made.check()


def test_a_confidence_head_that_reads_what_is_not_there(tmp_path: Path) -> None:
    """Markov tensors are missing: nothing else would tell."""

    def widen(tensors: Tensors) -> None:
        tensors["confidence_head.proj.weight"] = np.zeros((1, 40), dtype=np.float32)

    with pytest.raises(InputError, match="40 columns, expected 32") as caught:
        pair(tmp_path, confidence_head=True, change=widen)
    assert caught.value.id == "draft/confidence-width"


def test_a_dspark_draft_whose_masks_fill(tmp_path: Path) -> None:
    """The Markov chain starts at the anchor, and the hidden state of slot 1."""
    made = Pair(tmp_path, first=1, sample_from_anchor=False, block_size=5)
    assert made.steps == 4
    made.check()


def test_layouts_differ(tmp_path: Path) -> None:
    """Read one slot off, proposals are others: nothing else would tell."""
    fills = pair(tmp_path / "fills")
    anchor = Pair(tmp_path / "anchor", **{**ZLAB, "sample_from_anchor": True})
    found, shifted = (p.found(IDS, 79)["draft_logits"] for p in (fills, anchor))
    assert np.array_equal(found, shifted[1:])
    assert not np.allclose(found, shifted[:-1])


def test_slots_see_each_other_both_ways(tmp_path: Path) -> None:
    """No key speaks of causality: then a later slot reaches the earlier ones, as in training."""
    short, long = (pair(tmp_path / str(size), block_size=size) for size in (2, 5))
    first, second = (made.found(IDS, 79)["draft_logits"][0] for made in (short, long))
    assert np.abs(first - second).max() > 1e-3
    for made in (short, long):
        assert "causal" not in (made.draft_path / "config.json").read_text()
        made.check()


def test_fewer_proposals_are_the_first_ones(tmp_path: Path) -> None:
    full = pair(tmp_path / "full").found(IDS, 79)["proposals"].tolist()
    for steps in (1, 2, 3):
        found = pair(tmp_path / str(steps), steps=steps).found(IDS, 79)
        assert found["proposals"].tolist() == full[:steps]


def test_rounds_on_new_features_equal_one_round_on_all(tmp_path: Path) -> None:
    """What a block leaves in the caches is overwritten by the next features."""
    made = pair(tmp_path, garbage=1e3)
    taps = made.lifted.target(IDS)["hidden_tap"]
    for first, end in ((0, 4), (4, 5), (5, 9), (9, len(IDS))):
        anchor = IDS[end] if end < len(IDS) else 79
        found = made.lifted.draft(taps[first:end], anchor)
        agree(found, made.expected(IDS[:end], anchor))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        nested("mask_token_id", "target_layer_ids"),
        nested("mask_token_id", "target_layer_ids", "block_size"),
        nested("mask_token_id", "target_layer_ids", projector_type="dflash", attention_mode="gqa"),
        {"architectures": ["QwenDFlashDraftModel"]},
        {"architectures": ["DFlashSpeculator"], "sample_from_anchor": False},
        {"architectures": DROP, "model_type": "dflash"},
        {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": False},
        {"target_layer_ids": DROP, "aux_hidden_state_layer_ids": [1, 3]},
    ],
    ids=lambda changes: ",".join(changes) or "plain",
)
def test_spellings(tmp_path: Path, changes: dict[str, object]) -> None:
    config = respelled(tmp_path, changes).config
    assert config.layout == "masks-fill"
    assert (config.block_size, config.proposals, config.mask_token_id) == (5, 4, 287)
    assert config.target_layer_ids == (0, 2)


@pytest.mark.parametrize(
    ("target_layers", "layers", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (40, 5, [1, 10, 19, 28, 37]),
        (64, 5, [1, 16, 31, 46, 61]),
        (24, 5, [1, 6, 11, 16, 21]),
        (9, 1, [4]),
    ],
)
def test_layers_that_are_not_listed(
    tmp_path: Path, target_layers: int, layers: int, expected: Sequence[int]
) -> None:
    """Those of published drafts follow from the depth of the target."""
    draft = respelled(
        tmp_path,
        {
            "target_layer_ids": None,
            "num_target_layers": target_layers,
            "num_hidden_layers": layers,
            "layer_types": ["full_attention"] * layers,
        },
    )
    assert draft.taps(None) == tuple(expected)
    assert draft.numbering == "num_target_layers"


KEPT = np.arange(1, NUM_TOKENS, 3)
"""Target ids that a reduced vocabulary has."""


def reduced(marks: bool, *, ids: bool = False) -> Callable[[Tensors], None]:
    """A head of its own with fewer rows, and the map in the form of speculators."""

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][KEPT]
        tensors["d2t"] = KEPT if ids else KEPT - np.arange(len(KEPT))
        if marks:
            tensors["t2d"] = np.isin(np.arange(VOCAB), KEPT)

    return change


@pytest.mark.parametrize(
    "options",
    [
        {"change": reduced(marks=True)},
        {"change": reduced(marks=False)},
        {"change": reduced(marks=True), "steps": 2, "draft_vocab_size": len(KEPT)},
        {"change": reduced(marks=True), "architectures": ["DFlashSpeculator"],
         "auto_map": DROP, "speculators_model_type": "dflash", "sample_from_anchor": False,
         "aux_hidden_state_layer_ids": [1, 3], "draft_vocab_size": len(KEPT)},
    ],
    ids=["marks", "no marks", "fewer proposals", "speculators"],
)  # fmt: skip
def test_a_reduced_vocabulary(tmp_path: Path, options: dict[str, Any]) -> None:
    """`d2t` is no sign of EAGLE3; slots choose among draft ids, proposals are the target's."""
    made = pair(tmp_path, own_head=True, **options)
    found = made.found(IDS, 79)
    assert found["draft_logits"].shape == (made.steps, len(KEPT))
    assert set(found["proposals"].tolist()) <= set(KEPT.tolist())
    made.check()


def test_a_reduced_vocabulary_needs_a_map(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][KEPT]

    with pytest.raises(InputError, match="there is no d2t") as caught:
        pair(tmp_path, own_head=True, change=change)
    assert caught.value.id == "draft/no-vocabulary-map"


def test_the_layout_is_told(tmp_path: Path) -> None:
    facts = respelled(tmp_path, {}).facts()
    assert facts["slot_layout"] == "masks-fill, by DFlashDraftModel"
    assert "markov_rank" not in facts


@pytest.mark.parametrize(
    ("changes", "error", "id"),
    [
        ({"architectures": ["Something"]}, InputError, "draft/slot-layout"),
        ({"sample_from_anchor": False, "shift_label": True}, InputError, "draft/slot-layout"),
        ({"target_layer_ids": None, "num_target_layers": None}, InputError, "draft/tapped-layers"),
        ({"target_layer_ids": [0, 3]}, InputError, "draft/tapped-layers"),
        ({"target_layer_ids": [0, 1, 2]}, InputError, "draft/fc-width"),
        ({"num_target_layers": 4}, InputError, "draft/target-layers"),
        ({"mask_token_id": None}, InputError, "config/missing-key"),
        ({"mask_token_id": 288}, InputError, "draft/mask-token"),
        ({"vocab_size": 300}, InputError, "bind/vocab-mismatch"),
        ({"vocab_size": 270, "mask_token_id": 2}, InputError, "bind/vocab-mismatch"),
        ({"markov_rank": 8}, InputError, "draft/markov-missing"),
        ({"block_size": 1}, InputError, "config/bad-value"),
        ({"dflash_config": {"block_size": 7}}, InputError, "draft/config-conflict"),
        ({"dflash_config": {"causal": True}}, UnsupportedError, "draft/attention"),
        ({"jetspec_config": {}, "causal_head": True}, UnsupportedError, "draft/attention"),
        ({"dflash_config": {"projector_type": "domino"}}, UnsupportedError, "draft/kind"),
        ({"sliding_window_non_causal": True}, UnsupportedError, "draft/sliding-window"),
        ({"final_logit_softcapping": 30.0}, UnsupportedError, "draft/logit-scale"),
        ({"is_neox_style": False}, UnsupportedError, "draft/rope-layout"),
        ({"rope_parameters": {"rope_type": "other"}}, UnsupportedError, "rope/unsupported-type"),
    ],
    ids=str,
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, object], error: Any, id: str) -> None:
    target = write_target(tmp_path / "t", layers=3, hidden=32, quantized=False)
    draft = write_draft(
        tmp_path / "d",
        hidden=32,
        target_layers=3,
        target_layer_ids=(0, 2),
        mask_token_id=287,
        **ZLAB,
    )
    edit_json(draft / "config.json", **changes)
    with pytest.raises(error) as caught:
        lift(target, draft)
    assert id in {d.id for d in caught.value.diagnostics}


@pytest.mark.parametrize(
    ("names", "id"),
    [
        (["mask_embedding"], "draft/mask-embedding"),
        (["layers.0.self_attn.attention_sink_bias"], "draft/attention"),
        (["candidate_selector.hidden_projection"], "draft/kind"),
    ],
)
def test_other_networks_are_not_taken_for_it(tmp_path: Path, names: list[str], id: str) -> None:
    draft = write_draft(tmp_path / "d", **ZLAB)
    extra: Tensors = {name: np.zeros((4,), dtype=np.float32) for name in names}
    edit_tensors(draft, lambda tensors: {**tensors, **extra})
    with pytest.raises(UnsupportedError) as caught:
        lift(None, draft)
    assert caught.value.id == id


def test_more_proposals_than_slots(tmp_path: Path) -> None:
    """Other tools count the anchor in, so the same number may be one too many here."""
    draft = write_draft(tmp_path / "d", **ZLAB)
    with pytest.raises(UsageError, match="proposes at most 4") as caught:
        lift(None, draft, LiftOptions(num_speculative_tokens=5))
    assert "hold the anchor, which some tools count" in caught.value.diagnostics[0].notes[0]
