"""Parameters of a network by name, shape and distribution; pieces that decoders share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter before it is stored.

    Values are normal. A matrix has the deviation 1 / sqrt(fan-in) unless told otherwise, so rows of
    size one stay of that size; all sums of a pre-norm network stay far from any limit.

    Attributes:
        name: Its tensor, when it is not quantized.
        shape: Its dimensions, `[N, K]` for a linear layer.
        mean: Of its values.
        std: Deviation of its values; None: 1 / sqrt(product of all dimensions but the first).
        quantizable: Whether a quantizer may pack it: the linear layers of the language model.
        dtype: As safetensors spells it; empty: the one of the config. Integers are all zero, and of
            booleans the first `mean` are true.
    """

    name: str
    shape: tuple[int, ...]
    mean: float = 0.0
    std: float | None = None
    quantizable: bool = False
    dtype: str = ""

    @property
    def module(self) -> str:
        """The module, as metadata calls it."""
        return self.name.removesuffix(".weight")

    @property
    def deviation(self) -> float:
        """Standard deviation of its values."""
        return math.prod(self.shape[1:]) ** -0.5 if self.std is None else self.std


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of a decoder, under the names of `config.json`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    attention_bias: bool


def language_section(config: Config) -> Config:
    """The keys of the language model, wherever a config nests them."""
    return config.get("text_config") or config.get("transformer_layer_config") or config


def read_sizes(text: Config) -> Sizes:
    """Dimensions, with the defaults of the model classes."""
    heads = text["num_attention_heads"]
    return Sizes(
        text["hidden_size"],
        text["intermediate_size"],
        text["num_hidden_layers"],
        heads,
        text.get("num_key_value_heads") or heads,
        text.get("head_dim") or text["hidden_size"] // heads,
        text["vocab_size"],
        bool(text.get("attention_bias")),
    )


def is_tied(config: Config) -> bool:
    """Whether the head is the embedding table, which is then stored alone."""
    return bool(
        config.get("tie_word_embeddings", language_section(config).get("tie_word_embeddings"))
    )


def linear(module: str, rows: int, columns: int) -> Parameter:
    """The matrix of a linear layer."""
    return Parameter(f"{module}.weight", (rows, columns), quantizable=True)


def dense(module: str, rows: int, columns: int) -> Parameter:
    """The matrix of a linear layer that quantizers leave alone."""
    return Parameter(f"{module}.weight", (rows, columns))


def table(module: str, rows: int, columns: int) -> Parameter:
    """An embedding table: rows of size one, as after a norm."""
    return Parameter(f"{module}.weight", (rows, columns), std=1.0)


def bias(module: str, size: int) -> Parameter:
    """A bias."""
    return Parameter(f"{module}.bias", (size,), std=0.02)


def norm(module: str, size: int, *, unit_offset: bool = False) -> Parameter:
    """The weight of a norm; with `unit_offset` it is stored less one."""
    return Parameter(f"{module}.weight", (size,), mean=0.0 if unit_offset else 1.0, std=0.1)


def mlp(module: str, hidden: int, intermediate: int) -> list[Parameter]:
    """Gate, up and down projection."""
    return [
        linear(f"{module}.gate_proj", intermediate, hidden),
        linear(f"{module}.up_proj", intermediate, hidden),
        linear(f"{module}.down_proj", hidden, intermediate),
    ]


def attention(
    module: str, sizes: Sizes, *, inputs: int | None = None, gated: bool = False
) -> list[Parameter]:
    """The four projections.

    Args:
        module: Name of the attention module.
        sizes: Of the decoder.
        inputs: Width of what q, k and v read; the hidden size if None.
        gated: Whether q_proj holds an output gate beside each query head.
    """
    width, kv = sizes.num_attention_heads * sizes.head_dim, sizes.num_key_value_heads
    read = inputs or sizes.hidden_size
    made = [
        linear(f"{module}.q_proj", (2 if gated else 1) * width, read),
        linear(f"{module}.k_proj", kv * sizes.head_dim, read),
        linear(f"{module}.v_proj", kv * sizes.head_dim, read),
        linear(f"{module}.o_proj", sizes.hidden_size, width),
    ]
    if sizes.attention_bias:
        made += [bias(p.module, p.shape[0]) for p in tuple(made)]
    return made


def attention_layer(
    layer: str, sizes: Sizes, *, unit_offset: bool = False, gated: bool = False
) -> list[Parameter]:
    """A decoder layer of attention with normed queries and keys, and an MLP."""
    return [
        norm(f"{layer}.input_layernorm", sizes.hidden_size, unit_offset=unit_offset),
        *attention(f"{layer}.self_attn", sizes, gated=gated),
        norm(f"{layer}.self_attn.q_norm", sizes.head_dim, unit_offset=unit_offset),
        norm(f"{layer}.self_attn.k_norm", sizes.head_dim, unit_offset=unit_offset),
        norm(f"{layer}.post_attention_layernorm", sizes.hidden_size, unit_offset=unit_offset),
        *mlp(f"{layer}.mlp", sizes.hidden_size, sizes.intermediate_size),
    ]
