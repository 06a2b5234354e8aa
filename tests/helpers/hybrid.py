"""Small synthetic Qwen3.5 targets in the layouts real ones use.

`write_hybrid_target` writes Gated DeltaNet and gated attention layers, unquantized or in the mixed
precision of published checkpoints, as the text-only class or wrapped in the multimodal one. Weights
are random but seeded; equal arguments give equal bytes, whatever the wrapper.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from helpers.byte_tokenizer import NUM_TOKENS
from helpers.checkpoints import DROP, VOCAB, Array, Tensors, nvfp4

LINEAR, FULL = "linear_attention", "full_attention"

VISION = {
    "model.visual.patch_embed.proj.weight": (8, 3, 2, 4, 4),
    "model.visual.blocks.0.attn.qkv.weight": (24, 8),
    "model.visual.merger.linear_fc2.bias": (32,),
}
"""Some tensors of a vision tower, by name and shape."""

MTP = {
    "mtp.fc.weight": (32, 64),
    "mtp.norm.weight": (32,),
    "mtp.layers.0.self_attn.k_proj.weight": (16, 32),
}
"""Some tensors of a multi-token-prediction block, by name and shape."""


@dataclass(frozen=True, kw_only=True)
class HybridSizes:
    """Sizes of a target; all widths differ, so that no mix-up goes unnoticed.

    Attributes:
        layer_types: Kind of each layer.
        hidden: Width of the residual stream.
        heads: Query heads of attention.
        kv_heads: Its key and value heads.
        head_dim: Width of its heads.
        rotary: Fraction of a head that is rotated.
        sections: Frequencies of each axis of the rotary embedding, half the rotated dims together.
        key_heads: Query and key heads of the DeltaNet.
        value_heads: Its value heads.
        key_dim: Width of its query and key heads.
        value_dim: Width of its value heads.
        taps: Of its convolution.
        intermediate: Width inside the MLP.
        vocab: Rows of embedding and head.
    """

    layer_types: Sequence[str] = (LINEAR, LINEAR, LINEAR, FULL)
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    rotary: float = 0.5
    sections: Sequence[int] = (2, 1, 1)
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 8
    value_dim: int = 12
    taps: int = 4
    intermediate: int = 48
    vocab: int = VOCAB


def write_hybrid_target(
    path: Path,
    sizes: HybridSizes | None = None,
    *,
    mixed: bool = False,
    multimodal: bool = False,
    tied: bool = False,
    mtp: int = 0,
    seed: int = 0,
    **config_overrides: object,
) -> Path:
    """Write a Qwen3.5 target and return its folder.

    Args:
        path: Folder to create.
        sizes: Its sizes.
        mixed: FP8 mixers, NVFP4 MLPs and head (ModelOpt `MIXED_PRECISION`), else all BF16.
        multimodal: Wrap it: nested config, other prefix, tensors of vision and MTP beside it.
        tied: Leave `lm_head` out and set `tie_word_embeddings`.
        mtp: Layers of a complete multi-token-prediction block, in BF16 like all released ones; 0
            leaves it out.
        seed: Seed of the weights.
        config_overrides: Keys of the text config to set, or to remove with `DROP`.
    """
    sizes = sizes or HybridSizes()
    random = np.random.default_rng(seed)
    prefix = "model.language_model." if multimodal else "model."
    writer = _Writer(random, mixed)
    writer.dense(f"{prefix}embed_tokens.weight", sizes.vocab, sizes.hidden, scale=1.0)
    for index, kind in enumerate(sizes.layer_types):
        writer.layer(f"{prefix}layers.{index}.", kind, sizes)
    writer.offset(f"{prefix}norm.weight", sizes.hidden)
    if not tied:
        writer.linear("lm_head", sizes.vocab, sizes.hidden, "NVFP4")
    if multimodal:
        for name, shape in {**VISION, **({} if mtp else MTP)}.items():
            writer.tensors[name] = np.ones(shape, ml_dtypes.bfloat16)
    if mtp:
        block = _Writer(np.random.default_rng(seed + 1), mixed=False)
        block.mtp(sizes, mtp)
        writer.tensors |= block.tensors
        config_overrides.setdefault("mtp_num_hidden_layers", mtp)
    changed = {**_text_config(sizes, tied), **config_overrides}
    text = {key: value for key, value in changed.items() if value is not DROP}
    config = _wrapped(text) if multimodal else text
    path.mkdir(parents=True, exist_ok=True)
    if mixed:
        config["quantization_config"] = {
            "config_groups": {},
            "ignore": [],
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": writer.quantized,
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quant_method": "modelopt",
        }
    (path / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    save_file(writer.tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def fp8(module: str, weight: Array) -> Tensors:
    """The tensors ModelOpt stores for an FP8 linear layer: one scale, amax / 448."""
    values = weight.astype(np.float32)
    scale = np.float32(np.abs(values).max() / 448)
    return {
        f"{module}.weight": (values / scale).astype(ml_dtypes.float8_e4m3fn),
        f"{module}.weight_scale": np.array(scale),
        f"{module}.input_scale": np.array(0.01, dtype=np.float32),
    }


class _Writer:
    """Collects tensors, and the algorithm of each quantized module."""

    def __init__(self, random: np.random.Generator, mixed: bool) -> None:
        self.random, self.mixed = random, mixed
        self.tensors: Tensors = {}
        self.quantized: dict[str, object] = {}

    def normal(self, *shape: int, scale: float) -> Array:
        return (self.random.standard_normal(shape) * scale).astype(ml_dtypes.bfloat16)

    def dense(self, name: str, *shape: int, scale: float, around: float = 0.0) -> None:
        values = around + self.normal(*shape, scale=scale).astype(np.float32)
        self.tensors[name] = values.astype(ml_dtypes.bfloat16)

    def offset(self, name: str, size: int) -> None:
        """A norm weight stored as its offset from one."""
        self.dense(name, size, scale=0.2)

    def linear(self, module: str, rows: int, columns: int, algorithm: str = "") -> None:
        weight = self.normal(rows, columns, scale=columns**-0.5)
        if not self.mixed or not algorithm:
            self.tensors[f"{module}.weight"] = weight
            return
        self.tensors |= nvfp4(module, weight) if algorithm == "NVFP4" else fp8(module, weight)
        self.quantized[module] = {"quant_algo": algorithm}

    def layer(self, prefix: str, kind: str, s: HybridSizes) -> None:
        self.offset(f"{prefix}input_layernorm.weight", s.hidden)
        self.offset(f"{prefix}post_attention_layernorm.weight", s.hidden)
        if kind == LINEAR:
            self.delta_net(f"{prefix}linear_attn.", s)
        else:
            self.attention(f"{prefix}self_attn.", s)
        for name in ("gate", "up"):
            self.linear(f"{prefix}mlp.{name}_proj", s.intermediate, s.hidden, "NVFP4")
        self.linear(f"{prefix}mlp.down_proj", s.hidden, s.intermediate, "NVFP4")

    def mtp(self, s: HybridSizes, layers: int) -> None:
        """A multi-token-prediction block."""
        self.linear("mtp.fc", s.hidden, 2 * s.hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.offset(f"mtp.{name}.weight", s.hidden)
        for index in range(layers):
            self.layer(f"mtp.layers.{index}.", FULL, s)

    def attention(self, prefix: str, s: HybridSizes) -> None:
        self.linear(f"{prefix}q_proj", 2 * s.heads * s.head_dim, s.hidden, "FP8")
        for name in ("k", "v"):
            self.linear(f"{prefix}{name}_proj", s.kv_heads * s.head_dim, s.hidden, "FP8")
        self.linear(f"{prefix}o_proj", s.hidden, s.heads * s.head_dim, "FP8")
        for name in ("q", "k"):
            self.offset(f"{prefix}{name}_norm.weight", s.head_dim)

    def delta_net(self, prefix: str, s: HybridSizes) -> None:
        values = s.value_heads * s.value_dim
        channels = 2 * s.key_heads * s.key_dim + values
        self.linear(f"{prefix}in_proj_qkv", channels, s.hidden, "FP8")
        self.linear(f"{prefix}in_proj_z", values, s.hidden, "FP8")
        for name in ("a", "b"):
            self.linear(f"{prefix}in_proj_{name}", s.value_heads, s.hidden)
        self.dense(f"{prefix}conv1d.weight", channels, 1, s.taps, scale=0.5)
        self.dense(f"{prefix}A_log", s.value_heads, scale=0.5)
        self.dense(f"{prefix}dt_bias", s.value_heads, scale=1.0)
        self.dense(f"{prefix}norm.weight", s.value_dim, scale=0.2, around=1.0)
        self.linear(f"{prefix}out_proj", s.hidden, values, "FP8")


def _text_config(s: HybridSizes, tied: bool) -> dict[str, object]:
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "attention_bias": False,
        "attn_output_gate": True,
        "bos_token_id": NUM_TOKENS - 3,
        "eos_token_id": NUM_TOKENS - 1,
        "full_attention_interval": 4,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "hidden_size": s.hidden,
        "intermediate_size": s.intermediate,
        "layer_types": list(s.layer_types),
        "linear_conv_kernel_dim": s.taps,
        "linear_key_head_dim": s.key_dim,
        "linear_num_key_heads": s.key_heads,
        "linear_num_value_heads": s.value_heads,
        "linear_value_head_dim": s.value_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 512,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": s.heads,
        "num_hidden_layers": len(s.layer_types),
        "num_key_value_heads": s.kv_heads,
        "output_gate_type": "swish",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": list(s.sections),
            "partial_rotary_factor": s.rotary,
            "rope_theta": 1e4,
            "rope_type": "default",
        },
        "tie_word_embeddings": tied,
        "vocab_size": s.vocab,
    }


def _wrapped(text: Mapping[str, object]) -> dict[str, object]:
    """The config of the multimodal class: language keys nested, the tie at the top only."""
    inner = {
        key: value
        for key, value in text.items()
        if key not in ("architectures", "tie_word_embeddings")
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 3,
        "language_model_only": False,
        "model_type": "qwen3_5",
        "text_config": inner,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "vision_config": {"depth": 1, "hidden_size": 8, "model_type": "qwen3_5"},
    }
