"""The Qwen3 frontend against an independent float64 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from helpers.checkpoints import DROP, Tensors, edit_json, edit_tensors, write_draft, write_target
from helpers.lifted import Lifted
from helpers.reference import Target

TOLERANCE = 2e-6
"""Relative. The rotary tables are float32; everything else is float64 on both sides."""

IDS = [3, 141, 59, 26, 53, 58, 97, 93, 238, 46, 264]

ROPES: Mapping[str, dict[str, object]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.25,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
    },
}


def close(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether the largest difference is small beside the largest expected value."""
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max()) <= TOLERANCE * float(np.abs(expected).max())


def small_target(path: Path, **changes: Any) -> Path:
    """A target of two narrow layers, unquantized unless asked for."""
    sizes = {"layers": 2, "hidden": 32, "head_dim": 16, "intermediate": 48}
    return write_target(path, **{**sizes, "tokenizer": False, "quantized": False, **changes})


def add_biases(path: Path, *modules: str) -> Path:
    """Give linear layers whose name ends so a random bias."""
    random = np.random.default_rng(99)

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            module = name.removesuffix(".weight")
            if module != name and module.endswith(modules):
                bias = random.standard_normal(tensors[name].shape[0]) * 0.5
                tensors[f"{module}.bias"] = bias.astype(ml_dtypes.bfloat16)

    return edit_tensors(path, change)


def check(path: Path, ids: list[int] = IDS) -> None:
    """Logits of all rows and all layer outputs of the lifted graph equal the reference."""
    layers = int(Target(path).config["num_hidden_layers"])
    draft = write_draft(
        path.parent / f"{path.name}-taps",
        hidden=int(Target(path).config["hidden_size"]),
        layers=1,
        target_layers=layers,
        target_layer_ids=range(-1, layers),
    )
    found = Lifted(path, draft).target(ids)
    expected = Target(path).run(ids)
    assert close(found["logits"], expected.logits)
    assert close(found["hidden_tap"], expected.taps(range(-1, layers)))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "hidden"),
    [(4, 2, 32, 64), (4, 4, 8, 32), (4, 1, 16, 32), (6, 3, 10, 16), (1, 1, 2, 16), (2, 1, 8, 16)],
)
def test_head_layouts(
    tmp_path: Path, heads: int, kv_heads: int, head_dim: int, hidden: int
) -> None:
    check(
        small_target(
            tmp_path / "t", heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=hidden
        )
    )


@pytest.mark.parametrize("quantized_head", [True, False])
def test_quantized(tmp_path: Path, quantized_head: bool) -> None:
    check(small_target(tmp_path / "t", quantized=True, quantized_head=quantized_head))


def test_one_layer_of_one_head(tmp_path: Path) -> None:
    check(small_target(tmp_path / "t", layers=1, heads=1, kv_heads=1))


@pytest.mark.parametrize("quantized", [False, True])
def test_tied_embedding_is_the_head(tmp_path: Path, quantized: bool) -> None:
    path = small_target(tmp_path / "t", tied=True, quantized=quantized)
    check(path)
    module = lift(path)
    assert not [name for name in module.weights if "lm_head" in name]


@pytest.mark.parametrize("rope", ROPES)
def test_rotary_embedding(tmp_path: Path, rope: str) -> None:
    check(small_target(tmp_path / "t", rope_parameters=ROPES[rope]), list(range(40)))


def test_old_spelling_of_the_rotary_embedding(tmp_path: Path) -> None:
    scaling = {k: v for k, v in ROPES["yarn"].items() if k not in ("rope_type", "rope_theta")}
    path = small_target(tmp_path / "t", rope_parameters=ROPES["yarn"])
    expected = Target(path).run(IDS)
    edit_json(
        path / "config.json",
        rope_parameters=DROP,
        rope_theta=ROPES["yarn"]["rope_theta"],
        rope_scaling={"type": "yarn", **scaling},
    )
    assert close(Lifted(path).target(IDS)["logits"], expected.logits)


@pytest.mark.parametrize(
    "modules",
    [
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        ("q_proj", "k_proj", "v_proj"),
        ("o_proj",),
        ("v_proj", "down_proj"),
        ("gate_proj", "up_proj", "down_proj"),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("announced", [False, True])
def test_a_bias_exists_if_it_is_stored(
    tmp_path: Path, modules: tuple[str, ...], announced: bool
) -> None:
    path = small_target(tmp_path / "t", attention_bias=announced, mlp_bias=announced)
    check(add_biases(path, *modules))


def test_a_bias_beside_packed_weights(tmp_path: Path) -> None:
    check(add_biases(small_target(tmp_path / "t", quantized=True), "q_proj", "o_proj"))


@pytest.mark.parametrize("name", ["lm_head.bias", "model.norm.bias", "model.embed_tokens.bias"])
def test_a_parameter_that_would_not_be_computed_is_refused(tmp_path: Path, name: str) -> None:
    path = small_target(tmp_path / "t")
    edit_tensors(path, lambda tensors: {**tensors, name: np.ones(4, dtype=np.float32)})
    with pytest.raises(UnsupportedError, match=name) as caught:
        lift(path)
    assert caught.value.id == "checkpoint/unread-parameter"


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None)
def test_chunks_equal_the_whole_sequence(
    pair: tuple[Lifted, Target], chunks: list[int], seed: int
) -> None:
    lifted, reference = pair
    lifted.reset()
    ids = np.random.default_rng(seed).integers(0, 288, sum(chunks)).tolist()
    expected = reference.run(ids).logits
    for chunk in chunks:
        start = lifted.lengths["target"]
        found = lifted.target(ids[start : start + chunk])["logits"]
        assert close(found, expected[start : start + chunk])


def test_rejected_rows_leave_no_trace(pair: tuple[Lifted, Target]) -> None:
    lifted, reference = pair
    lifted.reset()
    lifted.target(IDS[:5])
    lifted.target([7, 7, 7, 7], keep=0)
    lifted.target([IDS[5], 9, 9], keep=1)
    found = lifted.target(IDS[6:])["logits"]
    assert close(found, reference.run(IDS).logits[6:])


WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


@pytest.fixture(scope="module", params=[{}, WINDOWS], ids=["full", "windows"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Lifted, Target]:
    """A small target both ways; the caches of the lifted one are full of garbage."""
    path = small_target(tmp_path_factory.mktemp("qwen3") / "t", **request.param)
    return Lifted(path, garbage=1e3), Target(path)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 64, 65, 66])
def test_windows(tmp_path: Path, window: int) -> None:
    """One that holds all rows of the cache is none."""
    path = small_target(tmp_path / "t", **{**WINDOWS, "sliding_window": window})
    check(path)
    nodes = lift(path, options=LiftOptions(max_model_len=64)).graphs["target"].nodes
    found = [n.attrs.window for n in nodes if n.op.name == "attention"]  # type: ignore[attr-defined]
    assert found == [window if window < 65 else None, None]


def test_a_bias_that_some_layers_lack(tmp_path: Path) -> None:
    path = add_biases(small_target(tmp_path / "t"), "layers.1.self_attn.k_proj")
    with pytest.raises(InputError, match="stored for layers 1, but not for 0") as caught:
        lift(path)
    assert caught.value.id == "checkpoint/missing-bias"
    assert caught.value.diagnostics[0].where == "target: layers.0.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    ("change", "id"),
    [
        ({"hidden_act": "gelu"}, "target/activation"),
        ({"model_type": "gemma3_text"}, "target/architecture"),
        ({"model_type": DROP}, "target/architecture"),
        ({"model_type": "olmo", "architectures": DROP}, "target/architecture"),
        (
            {
                "model_type": "llama",
                "layer_types": ["full_attention", "sliding_attention"],
                "sliding_window": 8,
            },
            "target/layer-type",
        ),
        ({"layer_types": ["full_attention", "linear_attention"]}, "target/layer-type"),
        ({"model_type": "qwen3_moe", "intermediate_size": DROP}, "target/experts"),
        ({"model_type": "mixtral"}, "target/experts"),
        ({"num_local_experts": 8}, "target/experts"),
        ({"text_config": {"model_type": "qwen3_5_moe_text"}}, "target/experts"),
    ],
)
def test_other_networks_are_refused(tmp_path: Path, change: Mapping[str, object], id: str) -> None:
    path = small_target(tmp_path / "t")
    edit_json(path / "config.json", **change)
    with pytest.raises(UnsupportedError) as caught:
        lift(path)
    assert caught.value.id == id


def test_a_window_that_is_switched_off_is_ignored(tmp_path: Path) -> None:
    path = small_target(tmp_path / "t", layer_types=DROP, sliding_window=4)
    check(path)


class TestHead:
    def test_untied_without_a_head(self, tmp_path: Path) -> None:
        path = small_target(tmp_path / "t", tied=True, tie_word_embeddings=False)
        with pytest.raises(InputError, match="no lm_head and tie_word_embeddings is false") as e:
            lift(path)
        assert e.value.id == "bind/no-lm-head"

    def test_tied_with_an_equal_head_is_one_weight(self, tmp_path: Path) -> None:
        path = small_target(tmp_path / "t", tied=True)
        edit_tensors(
            path,
            lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]},
        )
        check(path)
        graph = lift(path).graphs["target"]
        assert "target.lm_head.weight" not in list(graph.used_weights())

    def test_tied_with_another_head(self, tmp_path: Path) -> None:
        path = small_target(tmp_path / "t", tie_word_embeddings=True)
        with pytest.raises(InputError, match="differs from the embedding") as caught:
            lift(path)
        assert caught.value.id == "target/tied-heads-differ"
        assert "tie_word_embeddings" in caught.value.diagnostics[0].help

    def test_tied_with_a_quantized_head(self, tmp_path: Path) -> None:
        path = small_target(tmp_path / "t", quantized=True, tie_word_embeddings=True)
        check(path)
        (decision,) = [d for d in lift(path).decisions if "tie_word_embeddings" in d]
        assert "nvfp4" in decision
        assert "dense<bf16>" in decision


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"), "self_attn.q_norm.weight"),
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda t: t.pop("model.embed_tokens.weight"), "model.embed_tokens.weight"),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight"), "mlp.up_proj.weight"),
    ],
)
def test_missing_tensor(tmp_path: Path, change: Any, words: str) -> None:
    path = small_target(tmp_path / "t")

    def apply(tensors: Tensors) -> None:
        change(tensors)

    edit_tensors(path, apply)
    with pytest.raises(InputError) as caught:
        lift(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 48},
        {"intermediate_size": 64},
        {"vocab_size": 320},
        {"num_attention_heads": 2},
        {"num_key_value_heads": 1},
        {"head_dim": 8},
    ],
    ids=str,
)
def test_config_and_tensors_disagree(tmp_path: Path, change: dict[str, object]) -> None:
    path = small_target(tmp_path / "t")
    edit_json(path / "config.json", **change)
    with pytest.raises(InputError) as caught:
        lift(path)
    assert caught.value.id in ("quant/bad-shape", "checkpoint/shape", "config/head-dim")
    assert any(character.isdigit() for character in caught.value.diagnostics[0].message)


def norm_of_integers(tensors: Tensors) -> None:
    name = "model.norm.weight"
    tensors[name] = np.ones(tensors[name].shape, dtype=np.int32)


def test_a_norm_of_integers(tmp_path: Path) -> None:
    path = edit_tensors(small_target(tmp_path / "t"), norm_of_integers)
    with pytest.raises(InputError, match="floating-point") as caught:
        lift(path)
    assert "model.norm.weight" in caught.value.diagnostics[0].where
