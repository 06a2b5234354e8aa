from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, parse_rope, read_text_config
from edgecc.ir.rope import RopeParams
from helpers.checkpoints import (
    DROP,
    Tensors,
    edit_json,
    edit_tensors,
    write_draft,
    write_target,
)

PAIRS = Path(__file__).parents[1] / "data" / "pairs"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose config tests overwrite: the weights stay as they are."""
    return write_target(tmp_path_factory.mktemp("config") / "t", shards=2)


@pytest.fixture(scope="module")
def original(target: Path) -> str:
    return (target / "config.json").read_text()


def read(path: Path, original: str, **changes: object) -> TextConfig:
    (path / "config.json").write_text(original)
    edit_json(path / "config.json", **changes)
    with Checkpoint.open(path, role="target") as checkpoint:
        return read_text_config(checkpoint)


def test_values_of_a_plain_config(target: Path, original: str) -> None:
    config = read(target, original)
    assert config == TextConfig(
        architectures=("Qwen3ForCausalLM",),
        model_type="qwen3",
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=288,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        max_position_embeddings=512,
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        rope=RopeParams(1e6, 32),
        layer_types=("full_attention",) * 4,
        sliding_windows=(None,) * 4,
        bos_token_ids=frozenset({256}),
        eos_token_ids=frozenset({256, 258}),
        pad_token_id=None,
        where="target/config.json",
    )


def test_the_committed_pair() -> None:
    with Checkpoint.open(PAIRS / "tiny-qwen3-nvfp4", role="target") as checkpoint:
        config = read_text_config(checkpoint)
    assert config.eos_token_ids == {4092, 4094}
    assert (config.head_dim, config.rope.theta, config.rope.dim) == (64, 1e6, 64)
    with Checkpoint.open(PAIRS / "tiny-qwen3-dspark", role="draft") as checkpoint:
        draft = read_text_config(checkpoint)
    assert (draft.num_hidden_layers, draft.intermediate_size) == (2, 512)
    assert draft.where == "draft/config.json"


REQUIRED = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
]


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [DROP, None])
def test_required_keys(target: Path, original: str, key: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{key} is missing") as caught:
        read(target, original, **{key: value})
    assert caught.value.diagnostics[0].where == f"target/config.json: {key}"


WHOLE = [True, False, 0, -1, 1.5, 64.0, "64", [64], {}, 10**40, math.nan, math.inf]
WRONG: dict[str, list[object]] = {
    "hidden_size": WHOLE,
    "intermediate_size": WHOLE,
    "num_hidden_layers": WHOLE,
    "num_attention_heads": WHOLE,
    "num_key_value_heads": [*WHOLE, 3],
    "head_dim": WHOLE,
    "vocab_size": WHOLE,
    "max_position_embeddings": WHOLE,
    "rms_norm_eps": [True, 0, -1e-6, "1e-6", math.nan, math.inf, 10**400, [1e-6]],
    "hidden_act": [1, True, ["silu"]],
    "model_type": [1, {}],
    "architectures": ["Qwen3ForCausalLM", [1], {}],
    "attention_bias": [0, 1, "false", []],
    "mlp_bias": [0, "true"],
    "tie_word_embeddings": [0, 1, "true"],
    "layer_types": ["full_attention", [1] * 4, ["full_attention"] * 3],
    "eos_token_id": [True, -1, 1.5, "258", [True], [-1], [258, 288], 288],
    "bos_token_id": [288, "x"],
    "pad_token_id": [-2, "x", True],
    "text_config": [1, [], "x"],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_wrong_values_name_key_and_expectation(
    target: Path, original: str, key: str, value: object
) -> None:
    with pytest.raises(InputError, match=r"expected|must") as caught:
        read(target, original, **{key: value})
    first = caught.value.diagnostics[0]
    assert first.id in ("config/bad-value", "config/missing-key")
    assert first.where.startswith("target/config.json")
    assert key in first.where + first.message


OPTIONAL = {
    "num_key_value_heads": 4,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "architectures": (),
    "model_type": "",
    "layer_types": ("full_attention",) * 4,
    "pad_token_id": None,
}


@pytest.mark.parametrize("key", OPTIONAL)
@pytest.mark.parametrize("value", [DROP, None])
def test_optional_keys_may_be_absent_or_null(
    target: Path, original: str, key: str, value: object
) -> None:
    head_dim = 16 if key == "num_key_value_heads" else 32  # 64 rows over 4 heads
    config = read(target, original, **{"head_dim": head_dim, key: value})
    assert getattr(config, key) == OPTIONAL[key]


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (DROP, {258}),
        (None, {258}),
        (256, {256, 258}),
        ([], {258}),
        ([256, 257], {256, 257, 258}),
    ],
)
def test_eos_is_the_union(tmp_path: Path, generation: object, expected: set[int]) -> None:
    path = write_target(tmp_path / "t", layers=1)
    edit_json(path / "generation_config.json", eos_token_id=generation)
    with Checkpoint.open(path, role="target") as checkpoint:
        assert read_text_config(checkpoint).eos_token_ids == expected


def test_wrong_eos_in_the_generation_config(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", layers=1)
    edit_json(path / "generation_config.json", eos_token_id=[9999])
    with (
        Checkpoint.open(path, role="target") as checkpoint,
        pytest.raises(InputError, match="below vocab_size 288") as caught,
    ):
        read_text_config(checkpoint)
    assert caught.value.diagnostics[0].where == "target/generation_config.json: eos_token_id"


def test_old_llama_writes_minus_one_for_no_padding(target: Path, original: str) -> None:
    assert read(target, original, pad_token_id=-1).pad_token_id is None
    assert read(target, original, pad_token_id=3).pad_token_id == 3


# head_dim


@pytest.mark.parametrize("value", [DROP, None, 32])
def test_head_dim_comes_from_config_or_weights(target: Path, original: str, value: object) -> None:
    # hidden / heads is 16: the stored key projection says 32
    assert read(target, original, head_dim=value).head_dim == 32


def test_head_dim_that_contradicts_the_weights(target: Path, original: str) -> None:
    with pytest.raises(
        InputError, match=r"head_dim is 16.*64 rows for 2 heads \(32 each\)"
    ) as caught:
        read(target, original, head_dim=16)
    assert "k_proj.weight" in caught.value.diagnostics[0].notes[0]


def test_key_value_heads_that_contradict_the_weights(target: Path, original: str) -> None:
    with pytest.raises(InputError, match=r"head_dim is 32.*\(64 each\)"):
        read(target, original, num_key_value_heads=1)
    assert read(target, original, num_key_value_heads=None, head_dim=16).num_key_value_heads == 4


def test_head_dim_without_a_key_projection(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", layers=1)
    edit_tensors(path, lambda t: {k: v for k, v in t.items() if "k_proj" not in k})
    text = (path / "config.json").read_text()
    assert read(path, text, head_dim=48).head_dim == 48
    assert read(path, text, head_dim=None).head_dim == 16
    with pytest.raises(InputError, match="hidden_size 64 / 3 heads"):
        read(path, text, head_dim=None, num_attention_heads=3, num_key_value_heads=3)


def test_rows_packed_four_bits_each_are_no_evidence(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", layers=1, quantized=False)
    key = "model.layers.0.self_attn.k_proj.weight"

    def pack(tensors: Tensors) -> None:
        tensors[key] = np.zeros((32, 64), np.uint8)
        tensors[f"{key}_scale"] = np.ones((64, 1), np.float32)

    edit_tensors(path, pack)
    assert read(path, (path / "config.json").read_text()).head_dim == 32


def test_mtp_layers_are_not_looked_at(tmp_path: Path) -> None:
    path = write_target(tmp_path / "t", layers=1, quantized=False)

    def move(tensors: Tensors) -> Tensors:
        mtp = {f"mtp.{k[6:]}": v[:8] for k, v in tensors.items() if "k_proj" in k}
        return {k: v for k, v in tensors.items() if "k_proj" not in k} | mtp

    edit_tensors(path, move)
    assert read(path, (path / "config.json").read_text(), head_dim=64).head_dim == 64


# Nesting


def test_multimodal_nesting(target: Path, original: str) -> None:
    flat = json.loads(original)
    outer = {k: flat.pop(k) for k in ("architectures", "quantization_config", "eos_token_id")}
    flat["eos_token_id"] = 257
    nested = {**outer, "tie_word_embeddings": True, "text_config": flat}
    text = json.dumps(nested)
    config = read(target, text)
    assert config.where == "target/config.json: text_config"
    assert config.hidden_size == 64
    assert config.tie_word_embeddings is True
    assert config.eos_token_ids == {256, 257, 258}
    del flat["hidden_size"]
    with pytest.raises(InputError) as caught:
        read(target, json.dumps({**nested, "text_config": flat}))
    assert caught.value.diagnostics[0].where == "target/config.json: text_config.hidden_size"


# Windows


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, [8, 8, 8, 8]),
        ({"model_type": "mistral", "sliding_window": None}, [None] * 4),
        ({"model_type": "mistral", "sliding_window": DROP}, [4096] * 4),
        ({"model_type": "ministral", "sliding_window": 8}, [8, 8, 8, 8]),
        (
            {
                "model_type": "ministral",
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            [None, 8, None, 8],
        ),
        ({"model_type": "qwen2", "sliding_window": 8}, [None] * 4),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 8,
                "use_sliding_window": True,
                "max_window_layers": 2,
            },
            [None, None, 8, 8],
        ),
        ({"model_type": "llama", "sliding_window": 8}, [None] * 4),
        ({"model_type": "qwen3", "sliding_window": 8}, [None] * 4),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": False}, [None] * 4),
        (
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
            [None, None, None, 8],
        ),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, [8] * 4),
        ({"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 9}, [None] * 4),
        (
            {
                "layer_types": ["full_attention", "sliding_attention"] * 2,
                "sliding_window": 5,
                "use_sliding_window": False,
            },
            [None, 5, None, 5],
        ),
    ],
)
def test_windows(
    target: Path, original: str, changes: dict[str, object], windows: list[int | None]
) -> None:
    base: dict[str, object] = {"layer_types": DROP, "use_sliding_window": DROP}
    config = read(target, original, **(base | changes))
    assert list(config.sliding_windows) == windows
    assert [w is not None for w in windows] == [
        k == "sliding_attention" for k in config.layer_types
    ]


def test_window_missing_or_layer_type_unknown(target: Path, original: str) -> None:
    with pytest.raises(InputError, match="sliding_window is missing"):
        read(target, original, layer_types=["sliding_attention"] * 4)
    with pytest.raises(UnsupportedError, match="'chunked_attention'"):
        read(target, original, layer_types=["chunked_attention"] * 4)


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 512),
        ({"rope_type": "dynamic", "factor": 4.0}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}, 512),
    ],
)
def test_yarn_extends_the_positions(
    target: Path, original: str, rope: dict[str, object], positions: int
) -> None:
    changes = {"max_position_embeddings": 512, "rope_parameters": {**rope, "rope_theta": 1e4}}
    assert read(target, original, **changes).max_position_embeddings == positions


@pytest.mark.parametrize(
    ("interval", "kinds"),
    [(DROP, "LLLF"), (4, "LLLF"), (2, "LFLF"), (1, "FFFF"), (3, "LLFL"), (9, "LLLL")],
)
def test_kinds_of_hybrid_layers_follow_the_interval(
    target: Path, original: str, interval: object, kinds: str
) -> None:
    changes = {"model_type": "qwen3_5_text", "layer_types": DROP}
    config = read(target, original, **changes, full_attention_interval=interval)
    names = {"L": "linear_attention", "F": "full_attention"}
    assert config.layer_types == tuple(names[kind] for kind in kinds)
    assert config.sliding_windows == (None,) * 4
    other = read(target, original, layer_types=DROP, full_attention_interval=interval)
    assert other.layer_types == ("full_attention",) * 4


def test_a_wrapped_config_may_name_its_family_at_the_top_only(target: Path, original: str) -> None:
    text = {k: v for k, v in json.loads(original).items() if k != "model_type"}
    config = read(target, original, model_type="qwen3_5", text_config=text)
    assert config.model_type == "qwen3_5"
    assert config.at("hidden_size") == "target/config.json: text_config.hidden_size"
    named = read(target, original, text_config={**text, "model_type": "qwen3"})
    assert named.model_type == "qwen3"
    bare = read(target, original)
    assert bare.at("hidden_size") == "target/config.json: hidden_size"


# Rotary embedding


def rope(config: dict[str, object], head_dim: int = 128) -> RopeParams:
    return parse_rope(config, head_dim, "target/config.json")  # type: ignore[arg-type]


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 500000},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"type": "llama3", **LLAMA3},
        },
    ],
)
def test_spellings_of_one_embedding(config: dict[str, object]) -> None:
    assert rope(config) == RopeParams(
        5e5, 128, "llama3", factor=8, original_max_position_embeddings=8192
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RopeParams(1e4, 128)),
        ({"rope_scaling": None, "rope_theta": 1e6}, RopeParams(1e6, 128)),
        ({"rope_scaling": {"type": "default"}}, RopeParams(1e4, 128)),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, RopeParams(1e4, 128)),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, RopeParams(1e4, 128)),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 5e5}}, RopeParams(5e5, 128)),
        (
            {"rope_scaling": {"type": "mrope", "rope_type": "default", "factor": 0}},
            RopeParams(1e4, 128),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeParams(1e4, 128, "linear", 2.0)),
        ({"partial_rotary_factor": 0.25}, RopeParams(1e4, 32)),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, RopeParams(1e4, 64)),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fast": None},
                "max_position_embeddings": 40960,
            },
            RopeParams(1e4, 128, "yarn", 4.0, 40960),
        ),
        (
            {
                "rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": False},
                "original_max_position_embeddings": 32768,
                "max_position_embeddings": 131072,
            },
            RopeParams(1e4, 128, "yarn", 4.0, 32768, truncate=False),
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 4096,
                    "beta_fast": 16,
                    "beta_slow": 2,
                    "attention_factor": 1.5,
                    "mscale": 1.0,
                    "mscale_all_dim": 0.5,
                }
            },
            RopeParams(
                1e4,
                128,
                "yarn",
                4.0,
                4096,
                beta_fast=16,
                beta_slow=2,
                attention_factor=1.5,
                mscale=1.0,
                mscale_all_dim=0.5,
            ),
        ),
    ],
)
def test_rope_rules(config: dict[str, object], expected: RopeParams) -> None:
    assert rope(config) == expected


def test_hybrid_models_rotate_a_quarter_by_default(target: Path, original: str) -> None:
    assert read(target, original, model_type="qwen3_5_text").rope.dim == 8


@pytest.mark.parametrize("rope_type", ["longrope", "proportional", "su"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unsupported_rope_types_are_named(rope_type: str, key: str) -> None:
    with pytest.raises(UnsupportedError, match=rope_type) as caught:
        rope({"rope_scaling": {key: rope_type, "factor": 2.0}})
    assert caught.value.diagnostics[0].where == "target/config.json: rope_scaling.rope_type"


def test_rope_parameters_per_layer_type() -> None:
    with pytest.raises(UnsupportedError, match="between layers"):
        rope({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}})


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 0},
        {"rope_theta": 1},
        {"rope_theta": True},
        {"rope_theta": "10000"},
        {"rope_theta": math.nan},
        {"rope_scaling": []},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": 3}},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        {"rope_scaling": {"type": "linear", "factor": math.inf}},
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {
            "rope_scaling": {"type": "yarn", "factor": 4, "beta_slow": 64},
            "max_position_embeddings": 9,
        },
        {"rope_scaling": {"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
        {"rope_scaling": {"type": "llama3", **LLAMA3, "high_freq_factor": None}},
        {"rope_scaling": {"type": "llama3", **LLAMA3, "original_max_position_embeddings": 0}},
        {"partial_rotary_factor": 0},
        {"partial_rotary_factor": 1.5},
        {"partial_rotary_factor": 1e308},
        {"partial_rotary_factor": 0.01},
        {"partial_rotary_factor": 0.27},
    ],
)
def test_bad_rope_values(config: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        rope(config, head_dim=100)
    assert caught.value.diagnostics[0].where.startswith("target/config.json")


def test_target_and_draft_ropes_are_independent(tmp_path: Path) -> None:
    target = write_target(
        tmp_path / "t", layers=1, rope_scaling={"type": "yarn", "factor": 4.0}, rope_theta=5e5
    )
    draft = write_draft(tmp_path / "d", layers=1)
    with (
        Checkpoint.open(target, role="target") as t,
        Checkpoint.open(draft, role="draft") as d,
    ):
        assert read_text_config(t).rope.rope_type == "yarn"
        assert read_text_config(d).rope == RopeParams(1e6, 32)


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["rope_type", "type", "factor", "x"]), inner, max_size=3
            )
        ),
        max_leaves=8,
    ),
    key=st.sampled_from(
        [*WRONG, "rope_parameters", "rope_scaling", "rope_theta", "sliding_window"]
    ),
)
def test_any_value_is_accepted_or_refused(
    target: Path, original: str, key: str, value: object
) -> None:
    outcome: object = None
    try:
        outcome = read(target, original, **{key: value})
    except (InputError, UnsupportedError) as error:
        outcome = str(error).encode("utf-8")  # printable: no lone surrogates
    assert outcome
