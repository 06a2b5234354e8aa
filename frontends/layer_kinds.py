"""Which rows each layer's attention sees, as configs of every family spell it.

Rules and defaults are those of the config classes of transformers 5.24.
"""

from __future__ import annotations

from edgecc.errors import UnsupportedError
from edgecc.frontends.fields import Fields

FULL = "full_attention"
SLIDING = "sliding_attention"
LINEAR = "linear_attention"

HYBRID = "qwen3_5"
"""Begin of the model types with linear attention in most layers."""

_LAYER_TYPES = (FULL, SLIDING, LINEAR)
_WINDOWED = ("mistral", "ministral")
"""Model types whose layers all have a window unless `sliding_window` is null."""
_DEFAULT_WINDOW = 4096
"""Of those types, where a config does not have the key at all."""


def attention_kinds(
    text: Fields, model_type: str, layers: int
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Kind and window of each layer.

    `layer_types` wins over every other key.

    Args:
        text: The language part of a config.
        model_type: Its family.
        layers: How many there are.

    Returns:
        One of the kinds above for each layer, and the keys a query sees there, its own included;
        None for all.

    Raises:
        InputError: Keys have wrong types, or a windowed layer has no window.
        UnsupportedError: A layer is of another kind.
    """
    kinds = text.strings("layer_types")
    if kinds is None and model_type.startswith(HYBRID):
        interval = text.integer("full_attention_interval", default=4)
        kinds = tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))
    elif kinds is None:
        first = _first_window_layer(text, model_type, layers)
        kinds = (FULL,) * first + (SLIDING,) * (layers - first)
    if len(kinds) != layers:
        text.fail("layer_types", f"one entry for each of {layers} layers, found {len(kinds)}")
    if unknown := set(kinds) - set(_LAYER_TYPES):
        raise UnsupportedError(
            "config/layer-type",
            f"layers of type {min(unknown)!r} are not supported",
            where=text.at("layer_types"),
            help=f"supported: {', '.join(_LAYER_TYPES)}",
        )
    window = _window(text, model_type) if SLIDING in kinds else None
    return kinds, tuple(window if kind == SLIDING else None for kind in kinds)


def _first_window_layer(text: Fields, model_type: str, layers: int) -> int:
    """Layers below this one see everything (configs without `layer_types`)."""
    if _lacks_window(text, model_type):
        return 0
    if "sliding_window" not in text:
        return layers
    if "use_sliding_window" in text or model_type.startswith("qwen"):
        # Released Qwen configs keep a number in sliding_window although the switch is off.
        if not text.boolean("use_sliding_window", default=False):
            return layers
        return min(layers, text.integer("max_window_layers", minimum=0, default=28))
    return 0 if model_type in _WINDOWED else layers


def _window(text: Fields, model_type: str) -> int:
    return _DEFAULT_WINDOW if _lacks_window(text, model_type) else text.integer("sliding_window")


def _lacks_window(text: Fields, model_type: str) -> bool:
    """Whether the window is that of the config class; null is another thing: no window."""
    return model_type in _WINDOWED and "sliding_window" not in text.values
