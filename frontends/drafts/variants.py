"""Variants of decoder layers that no draft frontend builds."""

from __future__ import annotations

from edgecc.errors import UnsupportedError
from edgecc.frontends.config import TextConfig
from edgecc.frontends.drafts.places import Places


def reject_rope_layout(places: Places) -> None:
    """Raise for rotary embeddings that pair neighbours instead of halves.

    Raises:
        UnsupportedError: Naming the key.
    """
    for key in ("rope_is_neox_style", "is_neox_style"):
        found = places.flag(key)
        if found is not None and not found[1]:
            raise UnsupportedError(
                "draft/rope-layout",
                "drafts that rotate interleaved pairs are not supported",
                where=found[0],
                help="supported: halves of each head rotated (neox style)",
            )


def reject_layers(places: Places, text: TextConfig, *, windows: bool = False) -> None:
    """Raise for layers with windows or another activation.

    Args:
        places: Where keys may be.
        text: Hyperparameters of the layers.
        windows: Whether layers with `layer_types` of windows are built, as causal ones whose window
            ends at each query. SpecForge and SGLang read the key so; drafts in the format of
            speculators measure the window from the anchor.

    Raises:
        UnsupportedError: Naming the variant.
    """
    where = places.top.where
    has_windows = any(w is not None for w in text.sliding_windows)
    other = [k for k in ("use_swa", "sliding_window_non_causal") if (f := places.flag(k)) and f[1]]
    if has_windows and windows and "transformer_layer_config" in places.top:
        other.append("windows from the anchor")
    if other or (has_windows and not windows):
        raise UnsupportedError(
            "draft/sliding-window",
            f"drafts with {other[0] if other else 'sliding windows'} are not supported",
            where=where,
        )
    if text.hidden_act not in ("silu", "swish"):
        raise UnsupportedError(
            "draft/activation", f"hidden_act {text.hidden_act!r} is not supported", where=where
        )


def reject_scales(places: Places) -> None:
    """Raise for constants that change logits or values.

    Raises:
        UnsupportedError: Naming the key.
    """
    for key, neutral in (
        ("final_logit_softcapping", None),
        ("output_multiplier", 1.0),
        ("logit_scale", 1.0),
        ("attention_value_scale", 1.0),
    ):
        found = places.find((key,), lambda f, k: f.number(k))
        if found is not None and found[1] != neutral:
            raise UnsupportedError(
                "draft/logit-scale", f"drafts with {key} are not supported", where=found[0]
            )
