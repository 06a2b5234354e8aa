"""DSpark configs in the spellings of all known writers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.drafts.dspark_config import DSparkConfig, declared_rank, read_dspark_config
from edgecc.frontends.lift import lift
from helpers.checkpoints import DROP, MASK_ID, edit_json, write_draft, write_target

METHOD_KEYS = (
    "block_size",
    "confidence_head_with_markov",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
    "mask_token_id",
    "num_anchors",
    "num_target_layers",
    "target_layer_ids",
)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft whose config tests overwrite."""
    return write_draft(tmp_path_factory.mktemp("dspark") / "d")


@pytest.fixture(scope="module")
def config(draft: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((draft / "config.json").read_text())
    return found


def write(path: Path, config: Mapping[str, object]) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def read(path: Path, config: Mapping[str, object], **changes: object) -> DSparkConfig:
    changed = {k: v for k, v in {**config, **changes}.items() if v is not DROP}
    with Checkpoint.open(write(path, changed), role="draft") as checkpoint:
        return read_dspark_config(checkpoint)


def moved(
    config: Mapping[str, object], name: str, *, keep: tuple[str, ...] = ()
) -> dict[str, object]:
    """The config with its method keys inside an object, as other writers have them."""
    inner = {key: config[key] for key in METHOD_KEYS if key not in keep}
    outer = {key: value for key, value in config.items() if key not in inner}
    return {**outer, name: inner}


def test_deepspec(draft: Path, config: dict[str, object]) -> None:
    found = read(draft, config)
    assert found.block_size == 4
    assert found.target_layer_ids == (1, 3)
    assert found.numbering == "target_layer_ids"
    assert found.mask_token_id == MASK_ID
    assert found.markov_rank == 8
    assert found.confidence is True
    assert found.num_target_layers == 4
    assert found.text.hidden_size == 64
    assert found.text.num_hidden_layers == 2


def test_specforge(draft: Path, config: dict[str, object]) -> None:
    spelled = moved(config, "dflash_config", keep=("block_size", "num_target_layers"))
    inner = spelled["dflash_config"]
    assert isinstance(inner, dict)
    inner |= {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    changes = {"architectures": ["DSparkDraftModel"], "use_sliding_window": False}
    assert read(draft, spelled, **changes).target_layer_ids == (1, 3)
    assert fact(read(draft, spelled, **changes)) == fact(read(draft, config))


def test_specforge_with_keys_repeated_at_the_top(draft: Path, config: dict[str, object]) -> None:
    spelled = {**config, **moved(config, "dflash_config"), "target_layer_ids": None}
    assert fact(read(draft, spelled)) == fact(read(draft, config))


def test_nvidia(draft: Path, config: dict[str, object]) -> None:
    spelled = moved(config, "dspark_config")
    changes: dict[str, object] = {
        "dflash_config": {"mask_token_id": MASK_ID, "target_layer_ids": None},
        "eagle_aux_hidden_state_layer_ids": [2, 4],
        "has_embed_tokens": False,
        "has_lm_head": False,
        "use_swa": False,
        "swa_window_size": 128,
        "sample_from_anchor": True,
    }
    found = read(draft, spelled, **changes)
    assert fact(found) == fact(read(draft, config))


def test_speculators(draft: Path, config: dict[str, object]) -> None:
    layers = {k: v for k, v in config.items() if k not in (*METHOD_KEYS, "architectures", "dtype")}
    spelled = {
        "architectures": ["DSparkSpeculator"],
        "aux_hidden_state_layer_ids": [2, 4],
        "block_size": 4,
        "confidence_head_with_markov": True,
        "draft_vocab_size": 288,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 8,
        "mask_token_id": MASK_ID,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": "dspark", "verifier": {"name_or_path": "x"}},
        "speculators_model_type": "dspark",
        "speculators_version": "0.5",
        "transformer_layer_config": layers,
    }
    found = read(draft, spelled)
    assert found.target_layer_ids == (1, 3)
    assert found.numbering == "aux_hidden_state_layer_ids"
    assert found.text.head_dim == 32
    assert found.text.where.endswith("transformer_layer_config")
    assert found.text.architectures == ("DSparkSpeculator",)
    assert found.block_size == 4


def fact(config: DSparkConfig) -> tuple[object, ...]:
    """Everything but how it was written."""
    return (
        config.block_size,
        config.target_layer_ids,
        config.mask_token_id,
        config.markov_rank,
        config.confidence,
        config.num_target_layers,
        config.text.head_dim,
    )


@given(
    st.fixed_dictionaries(
        {
            key: st.lists(
                st.sampled_from(["top", "dspark_config", "dflash_config", "eagle_config"]),
                min_size=1,
                unique=True,
            )
            for key in METHOD_KEYS
        }
    ),
    st.lists(st.sampled_from(METHOD_KEYS), unique=True),
)
@settings(max_examples=25, deadline=None)
def test_any_key_in_any_places(
    draft: Path, config: dict[str, object], places: dict[str, list[str]], nulls: list[str]
) -> None:
    """Where a fact is written, and how often, does not matter; nulls are nothing."""
    spelled: dict[str, object] = {k: v for k, v in config.items() if k not in METHOD_KEYS}
    sections: dict[str, dict[str, object]] = {}
    for key, chosen in places.items():
        for place in chosen:
            holder = spelled if place == "top" else sections.setdefault(place, {})
            holder[key] = config[key]
    for key in nulls:
        sections.setdefault("dspark_config", {}).setdefault(key, None)
        spelled.setdefault(key, None)
    spelled |= sections
    try:
        assert fact(read(draft, spelled)) == fact(read(draft, config))
    finally:
        write(draft, config)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("block_size", 5, "is 4, .*is 5"),
        ("mask_token_id", 7, f"is {MASK_ID}, .*is 7"),
        ("markov_rank", 16, "is 8, .*is 16"),
        ("target_layer_ids", [0, 2], r"is \[1, 3\], .*is \[0, 2\]"),
        ("num_target_layers", 8, "is 4, .*is 8"),
        ("enable_confidence_head", False, "is true, .*is false"),
    ],
)
@pytest.mark.parametrize("place", ["dspark_config", "dflash_config", "eagle_config"])
def test_two_values_that_differ(
    draft: Path, config: dict[str, object], place: str, key: str, value: object, shown: str
) -> None:
    with pytest.raises(InputError, match=shown) as caught:
        read(draft, config, **{place: {key: value}})
    assert caught.value.id == "draft/config-conflict"
    assert caught.value.diagnostics[0].where == f"draft/config.json: {place}.{key}"


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id"])
def test_other_names_of_the_mask(draft: Path, config: dict[str, object], key: str) -> None:
    assert read(draft, config, mask_token_id=DROP, **{key: 12}).mask_token_id == 12
    with pytest.raises(InputError, match=r"is 287, .* is 12") as caught:
        read(draft, config, **{key: 12})
    assert caught.value.id == "draft/config-conflict"


class TestTappedLayers:
    @pytest.mark.parametrize(
        "key", ["aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"]
    )
    @pytest.mark.parametrize("place", ["top", "eagle_config"])
    def test_lists_of_inputs_are_one_more(
        self, draft: Path, config: dict[str, object], key: str, place: str
    ) -> None:
        given_ = {key: [0, 2, 4]}
        changes: dict[str, object] = given_ if place == "top" else {place: given_}
        found = read(draft, config, target_layer_ids=DROP, **changes)
        assert found.target_layer_ids == (-1, 1, 3)
        assert found.numbering == key

    def test_both_numberings_of_the_same_layers(
        self, draft: Path, config: dict[str, object]
    ) -> None:
        found = read(draft, config, aux_hidden_state_layer_ids=[2, 4])
        assert found.target_layer_ids == (1, 3)
        assert found.numbering == "target_layer_ids"

    def test_both_numberings_of_different_layers(
        self, draft: Path, config: dict[str, object]
    ) -> None:
        with pytest.raises(InputError, match=r"\[1, 3\].*\[0, 2\]") as caught:
            read(draft, config, aux_hidden_state_layer_ids=[1, 3])
        assert caught.value.id == "draft/config-conflict"
        assert "numbers inputs" in caught.value.diagnostics[0].help

    @pytest.mark.parametrize("ids", [[], [3, 1], [1, 1], [0, 2, 2]], ids=str)
    def test_unusable_lists(self, draft: Path, config: dict[str, object], ids: list[int]) -> None:
        with pytest.raises(InputError) as caught:
            read(draft, config, target_layer_ids=ids)
        assert caught.value.id == "draft/tapped-layers"

    @pytest.mark.parametrize("ids", [[-2], ["1"], [1.0], [True], 3, {"a": 1}, [2**40]], ids=str)
    def test_no_layer_numbers(self, draft: Path, config: dict[str, object], ids: object) -> None:
        with pytest.raises(InputError, match="target_layer_ids") as caught:
            read(draft, config, target_layer_ids=ids)
        assert caught.value.id == "config/bad-value"

    def test_missing(self, draft: Path, config: dict[str, object]) -> None:
        with pytest.raises(InputError, match="no tapped layers") as caught:
            read(draft, config, target_layer_ids=None)
        assert len(caught.value.diagnostics[0].notes) == 3

    @pytest.mark.parametrize("ids", [[1, 4], [9]], ids=str)
    def test_beyond_the_target(self, tmp_path: Path, ids: list[int]) -> None:
        target = write_target(tmp_path / "t", quantized=False, tokenizer=False)
        draft = write_draft(tmp_path / "d", target_layer_ids=ids)
        with pytest.raises(InputError, match="has 4 layers") as caught:
            lift(target, draft)
        assert caught.value.id == "draft/tapped-layers"

    def test_another_depth_of_the_target(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "t", quantized=False, tokenizer=False)
        draft = write_draft(tmp_path / "d", target_layers=6)
        with pytest.raises(InputError, match="target of 6 layers, this one has 4") as caught:
            lift(target, draft)
        assert caught.value.id == "draft/target-layers"

    def test_the_report_names_both_numberings(self, tmp_path: Path) -> None:
        target = write_target(tmp_path / "t", quantized=False, tokenizer=False)
        draft = write_draft(
            tmp_path / "d", target_layer_ids=[1, 3], aux_hidden_state_layer_ids=[2, 4]
        )
        edit_json(draft / "config.json", target_layer_ids=DROP)
        (line,) = [d for d in lift(target, draft).decisions if "target layers" in d]
        assert "[1, 3] (from 0; read from aux_hidden_state_layer_ids)" in line


@pytest.mark.parametrize("key", ["block_size", "mask_token_id"])
@pytest.mark.parametrize("value", [DROP, None])
def test_no_default_is_invented(
    draft: Path, config: dict[str, object], key: str, value: object
) -> None:
    with pytest.raises(InputError, match="is missing") as caught:
        read(draft, config, **{key: value})
    assert caught.value.id == "config/missing-key"
    assert any(key in note for note in caught.value.diagnostics[0].notes)
    assert "silently wrong" in caught.value.diagnostics[0].help


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("block_size", 0),
        ("block_size", 7.0),
        ("block_size", "7"),
        ("block_size", True),
        ("block_size", 2**31),
        ("mask_token_id", -1),
        ("mask_token_id", [287]),
        ("markov_rank", -8),
        ("markov_rank", "vanilla"),
        ("num_target_layers", 0),
        ("markov_head_type", 1),
        ("enable_confidence_head", "yes"),
        ("sample_from_anchor", 1),
        ("dflash_config", [1]),
        ("dspark_config", "x"),
    ],
)
def test_values_of_a_wrong_type(
    draft: Path, config: dict[str, object], key: str, value: object
) -> None:
    with pytest.raises(InputError, match=key) as caught:
        read(draft, config, **{key: value})
    assert caught.value.id == "config/bad-value"
    assert caught.value.diagnostics[0].where == f"draft/config.json: {key}"


@pytest.mark.parametrize("mask", [288, 400, 2**31 - 1])
def test_a_mask_without_a_row(tmp_path: Path, mask: int) -> None:
    target = write_target(tmp_path / "t", quantized=False, tokenizer=False)
    draft = write_draft(tmp_path / "d", mask_token_id=mask)
    with pytest.raises(InputError, match=f"{mask} has no row in an embedding of 288 rows") as e:
        lift(target, draft)
    assert e.value.id == "draft/mask-token"


@pytest.mark.parametrize(
    ("changes", "id", "word"),
    [
        ({"is_causal": True}, "draft/attention", "is_causal"),
        ({"dflash_config": {"causal": True}}, "draft/attention", "causal"),
        ({"dspark_config": {"causal_head": True}}, "draft/attention", "causal_head"),
        ({"dflash_query_causal": True}, "draft/attention", "dflash_query_causal"),
        ({"attention_sink_bias": True}, "draft/attention", "attention_sink_bias"),
        ({"is_neox_style": False}, "draft/rope-layout", "is_neox_style"),
        ({"use_swa": True, "swa_window_size": 64}, "draft/sliding-window", "use_swa"),
        (
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 8,
                "sliding_window_non_causal": True,
            },
            "draft/sliding-window",
            "non_causal",
        ),
        ({"markov_head_type": "lstm"}, "draft/markov-type", "lstm"),
        ({"dflash_config": {"projector_type": "domino"}}, "draft/kind", "domino"),
        ({"model_type": "deepseek_v4"}, "draft/kind", "deepseek"),
        ({"model_type": "gemma4_text"}, "draft/kind", "gemma"),
        ({"architectures": ["Gemma4DSparkModel"]}, "draft/kind", "gemma"),
        ({"architectures": ["DeepseekV4DSparkModel"]}, "draft/kind", "deepseek"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "draft/activation", "gelu_pytorch_tanh"),
        ({"final_logit_softcapping": 30.0}, "draft/logit-scale", "softcapping"),
        ({"final_logit_softcapping": 1.0}, "draft/logit-scale", "softcapping"),
        ({"dflash_config": {"output_multiplier": 0.5}}, "draft/logit-scale", "output_multiplier"),
        ({"logit_scale": 2.0}, "draft/logit-scale", "logit_scale"),
        ({"attention_value_scale": 0.7}, "draft/logit-scale", "attention_value_scale"),
    ],
    ids=str,
)
def test_variants_are_refused_by_name(
    draft: Path, config: dict[str, object], changes: dict[str, object], id: str, word: str
) -> None:
    with pytest.raises(UnsupportedError, match=word) as caught:
        read(draft, config, **changes)
    assert caught.value.id == id


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_from_anchor": True},
        {"dspark_bonus_anchor": False},
        {"shift_label": True},
        {"causal": False, "is_causal": False},
        {"attention_sink_bias": False},
        {"is_neox_style": True},
        {"use_swa": False},
        {"sliding_window": 64, "use_sliding_window": False, "layer_types": DROP},
        {"final_logit_softcapping": None, "logit_scale": 1.0, "output_multiplier": 1.0},
        {"architectures": DROP},
        {
            "architectures": ["DSparkDraftModel"],
            "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        },
        {"markov_head_type": DROP},
        {"tie_word_embeddings": True},
        {"num_anchors": DROP},
        {"num_target_layers": DROP},
    ],
)
def test_neutral_values_are_fine(
    draft: Path, config: dict[str, object], changes: dict[str, object]
) -> None:
    assert read(draft, config, **changes).block_size == 4


def test_rank_by_the_config_alone(draft: Path, config: dict[str, object]) -> None:
    for changes, expected in (
        ({}, 8),
        ({"markov_rank": DROP}, None),
        ({"markov_rank": None, "dflash_config": {"markov_rank": 0}}, 0),
    ):
        changed = {k: v for k, v in {**config, **changes}.items() if v is not DROP}
        with Checkpoint.open(write(draft, changed), role="draft") as checkpoint:
            assert declared_rank(checkpoint) == expected


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"dspark_config": {"sample_from_anchor": False}}, "dspark_config.sample_from_anchor"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        ({"dflash_config": {"shift_label": False}}, "dflash_config.shift_label"),
        ({"sample_from_anchor": False, "dspark_bonus_anchor": True}, "sample_from_anchor"),
    ],
)
def test_masks_that_fill_their_own_positions(
    draft: Path, config: dict[str, object], changes: dict[str, object], source: str
) -> None:
    found = read(draft, config, **changes)
    assert (found.layout, found.layout_from) == ("masks-fill", source)
    assert (found.first_slot, found.proposals) == (1, found.block_size - 1)
    assert read(draft, config).layout == "anchor-predicts"


def test_layouts_that_contradict_each_other(draft: Path, config: dict[str, object]) -> None:
    with pytest.raises(InputError, match="contradict each other") as caught:
        read(draft, config, sample_from_anchor=True, dspark_bonus_anchor=True)
    assert caught.value.id == "draft/slot-layout"
