"""The keys of a decoder's config that do not depend on each other, looked at together."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgecc.frontends.fields import Fields
from edgecc.frontends.gather import Gather

_READS: Mapping[str, Callable[[Fields, str], object]] = {
    **dict.fromkeys(
        (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "vocab_size",
            "max_position_embeddings",
        ),
        lambda fields, key: fields.integer(key),
    ),
    **dict.fromkeys(
        ("num_key_value_heads", "head_dim"), lambda fields, key: fields.integer(key, default=None)
    ),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias"), lambda fields, key: fields.boolean(key, default=False)
    ),
    "rms_norm_eps": lambda fields, key: fields.number(key),
    "hidden_act": lambda fields, key: fields.string(key),
    "layer_types": lambda fields, key: fields.strings(key),
}
"""How each key is read."""


def check_keys(text: Fields) -> None:
    """Read every key once, to tell all that are missing or of a wrong type.

    Raises:
        InputError: Naming them.
    """
    errors = Gather()
    for key, read in _READS.items():
        with errors.step():
            read(text, key)
    errors.raise_found()
