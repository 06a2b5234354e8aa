"""EAGLE3 configs in the spellings of all known writers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import read_text_config
from edgecc.frontends.drafts.eagle3_config import Eagle3Config, default_taps, read_eagle3_config
from edgecc.frontends.lift import lift
from helpers.checkpoints import DROP, edit_json, edit_tensors, write_target
from helpers.eagle3 import DRAFT_IDS, write_eagle3


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft whose config tests overwrite."""
    return write_eagle3(tmp_path_factory.mktemp("eagle3") / "d")


@pytest.fixture(scope="module")
def config(draft: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((draft / "config.json").read_text())
    return found


def read(path: Path, config: dict[str, object], **changes: object) -> Eagle3Config:
    changed = {k: v for k, v in {**config, **changes}.items() if v is not DROP}
    (path / "config.json").write_text(json.dumps(changed))
    with Checkpoint.open(path, role="draft") as checkpoint:
        return read_eagle3_config(checkpoint)


@pytest.mark.parametrize(
    "architecture",
    [
        "LlamaForCausalLM",
        "LlamaForCausalLMEagle3",
        "LlamaForCausalLMEEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3Speculator",
        "Eagle3DraftModel",
        "Qwen3Eagle3Model",
    ],
)
def test_architectures(draft: Path, config: dict[str, object], architecture: str) -> None:
    """The name says little, and nothing depends on it."""
    found = read(draft, config, architectures=[architecture])
    assert found.text.architectures == (architecture,)
    assert found.draft_vocab_size == len(DRAFT_IDS)


def test_speculators(draft: Path, config: dict[str, object]) -> None:
    """The layer's keys are nested, the method's are not; layers are numbered by their inputs."""
    method = {"draft_vocab_size", "architectures"}
    nested: dict[str, object] = {key: config[key] for key in method} | {
        "transformer_layer_config": {k: v for k, v in config.items() if k not in method},
        "speculators_model_type": "eagle3",
        "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
        "norm_before_residual": True,
        "target_hidden_size": None,
    }
    found = read(draft, nested)
    assert found.text.hidden_size == 32
    assert found.target_layer_ids == (1, 17, 32)
    assert found.numbering == "eagle_aux_hidden_state_layer_ids"
    assert found.norm_before_residual
    assert not found.norm_output


def test_deepspec(draft: Path, config: dict[str, object]) -> None:
    found = read(
        draft,
        config,
        target_layer_ids=[1, 9, 17, 25, 33],
        draft_vocab_size=DROP,
        ttt_length=7,
        num_target_layers=36,
    )
    assert found.target_layer_ids == (1, 9, 17, 25, 33)
    assert (found.steps, found.num_target_layers, found.draft_vocab_size) == (7, 36, None)


def test_angelslim(draft: Path, config: dict[str, object]) -> None:
    """No list of layers, and a tie that means nothing."""
    found = read(draft, config, tie_word_embeddings=True, target_model_type="qwen3")
    assert found.target_layer_ids is None
    assert found.target_hidden_size is None
    assert found.steps == 7


class TestTappedLayers:
    @pytest.mark.parametrize(
        "key", ["aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"]
    )
    @pytest.mark.parametrize("place", ["top", "eagle_config"])
    def test_lists_of_inputs_are_one_more(
        self, draft: Path, config: dict[str, object], key: str, place: str
    ) -> None:
        """Traps 13, 14: shifted once, and by the key alone."""
        given = {key: [0, 2, 4]}
        changes: dict[str, object] = given if place == "top" else {place: given}
        found = read(draft, config, **changes)
        assert found.target_layer_ids == (-1, 1, 3)
        assert found.numbering == key

    def test_both_numberings_of_different_layers(
        self, draft: Path, config: dict[str, object]
    ) -> None:
        both = {"target_layer_ids": [1, 3, 4], "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
        with pytest.raises(InputError, match=r"\[1, 3, 4\].*\[0, 2, 3\]") as caught:
            read(draft, config, **both)
        assert caught.value.id == "draft/config-conflict"

    @pytest.mark.parametrize("ids", [[], [3, 1], [1, 1]], ids=str)
    @pytest.mark.parametrize("key", ["target_layer_ids", "eagle_aux_hidden_state_layer_ids"])
    def test_unusable_lists(
        self, draft: Path, config: dict[str, object], key: str, ids: list[int]
    ) -> None:
        """An empty list is no list that is missing."""
        with pytest.raises(InputError) as caught:
            read(draft, config, **{key: ids})
        assert caught.value.id == "draft/tapped-layers"

    def test_null_is_missing(self, draft: Path, config: dict[str, object]) -> None:
        assert read(draft, config, target_layer_ids=None).target_layer_ids is None

    @pytest.mark.parametrize(
        ("layers", "outputs"),
        [(7, (1, 2, 3)), (8, (1, 3, 4)), (28, (1, 13, 24)), (36, (1, 17, 32)), (64, (1, 31, 60))],
    )
    def test_default(self, tmp_path: Path, layers: int, outputs: tuple[int, ...]) -> None:
        """Inputs of 2, n // 2 and n - 3 (28 layers: 2, 14 and 25) are outputs of one less."""
        path = write_target(tmp_path / "t", layers=layers, hidden=16, head_dim=8, intermediate=16)
        with Checkpoint.open(path, role="target") as checkpoint:
            assert default_taps(read_text_config(checkpoint)) == outputs
        inputs = (2, layers // 2, layers - 3)
        assert tuple(i - 1 for i in inputs) == outputs

    @pytest.mark.parametrize("layers", [1, 4, 6])
    def test_default_of_a_short_target(self, tmp_path: Path, layers: int) -> None:
        path = write_target(tmp_path / "t", layers=layers, hidden=16, head_dim=8, intermediate=16)
        with (
            Checkpoint.open(path, role="target") as checkpoint,
            pytest.raises(InputError, match=f"this one has {layers}") as caught,
        ):
            default_taps(read_text_config(checkpoint))
        assert "target_layer_ids" in caught.value.diagnostics[0].help


@pytest.mark.parametrize(
    ("changes", "id", "words"),
    [
        ({"num_hidden_layers": 4}, "draft/layers", "4 layers"),
        ({"architectures": ["PEagleDraftModel"]}, "draft/kind", "P-EAGLE"),
        ({"parallel_drafting": True}, "draft/kind", "P-EAGLE"),
        ({"speculators_model_type": "peagle"}, "draft/kind", "peagle"),
        ({"norm_before_fc": True}, "draft/kind", "norm_before_fc is true"),
        ({"fc_norm": True}, "draft/kind", "fc_norm is true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "draft/kind", "one hidden state"),
        ({"is_neox_style": False}, "draft/rope-layout", "interleaved"),
        ({"hidden_act": "gelu"}, "draft/activation", "gelu"),
        ({"final_logit_softcapping": 30.0}, "draft/logit-scale", "final_logit_softcapping"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 128},
            "draft/sliding-window",
            "sliding windows",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope/unsupported-type", "longrope"),
    ],
)
def test_variants_that_are_not_built(
    draft: Path, config: dict[str, object], changes: dict[str, object], id: str, words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        read(draft, config, **changes)
    assert caught.value.id == id
    assert caught.value.diagnostics[0].where


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_before_fc": False, "fc_norm": False, "parallel_drafting": False},
        {"eagle_config": {"use_aux_hidden_state": True}},
        {"speculators_model_type": "eagle3"},
        {"logit_scale": 1.0},
    ],
    ids=str,
)
def test_flags_that_change_nothing(
    draft: Path, config: dict[str, object], changes: dict[str, object]
) -> None:
    assert read(draft, config, **changes) == read(draft, config)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("draft_vocab_size", 0),
        ("draft_vocab_size", "32000"),
        ("target_hidden_size", -1),
        ("norm_before_residual", 1),
        ("ttt_length", 0),
        ("hidden_size", None),
    ],
)
def test_bad_values(draft: Path, config: dict[str, object], key: str, value: object) -> None:
    with pytest.raises(InputError, match=key) as caught:
        read(draft, config, **{key: value})
    assert caught.value.id in ("config/bad-value", "config/missing-key")


@pytest.mark.parametrize("prefix", ["midlayer", "layers.0"])
def test_the_width_of_a_head_is_what_is_stored(tmp_path: Path, prefix: str) -> None:
    """Released configs of wide targets lack head_dim, and hidden size / heads is something else."""
    draft = write_eagle3(tmp_path / "d", heads=4, head_dim=16, hidden=32)
    edit_tensors(draft, lambda t: {n.replace("midlayer", prefix): a for n, a in t.items()})
    edit_json(draft / "config.json", head_dim=None)
    with Checkpoint.open(draft, role="draft") as checkpoint:
        assert read_eagle3_config(checkpoint).text.head_dim == 16
    edit_json(draft / "config.json", head_dim=8)
    with pytest.raises(InputError, match=r"head_dim is 8, .*\(16 each\)") as caught:
        lift(None, draft)
    assert caught.value.id == "config/head-dim"
