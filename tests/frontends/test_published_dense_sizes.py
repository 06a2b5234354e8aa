"""Published dense targets at their full size, from headers without weights."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest

from edgecc.errors import Severity
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir.types import format_shape
from edgecc.ir.verifier import verify
from edgecc.roles import Role
from helpers.headers import Specs, bf16, write_headers

LLAMA3: Mapping[str, Any] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def sizes(
    hidden: int, mlp: int, layers: int, heads: tuple[int, int], vocab: int, theta: float
) -> dict[str, Any]:
    """Keys every config has."""
    return {
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": theta,
    }


def llama(config: dict[str, Any], factor: float) -> dict[str, Any]:
    scaling = {"rope_scaling": {**LLAMA3, "factor": factor}, "max_position_embeddings": 131072}
    return {**config, **scaling, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def qwen(config: dict[str, Any]) -> dict[str, Any]:
    """With the window that is switched off."""
    window = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}
    family = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    return {**config, **window, **family, "max_position_embeddings": 32768}


PUBLISHED: Mapping[str, tuple[dict[str, Any], int, int]] = {
    "Llama-3.1-8B": (
        llama(sizes(4096, 14336, 32, (32, 8), 128256, 5e5), 8.0),
        128,
        8_030_261_248,
    ),
    "Llama-3.2-3B": (
        {
            **llama(sizes(3072, 8192, 28, (24, 8), 128256, 5e5), 32.0),
            "tie_word_embeddings": True,
            "head_dim": 128,
        },
        128,
        3_212_749_824,
    ),
    "Qwen2.5-7B": (qwen(sizes(3584, 18944, 28, (28, 4), 152064, 1e6)), 128, 7_615_616_512),
    "Qwen2.5-3B": (
        {**qwen(sizes(2048, 11008, 36, (16, 2), 151936, 1e6)), "tie_word_embeddings": True},
        128,
        3_085_938_688,
    ),
    "Mistral-Nemo": (
        {
            **sizes(5120, 14336, 40, (32, 8), 131072, 1e6),
            "head_dim": 128,
            "sliding_window": None,
            "max_position_embeddings": 131072,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
        },
        128,
        12_247_782_400,
    ),
    "Mistral-7B-v0.1": (
        {
            **sizes(4096, 14336, 32, (32, 8), 32000, 1e4),
            "sliding_window": 4096,
            "max_position_embeddings": 32768,
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
        },
        128,
        7_241_732_096,
    ),
}
"""Config, width of a head, and how many parameters the model is known to have."""


def tensors(config: Mapping[str, Any], dim: int) -> Specs:
    hidden, mlp, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    q, kv = (config[f"num_{k}_heads"] * dim for k in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    specs = bf16("model.embed_tokens.weight", vocab, hidden) | bf16("model.norm.weight", hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for name, shape in shapes.items():
            specs |= bf16(f"{layer}.{name}.weight", *shape)
            if config["model_type"] == "qwen2" and name[-6] in "qkv":
                specs |= bf16(f"{layer}.{name}.bias", shape[0])
        for name in ("input_layernorm", "post_attention_layernorm"):
            specs |= bf16(f"{layer}.{name}.weight", hidden)
    if not config.get("tie_word_embeddings"):
        specs |= bf16("lm_head.weight", vocab, hidden)
    return specs


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(tmp_path: Path, name: str) -> None:
    """They lift without a warning, and nothing is left over."""
    config, dim, parameters = PUBLISHED[name]
    specs = tensors(config, dim)
    assert sum(prod(shape) for _, shape in specs.values()) == parameters
    path = write_headers(tmp_path / "t", config, specs)
    module = lift(path, options=LiftOptions(max_model_len=8192))
    assert not verify(module)
    reader = module.weights.readers["target"]
    assert [f for f in reader.findings if f.severity is Severity.WARNING] == []  # type: ignore[attr-defined]
    assert not [d for d in module.decisions if "not used" in d]
    graph = module.graphs["target"]
    caches = {format_shape(c.value.type.shape) for c in graph.by_role(Role.KV_CACHE)}
    assert caches == {f"[b, {config['num_key_value_heads']}, 8193, {dim}]"}
    windows = {n.attrs.window for n in graph.nodes if n.op.name == "attention"}  # type: ignore[attr-defined]
    assert windows == {4096 if name == "Mistral-7B-v0.1" else None}
