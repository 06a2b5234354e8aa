"""Qwen3 dense targets."""

from __future__ import annotations

from benchmarks.checkpoints.parameters import (
    Config,
    Parameter,
    attention_layer,
    is_tied,
    linear,
    norm,
    read_sizes,
    table,
)


def parameters(config: Config) -> list[Parameter]:
    """All parameters of `Qwen3ForCausalLM`."""
    sizes = read_sizes(config)
    made = [table("model.embed_tokens", sizes.vocab_size, sizes.hidden_size)]
    for i in range(sizes.num_hidden_layers):
        made += attention_layer(f"model.layers.{i}", sizes)
    made.append(norm("model.norm", sizes.hidden_size))
    if not is_tied(config):
        made.append(linear("lm_head", sizes.vocab_size, sizes.hidden_size))
    return made
