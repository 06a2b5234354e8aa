"""Qwen3 dense (`Qwen3ForCausalLM`, `model_type` qwen3), as in transformers' modeling_qwen3.

x = embed(ids); per layer x += o_proj(attn(q_norm(q), k_norm(k), v)), x += mlp(norm(x)), both on
normed input; logits = lm_head(norm(x)). Rotary embedding over the full head, halves rotated;
attention scale head_dim^-0.5; grouped KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgecc.errors import UnsupportedError
from edgecc.frontends.config import TextConfig
from edgecc.frontends.decoder_layer import DecoderBuilder
from edgecc.frontends.module_weights import ModuleWeights
from edgecc.frontends.targets.common import check_variant, output_head
from edgecc.ir.builder import Builder
from edgecc.ir.core import Value
from edgecc.ir.ops.attention import AttentionAttributes
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.ir.types import DType, sym
from edgecc.roles import Role


def build(weights: ModuleWeights, config: TextConfig, taps: Sequence[int], capacity: int) -> None:
    """Build graph `target`.

    Inputs: token_ids i64 `[b, t]`, cache_length i64 `[b]`, logit_rows i64 `[r]`, two caches a layer
    f32 `[b, kv_heads, capacity, head_dim]`. Outputs: logits f32 `[b, r, V]`, the outputs of the
    tapped layers joined in the order of `taps` f32 `[b, t, n*H]` (when there are any), caches.

    Args:
        weights: Tensors of the checkpoint.
        config: Hyperparameters.
        taps: Layers (counted from 0) whose outputs the draft reads; -1 is the embedding.
        capacity: Rows of each cache.

    Raises:
        UnsupportedError: The config asks for something this frontend does not build.
    """
    _check(config)
    b = Builder(weights.module, "target")
    ids = b.input("token_ids", DType.I64, (sym("b"), sym("t")), Role.TOKEN_IDS)
    start = b.input("cache_length", DType.I64, (sym("b"),), Role.CACHE_LENGTH)
    rows = b.input("logit_rows", DType.I64, (sym("r"),), Role.LOGIT_ROWS)
    d = DecoderBuilder(b, weights, config.rms_norm_eps)
    shape = (sym("b"), config.num_key_value_heads, capacity, config.head_dim)
    caches = [
        tuple(b.input(f"{kind}_cache.{i}", DType.F32, shape, Role.KV_CACHE) for kind in "kv")
        for i in range(config.num_hidden_layers)
    ]
    tables = weights.rope_tables(config.rope, capacity)
    table = weights.matrix("model.embed_tokens", config.vocab_size, config.hidden_size)
    b.at("target: model.embed_tokens")
    positions = b.op("position_ids", start, ids, name="positions")
    length = b.op("advance", start, ids, name="length")
    x = b.op("embedding", ids, weights=(table,), name="x")
    tapped = {-1: x}
    updated: list[tuple[Value, Value]] = []
    for i, (k_cache, v_cache) in enumerate(caches):
        layer = f"model.layers.{i}"
        y = d.norm(x, f"{layer}.input_layernorm")
        q = d.linear(y, f"{layer}.self_attn.q_proj", config.num_attention_heads * config.head_dim)
        k = d.linear(y, f"{layer}.self_attn.k_proj", config.num_key_value_heads * config.head_dim)
        v = d.linear(y, f"{layer}.self_attn.v_proj", config.num_key_value_heads * config.head_dim)
        q = d.head_norm(q, f"{layer}.self_attn.q_norm", config.num_attention_heads)
        k = d.head_norm(k, f"{layer}.self_attn.k_norm", config.num_key_value_heads)
        q = d.rope(q, positions, tables, config.num_attention_heads)
        k = d.rope(k, positions, tables, config.num_key_value_heads)
        b.at(f"target: {layer}.self_attn")
        k_new = b.op("cache_update", k_cache, k, start, name=f"k_cache.{i}")
        v_new = b.op("cache_update", v_cache, v, start, name=f"v_cache.{i}")
        attrs = AttentionAttributes(
            config.num_attention_heads, config.num_key_value_heads, config.head_dim**-0.5
        )
        y = b.op("attention", q, k_new, v_new, length, attrs=attrs, name="attn")
        x = d.add(x, d.linear(y, f"{layer}.self_attn.o_proj", config.hidden_size))
        y = d.norm(x, f"{layer}.post_attention_layernorm")
        x = d.add(x, d.mlp(y, f"{layer}.mlp", config.intermediate_size, config.hidden_size))
        tapped[i] = x
        updated.append((k_new, v_new))
    b.at("target: model.norm")
    hidden = d.norm(b.op("take_rows", x, rows, name="last"), "model.norm", name="hidden")
    head = output_head(weights, config, table)
    b.at("target: lm_head")
    logits = b.op("linear", hidden, weights=(head,), name="logits")
    b.output(logits, "logits", Role.LOGITS)
    if taps:
        joined = b.op("concat", *[tapped[i] for i in taps], attrs=AxisAttributes(2), name="taps")
        b.output(joined, "hidden_tap", Role.HIDDEN_TAP)
    for i, (k_new, v_new) in enumerate(updated):
        b.output(k_new, f"k_cache.{i}", Role.KV_CACHE, alias=f"k_cache.{i}")
        b.output(v_new, f"v_cache.{i}", Role.KV_CACHE, alias=f"v_cache.{i}")


def _check(config: TextConfig) -> None:
    check_variant(config)
    if "linear_attention" in config.layer_types:
        raise UnsupportedError(
            "target/linear-attention",
            "linear attention is not supported for qwen3",
            where=config.where,
        )
