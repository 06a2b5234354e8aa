"""A published 27B pair by its shapes: mixed-precision hybrid target, both revisions of its draft.

Shapes, counts and keys are those of the public files; there are no bytes behind them.
"""

from __future__ import annotations

import json
import math
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgecc.errors import InputError
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir.rope import RopeParams, inverse_frequencies
from edgecc.ir.types import format_shape
from edgecc.ir.verifier import check_property, verify
from edgecc.ir.weights import Derived
from edgecc.passes.add_state_replay import AddStateReplay
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.manager import PassManager
from edgecc.roles import Role
from helpers.headers import Specs, bf16, fp8, nvfp4, write_headers

HIDDEN, VOCAB, LAYERS, MLP = 5120, 248320, 64, 17408
KINDS = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)]
PREFIX = "model.language_model."

TEXT: dict[str, object] = {
    "attention_bias": False,
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "layer_types": KINDS,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "num_attention_heads": 24,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


VISION: dict[str, object] = {
    "deepstack_visual_indexes": [],
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "model_type": "qwen3_5_vision",
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "out_hidden_size": HIDDEN,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
PROCESSOR: dict[str, object] = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "merge_size": 2,
    "patch_size": 16,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "temporal_patch_size": 2,
}


def target(path: Path) -> Path:
    """FP8 mixers, NVFP4 MLPs and head, FP8 KV cache declared without scales."""
    specs = bf16(f"{PREFIX}embed_tokens.weight", VOCAB, HIDDEN)
    for index, kind in enumerate(KINDS):
        layer = f"{PREFIX}layers.{index}"
        specs |= bf16(f"{layer}.input_layernorm.weight", HIDDEN)
        specs |= bf16(f"{layer}.post_attention_layernorm.weight", HIDDEN)
        specs |= attention(layer) if kind == "full_attention" else delta_net(layer)
        for name in ("gate", "up"):
            specs |= nvfp4(f"{layer}.mlp.{name}_proj", MLP, HIDDEN)
        specs |= nvfp4(f"{layer}.mlp.down_proj", HIDDEN, MLP)
    specs |= bf16(f"{PREFIX}norm.weight", HIDDEN) | nvfp4("lm_head", VOCAB, HIDDEN)
    specs |= tower() | bf16("mtp.fc.weight", HIDDEN, 10240)
    modules = {name.removesuffix(".weight_scale"): name for name in specs if "weight_scale" in name}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": TEXT,
        "vision_config": VISION,
        "image_token_id": 248056,
        "vision_start_token_id": 248053,
        "vision_end_token_id": 248054,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "ignore": [],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "quantized_layers": {
                module: {"quant_algo": "FP8" if "_attn" in module else "NVFP4"}
                for module in modules
                if not module.endswith("weight_scale_2")
            },
        },
    }
    write_headers(path, config, specs)
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), "utf-8")
    return path


def tower() -> Specs:
    """The vision tower: 333 tensors."""
    p, width, merged = "model.visual.", 1152, 4608
    specs = bf16(f"{p}patch_embed.proj.weight", width, 3, 2, 16, 16)
    specs |= bf16(f"{p}patch_embed.proj.bias", width) | bf16(f"{p}pos_embed.weight", 2304, width)
    layers = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.linear_fc1": (4304, width),
        "mlp.linear_fc2": (width, 4304),
    }
    for index in range(27):
        block = f"{p}blocks.{index}"
        for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias"):
            specs |= bf16(f"{block}.{name}", width)
        for name, shape in layers.items():
            specs |= bf16(f"{block}.{name}.weight", *shape) | bf16(f"{block}.{name}.bias", shape[0])
    specs |= bf16(f"{p}merger.norm.weight", width) | bf16(f"{p}merger.norm.bias", width)
    for name, rows in (("linear_fc1", merged), ("linear_fc2", HIDDEN)):
        specs |= bf16(f"{p}merger.{name}.weight", rows, merged)
        specs |= bf16(f"{p}merger.{name}.bias", rows)
    assert len(specs) == 333
    assert round(sum(math.prod(shape) for _, shape in specs.values()) / 1e6, 1) == 460.7
    return specs


def attention(layer: str) -> Specs:
    a = f"{layer}.self_attn"
    specs = fp8(f"{a}.q_proj", 12288, HIDDEN) | fp8(f"{a}.o_proj", HIDDEN, 6144)
    specs |= fp8(f"{a}.k_proj", 1024, HIDDEN) | fp8(f"{a}.v_proj", 1024, HIDDEN)
    return specs | bf16(f"{a}.q_norm.weight", 256) | bf16(f"{a}.k_norm.weight", 256)


def delta_net(layer: str) -> Specs:
    a = f"{layer}.linear_attn"
    specs = fp8(f"{a}.in_proj_qkv", 10240, HIDDEN) | fp8(f"{a}.in_proj_z", 6144, HIDDEN)
    specs |= fp8(f"{a}.out_proj", HIDDEN, 6144) | bf16(f"{a}.norm.weight", 128)
    for name in ("in_proj_a", "in_proj_b"):
        specs |= bf16(f"{a}.{name}.weight", 48, HIDDEN)
    specs |= bf16(f"{a}.A_log", 48) | bf16(f"{a}.dt_bias", 48)
    return specs | bf16(f"{a}.conv1d.weight", 10240, 1, 4)


REVISIONS: dict[str, dict[str, Any]] = {
    "first": {
        "heads": 40,
        "mlp": 10240,
        "taps": [4, 16, 28, 40, 52],
        "parameters": 1_359_284_737,
    },
    "current": {
        "heads": 32,
        "mlp": 17408,
        "taps": [5, 19, 33, 47, 61],
        "parameters": 1_857_358_337,
    },
}
"""Two networks under one repository name: they differ in shapes and tapped layers."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000000,
    "factor": 32.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
}


def draft(path: Path, heads: int, mlp: int, taps: list[int], parameters: int) -> Path:
    specs = bf16("fc.weight", HIDDEN, 5 * HIDDEN) | bf16("hidden_norm.weight", HIDDEN)
    for index in range(5):
        layer = f"layers.{index}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            specs |= bf16(f"{layer}.{name}.weight", HIDDEN)
        for name, rows in (("q", heads * 128), ("k", 1024), ("v", 1024)):
            specs |= bf16(f"{layer}.self_attn.{name}_proj.weight", rows, HIDDEN)
        specs |= bf16(f"{layer}.self_attn.o_proj.weight", HIDDEN, heads * 128)
        for name in ("q_norm", "k_norm"):
            specs |= bf16(f"{layer}.self_attn.{name}.weight", 128)
        for name in ("gate", "up"):
            specs |= bf16(f"{layer}.mlp.{name}_proj.weight", mlp, HIDDEN)
        specs |= bf16(f"{layer}.mlp.down_proj.weight", HIDDEN, mlp)
    specs |= bf16("norm.weight", HIDDEN)
    for name in ("markov_w1", "markov_w2"):
        specs |= bf16(f"markov_head.{name}.weight", VOCAB, 256)
    specs |= bf16("confidence_head.proj.weight", 1, HIDDEN + 256)
    specs |= bf16("confidence_head.proj.bias", 1)
    assert sum(math.prod(shape) for _, shape in specs.values()) == parameters
    assert len(specs) == 62
    config = {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "block_size": 7,
        "dflash_config": {
            "attention_mode": "gqa",
            "confidence_head_with_markov": True,
            "enable_confidence_head": True,
            "markov_head_type": "vanilla",
            "markov_rank": 256,
            "mask_token_id": 248070,
            "projector_type": "dspark",
            "target_layer_ids": taps,
        },
        "markov_rank": 256,
        "draft_vocab_size": VOCAB,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": mlp,
        "layer_types": ["full_attention"] * 5,
        "max_position_embeddings": 262144,
        "num_attention_heads": heads,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": YARN,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB,
    }
    return write_headers(path, config, specs)


@pytest.fixture(scope="module")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("published") / "t")


@pytest.mark.parametrize("revision", REVISIONS)
def test_both_revisions(tmp_path: Path, target_path: Path, revision: str) -> None:
    """Each lifts by its own shapes; the first taps recurrent layers only, the other both kinds."""
    facts = REVISIONS[revision]
    path = draft(tmp_path / "d", **facts)
    module = lift(target_path, path, LiftOptions(max_model_len=4096))
    BindSharedWeights().run(module, PassContext())
    assert not verify(module)
    kinds = {KINDS[layer] for layer in facts["taps"]}
    assert kinds == ({"linear_attention"} if revision == "first" else set(KINDS))
    (tap,) = module.graphs["target"].outputs_by_role(Role.HIDDEN_TAP)
    assert format_shape(tap.value.type.shape) == f"[b, t, {5 * HIDDEN}]"
    q = module.weights["draft.layers.4.self_attn.q_proj.weight"]
    assert q.shape == (facts["heads"] * 128, HIDDEN)
    assert module.weights["draft.layers.0.mlp.up_proj.weight"].shape == (facts["mlp"], HIDDEN)
    head = module.weights["draft.lm_head.weight"]
    assert module.weights.resolve("draft.lm_head.weight") == "target.lm_head.weight"
    assert head.nbytes == 635_699_200 + 79_462_400 + 4 + 4


def test_the_target(target_path: Path) -> None:
    module = lift(target_path)
    assert not verify(module)
    stored = next(d for d in module.decisions if "as stored" in d)
    assert stored.endswith("fp8 x 208, nvfp4 x 193")
    (cache,) = [d for d in module.decisions if "KV cache" in d]
    assert cache.startswith("target KV cache: float8 is declared (no scales are stored")
    states = module.graphs["target"].by_role(Role.STATE)
    shapes = {i.name.partition(".")[0]: format_shape(i.value.type.shape) for i in states}
    assert shapes == {"conv_state": "[b, 10240, 3]", "delta_state": "[b, 48, 128, 128]"}
    assert len(states) == 2 * 48
    assert len(module.graphs["target"].by_role(Role.KV_CACHE)) == 2 * 16
    assert module.weights["target.rope.cos"].shape[1] == 32  # 64 of 256 dims


@pytest.mark.parametrize("revision", REVISIONS)
def test_memory_of_a_sequence(tmp_path: Path, target_path: Path, revision: str) -> None:
    """What a sequence holds beside caches: no state for each row, and no second one.

    By hand: a state of 48 heads of 128 x 128 and 3 inputs of 10240 channels for each of 48 layers;
    logs of an anchor and 7 proposals, each row 10240 inputs and 2 x 48 gates; 4 bytes each.
    """
    path = draft(tmp_path / "d", **REVISIONS[revision])
    module = lift(target_path, path, LiftOptions(max_model_len=4096))
    PassManager([BindSharedWeights(), AddStateReplay()]).run(module, PassContext())
    sizes = {
        role: sum(prod(map(int, map(str, i.value.type.shape[1:]))) * 4 for i in inputs)
        for role in (Role.STATE, Role.STATE_LOG)
        if (inputs := module.graphs["target"].by_role(role))
    }
    assert sizes[Role.STATE] == 48 * (48 * 128 * 128 + 3 * 10240) * 4 == 156_893_184
    assert sizes[Role.STATE_LOG] == 48 * 8 * (10240 + 96) * 4 == 15_876_096
    layers = [n for g in module.graphs.values() for n in g.nodes if n.op.name == "logged_delta_net"]
    assert len(layers) == 48
    assert not check_property(module, "states-replayed")


def test_the_vision_tower(tmp_path: Path, target_path: Path) -> None:
    """With a draft: every tensor of the tower is read, and images are as large as prompts."""
    pair = target_path, draft(tmp_path / "d", **REVISIONS["current"])
    module = lift(*pair, LiftOptions(max_model_len=65536, max_input_len=32768, components="all"))
    assert not verify(module)
    assert sorted(module.graphs) == ["draft", "target", "vision"]
    visual = [s for s in module.weights if s.startswith("target.model.visual.")]
    assert len(visual) == 333
    assert str(module.symbols["m"]) == "1..16384"
    (pixels,) = module.graphs["vision"].by_role(Role.PIXEL_VALUES)
    assert format_shape(pixels.value.type.shape) == "[1, 4*m, 1536]"
    rope = next(n for n in module.graphs["target"].nodes if n.op.name == "multi_axis_rope")
    axes = rope.attrs.axes  # type: ignore[attr-defined]
    assert "".join("THW"[axis] for axis in axes) == "THW" * 10 + "TH"
    embed = module.weights["target.model.visual.patch_embed.proj.weight"]
    assert embed.shape == (1152, 1536)


def test_the_rotary_embedding_of_the_draft_is_its_own(tmp_path: Path, target_path: Path) -> None:
    """YaRN over whole heads, whatever the target does."""
    module = lift(target_path, draft(tmp_path / "d", **REVISIONS["current"]))
    source = module.weights["draft.rope.cos"].source
    assert isinstance(source, Derived)
    params = {k: v for k, v in source.params if k not in ("part", "length")}
    inverse, factor = inverse_frequencies(RopeParams(**params))  # type: ignore[arg-type]
    assert factor == pytest.approx(1.346574, abs=1e-6)
    plain = 1e7 ** (-2 * np.arange(64) / 128)
    ramp = np.clip((np.arange(64) - 14) / (29 - 14), 0, 1)
    np.testing.assert_allclose(inverse, plain * ((1 - ramp) + ramp / 32), rtol=1e-5)


def test_a_draft_of_the_other_width_of_target(tmp_path: Path, target_path: Path) -> None:
    """Layers beyond the target's are refused, whatever their kind."""
    facts = {**REVISIONS["current"], "taps": [5, 19, 33, 47, 64]}
    with pytest.raises(InputError, match="has 64 layers") as caught:
        lift(target_path, draft(tmp_path / "d", **facts))
    assert caught.value.id == "draft/tapped-layers"
