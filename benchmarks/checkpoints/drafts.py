"""Drafts: DSpark in every spelling of its config, and EAGLE3.

None has an embedding of its own, and a DSpark draft has no head: both are the target's.
"""

from __future__ import annotations

from typing import Any

from benchmarks.checkpoints.parameters import (
    Config,
    Parameter,
    Sizes,
    attention,
    attention_layer,
    bias,
    dense,
    language_section,
    linear,
    mlp,
    norm,
    read_sizes,
    table,
)

TAP_KEYS = ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_NESTED = ("dspark_config", "dflash_config", "eagle_config")
_EAGLE3_TAPS = 3


def fact(config: Config, *keys: str) -> Any:
    """The first value that is not null, wherever a draft's config keeps it; None if none is."""
    places = [config, *(config[name] for name in _NESTED if config.get(name))]
    found = (place.get(key) for place in places for key in keys)
    return next((value for value in found if value is not None), None)


def dspark(config: Config) -> list[Parameter]:
    """All parameters of a DSpark draft with a vanilla Markov head."""
    sizes = read_sizes(language_section(config))
    hidden, rank = sizes.hidden_size, fact(config, "markov_rank")
    made = [linear("fc", hidden, len(fact(config, *TAP_KEYS)) * _target_hidden(config, sizes))]
    made.append(norm("hidden_norm", hidden))
    for i in range(sizes.num_hidden_layers):
        made += attention_layer(f"layers.{i}", sizes)
    made += [
        norm("norm", hidden),
        table("markov_head.markov_w1", sizes.vocab_size, rank),
        dense("markov_head.markov_w2", sizes.vocab_size, rank),
    ]
    if fact(config, "enable_confidence_head"):
        extra = rank if fact(config, "confidence_head_with_markov") else 0
        made += [dense("confidence_head.proj", 1, hidden + extra), bias("confidence_head.proj", 1)]
    return made


def eagle3(config: Config) -> list[Parameter]:
    """All parameters of an EAGLE3 draft, whose vocabulary is the first part of the target's."""
    sizes = read_sizes(config)
    hidden, layer = sizes.hidden_size, "midlayer"
    vocab = config.get("draft_vocab_size") or sizes.vocab_size
    taps = len(fact(config, *TAP_KEYS) or range(_EAGLE3_TAPS))
    return [
        linear("fc", hidden, taps * _target_hidden(config, sizes)),
        norm(f"{layer}.hidden_norm", hidden),
        norm(f"{layer}.input_layernorm", hidden),
        *attention(f"{layer}.self_attn", sizes, inputs=2 * hidden),
        norm(f"{layer}.post_attention_layernorm", hidden),
        *mlp(f"{layer}.mlp", hidden, sizes.intermediate_size),
        norm("norm", hidden),
        linear("lm_head", vocab, hidden),
        Parameter("d2t", (vocab,), dtype="I64"),
        Parameter("t2d", (sizes.vocab_size,), mean=vocab, dtype="BOOL"),
    ]


def _target_hidden(config: Config, sizes: Sizes) -> int:
    return int(fact(config, "target_hidden_size") or sizes.hidden_size)
