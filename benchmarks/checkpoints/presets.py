"""Configs of published pairs.

Qwen3 targets as ModelOpt exports them to NVFP4, the head as well, with drafts in DeepSpec's layout;
and Qwen3.8-27B in mixed precision with both revisions of its DSpark draft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from benchmarks.checkpoints import qwen3_5
from benchmarks.checkpoints.quantization import NVFP4_GROUP

_PRODUCER: Final = {"name": "modelopt", "version": "0.47.0"}
_FP8_CACHE: Final = {"dynamic": False, "num_bits": 8, "type": "float"}


def _group(bits: int, targets: list[str]) -> dict[str, Any]:
    part = {"dynamic": False, "num_bits": bits, "type": "float"}
    part |= {"group_size": NVFP4_GROUP} if bits == 4 else {}
    return {"input_activations": part, "weights": part, "targets": targets}


_QWEN3: Final = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""What all Qwen3 share. All get a head of their own, so that it can be quantized."""

_QWEN3_SIZES: Final[Mapping[str, tuple[dict[str, int], list[int]]]] = {
    name: (
        dict(
            zip(
                (
                    "hidden_size",
                    "intermediate_size",
                    "num_hidden_layers",
                    "num_attention_heads",
                    "num_key_value_heads",
                    "head_dim",
                ),
                sizes,
                strict=True,
            )
        ),
        taps,
    )
    for name, sizes, taps in (
        ("qwen3-0.6b", (1024, 3072, 28, 16, 8, 128), [1, 7, 13, 19, 25]),
        ("qwen3-4b", (2560, 9728, 36, 32, 8, 128), [1, 9, 17, 25, 33]),
        ("qwen3-8b", (4096, 12288, 36, 32, 8, 128), [1, 9, 17, 25, 33]),
        ("deep", (256, 768, 64, 4, 2, 64), [1, 16, 31, 46, 61]),
    )
}
"""Sizes and tapped layers; `deep` is many small layers, to time the compiler with."""

_MASK_TOKEN: Final = 151669
"""First id after Qwen3's tokenizer: a padding row, which published drafts take as mask token."""

_DSPARK: Final = {
    "confidence_head_with_markov": True,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
}


def _qwen3(name: str) -> dict[str, Any]:
    sizes, _ = _QWEN3_SIZES[name]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        **_QWEN3,
        **sizes,
        "max_window_layers": sizes["num_hidden_layers"],
        "quantization_config": {
            "config_groups": {"group_0": _group(4, ["Linear"])},
            "ignore": ["model.embed_tokens"],
            "quant_algo": "NVFP4",
            "producer": _PRODUCER,
            "quant_method": "modelopt",
        },
    }


def _qwen3_dspark(name: str) -> dict[str, Any]:
    sizes, taps = _QWEN3_SIZES[name]
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_QWEN3,
        **sizes,
        **_DSPARK,
        "block_size": 7,
        "mask_token_id": _MASK_TOKEN,
        "num_hidden_layers": 5,
        "num_target_layers": sizes["num_hidden_layers"],
        "target_layer_ids": taps,
    }


def _qwen3_8_27b() -> dict[str, Any]:
    """RadixArk/Qwen3.8-27B-NVFP4."""
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "dtype": "bfloat16",
        "image_token_id": 248056,
        "language_model_only": False,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "bos_token_id": 248044,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 17408,
            "layer_types": layers,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
            "num_key_value_heads": 4,
            "output_gate_type": "swish",
            "pad_token_id": None,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": False,
            "use_cache": True,
            "vocab_size": 248320,
        },
        "tie_word_embeddings": False,
        "video_token_id": 248057,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4304,
            "model_type": "qwen3_5_vision",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 5120,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }
    return config | {"quantization_config": _mixed(config)}


def _mixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """FP8 for the projections of attention and DeltaNet, NVFP4 for MLPs and head."""
    modules = [p.module for p in qwen3_5.parameters(config) if p.quantizable]
    packed = {m for m in modules if ".mlp." in m or m == "lm_head"}
    rest = {*modules} - packed
    return {
        "config_groups": {"group_0": _group(8, sorted(rest)), "group_1": _group(4, sorted(packed))},
        "ignore": [],
        "kv_cache_scheme": _FP8_CACHE,
        "producer": _PRODUCER,
        "quant_algo": "MIXED_PRECISION",
        "quant_method": "modelopt",
        "quantized_layers": {
            module: {"quant_algo": "NVFP4", "group_size": NVFP4_GROUP}
            if module in packed
            else {"quant_algo": "FP8"}
            for module in modules
        },
    }


def _qwen3_8_27b_dspark(intermediate: int, heads: int, taps: list[int]) -> dict[str, Any]:
    """RadixArk/Qwen3.8-27B-DSpark, in SpecForge's spelling."""
    return {
        "architectures": ["DSparkDraftModel"],
        "attention_bias": False,
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "block_size": 7,
        "dflash_config": {
            **_DSPARK,
            "attention_mode": "gqa",
            "mask_token_id": 248070,
            "projector_type": "dspark",
            "target_layer_ids": taps,
        },
        "draft_vocab_size": 248320,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": intermediate,
        "layer_types": ["full_attention"] * 5,
        "markov_rank": 256,
        "max_position_embeddings": 262144,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 64,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 10000000,
            "rope_type": "yarn",
        },
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 248320,
    }


PRESETS: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {
    **{name: partial(_qwen3, name) for name in _QWEN3_SIZES},
    **{f"{name}-dspark": partial(_qwen3_dspark, name) for name in _QWEN3_SIZES},
    "qwen3.8-27b": _qwen3_8_27b,
    "qwen3.8-27b-dspark": partial(_qwen3_8_27b_dspark, 17408, 32, [5, 19, 33, 47, 61]),
    "qwen3.8-27b-dspark-first": partial(_qwen3_8_27b_dspark, 10240, 40, [4, 16, 28, 40, 52]),
}
"""`config.json` of each preset; the two drafts for 27B are two revisions of one repository."""


def side_files(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON files a preset has beside its config."""
    block = config.get("quantization_config")
    if block is None:
        return {}
    cache = "FP8" if block.get("kv_cache_scheme") else None
    side = {"quant_algo": block["quant_algo"], "kv_cache_quant_algo": cache}
    if "quantized_layers" in block:
        side["quantized_layers"] = block["quantized_layers"]
    else:
        side |= {"group_size": NVFP4_GROUP, "exclude_modules": block["ignore"]}
    files = {"hf_quant_config.json": {"producer": _PRODUCER, "quantization": side}}
    if name == "qwen3.8-27b":  # chat turns end with a token that config.json does not list
        text = config["text_config"]["eos_token_id"]
        ids = {"bos_token_id": text, "eos_token_id": [text + 2, text], "pad_token_id": text}
        files["generation_config.json"] = ids
    return files
