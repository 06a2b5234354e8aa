"""Qwen3.5, 3.6 and 3.8 dense targets: hybrid language model, vision tower, MTP block.

`Qwen3_5ForConditionalGeneration` nests the language model and has a vision tower;
`Qwen3_5ForCausalLM` is the language model alone.
"""

from __future__ import annotations

from benchmarks.checkpoints.parameters import (
    Config,
    Parameter,
    Sizes,
    attention_layer,
    bias,
    dense,
    is_tied,
    language_section,
    linear,
    mlp,
    norm,
    read_sizes,
    table,
)


def parameters(config: Config) -> list[Parameter]:
    """All parameters of the class that the config names."""
    text = language_section(config)
    sizes = read_sizes(text)
    model = "model.language_model" if "text_config" in config else "model"
    made = [table(f"{model}.embed_tokens", sizes.vocab_size, sizes.hidden_size)]
    for i, kind in enumerate(layer_types(text)):
        layer = f"{model}.layers.{i}"
        if kind == "linear_attention":
            made += _linear_layer(layer, text, sizes)
        else:
            made += attention_layer(layer, sizes, unit_offset=True, gated=True)
    made.append(norm(f"{model}.norm", sizes.hidden_size, unit_offset=True))
    if not is_tied(config):
        made.append(linear("lm_head", sizes.vocab_size, sizes.hidden_size))
    if "vision_config" in config:
        made += _vision(config["vision_config"])
    if text.get("mtp_num_hidden_layers"):
        made += _mtp(sizes, text["mtp_num_hidden_layers"])
    return made


def layer_types(text: Config) -> list[str]:
    """Kind of each layer; every fourth is full attention unless the config says otherwise."""
    period = text.get("full_attention_interval", 4)
    return text.get("layer_types") or [
        "linear_attention" if (i + 1) % period else "full_attention"
        for i in range(text["num_hidden_layers"])
    ]


def _linear_layer(layer: str, text: Config, sizes: Sizes) -> list[Parameter]:
    """A Gated DeltaNet layer; the decay -exp(A_log) softplus(a + dt_bias) forgets slowly."""
    hidden, heads = sizes.hidden_size, text["linear_num_value_heads"]
    key = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    value = heads * text["linear_value_head_dim"]
    module, channels = f"{layer}.linear_attn", 2 * key + value
    return [
        norm(f"{layer}.input_layernorm", hidden, unit_offset=True),
        Parameter(f"{module}.A_log", (heads,), mean=1.5, std=0.5),
        Parameter(f"{module}.dt_bias", (heads,), mean=-4.0, std=1.0),
        Parameter(f"{module}.conv1d.weight", (channels, 1, text["linear_conv_kernel_dim"])),
        dense(f"{module}.in_proj_a", heads, hidden),
        dense(f"{module}.in_proj_b", heads, hidden),
        linear(f"{module}.in_proj_qkv", channels, hidden),
        linear(f"{module}.in_proj_z", value, hidden),
        norm(f"{module}.norm", text["linear_value_head_dim"]),
        linear(f"{module}.out_proj", hidden, value),
        norm(f"{layer}.post_attention_layernorm", hidden, unit_offset=True),
        *mlp(f"{layer}.mlp", hidden, sizes.intermediate_size),
    ]


def _mtp(sizes: Sizes, layers: int) -> list[Parameter]:
    """Multi-token prediction: exporters keep it unquantized."""
    hidden = sizes.hidden_size
    made = [
        dense("mtp.fc", hidden, 2 * hidden),
        norm("mtp.pre_fc_norm_embedding", hidden, unit_offset=True),
        norm("mtp.pre_fc_norm_hidden", hidden, unit_offset=True),
    ]
    for i in range(layers):
        layer = attention_layer(f"mtp.layers.{i}", sizes, unit_offset=True, gated=True)
        made += [Parameter(p.name, p.shape, p.mean, p.std) for p in layer]
    return [*made, norm("mtp.norm", hidden, unit_offset=True)]


def _vision(vision: Config) -> list[Parameter]:
    """The vision tower: linear layers with biases, layer norms, and the merger."""
    width, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = width * vision["spatial_merge_size"] ** 2
    patch = (vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"])
    root = "model.visual"
    made = [
        Parameter(f"{root}.patch_embed.proj.weight", (width, vision["in_channels"], *patch)),
        bias(f"{root}.patch_embed.proj", width),
        Parameter(f"{root}.pos_embed.weight", (vision["num_position_embeddings"], width), std=0.02),
    ]
    for i in range(vision["depth"]):
        block = f"{root}.blocks.{i}"
        made += _layer_norm(f"{block}.norm1", width) + _layer_norm(f"{block}.norm2", width)
        made += _biased(f"{block}.attn.qkv", 3 * width, width)
        made += _biased(f"{block}.attn.proj", width, width)
        made += _biased(f"{block}.mlp.linear_fc1", inner, width)
        made += _biased(f"{block}.mlp.linear_fc2", width, inner)
    made += _layer_norm(f"{root}.merger.norm", width)
    made += _biased(f"{root}.merger.linear_fc1", merged, merged)
    return made + _biased(f"{root}.merger.linear_fc2", vision["out_hidden_size"], merged)


def _layer_norm(module: str, size: int) -> list[Parameter]:
    return [norm(module, size), bias(module, size)]


def _biased(module: str, rows: int, columns: int) -> list[Parameter]:
    return [dense(module, rows, columns), bias(module, rows)]
