"""DSpark configs in every spelling: DeepSpec, SpecForge / RadixArk, speculators, NVIDIA exports."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.errors import UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, read_text_config
from edgecc.frontends.drafts.places import Places, no_tapped_layers, shown, tapped_layers
from edgecc.frontends.drafts.variants import reject_layers, reject_rope_layout, reject_scales

NESTED = ("dspark_config", "dflash_config", "eagle_config")
"""Objects of a draft's config that may hold its facts."""

_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_CAUSAL = ("is_causal", "causal", "causal_head", "dflash_query_causal")
_OTHER_FAMILIES = ("deepseek", "gemma")


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """What a DSpark draft's config says, normalized.

    Attributes:
        text: Hyperparameters of the draft's own layers.
        block_size: Slots of the trained block, the anchor's included.
        target_layer_ids: Target layers (from 0) whose outputs the draft reads; -1: the embedding.
        mask_token_id: Token that fills the slots after the anchor.
        markov_rank: Width of the Markov head; None if only the tensors say.
        confidence: Whether a confidence head is declared; None if the config does not say.
        num_target_layers: Layers of the target the draft was trained for, if declared.
        numbering: The key that lists the tapped layers, for the report.
    """

    text: TextConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int | None
    confidence: bool | None
    num_target_layers: int | None
    numbering: str


def read_dspark_config(checkpoint: Checkpoint) -> DSparkConfig:
    """Read and check a DSpark draft's config.

    Raises:
        InputError: A fact is missing, contradictory or out of range.
        UnsupportedError: A variant this frontend does not build (named in the message).
    """
    places = Places(checkpoint, NESTED)
    text = read_text_config(checkpoint)
    _reject_layouts(places)
    _reject_networks(places, text)
    reject_scales(places)
    found = tapped_layers(places)
    if found is None:
        raise no_tapped_layers(places.top.where)
    ids, numbering = found
    confidence = places.flag("enable_confidence_head")
    return DSparkConfig(
        text=text,
        block_size=places.require(("block_size",), lambda f, k: f.integer(k), "the block size"),
        target_layer_ids=ids,
        mask_token_id=places.require(
            _MASK_KEYS, lambda f, k: f.integer(k, minimum=0), "the mask token"
        ),
        markov_rank=places.integer("markov_rank", minimum=0),
        confidence=None if confidence is None else confidence[1],
        num_target_layers=places.integer("num_target_layers"),
        numbering=numbering,
    )


def declared_rank(checkpoint: Checkpoint) -> int | None:
    """The rank of the Markov head by the config alone, None if it is silent.

    Raises:
        InputError: It is no number, or given twice with different values.
    """
    return Places(checkpoint, NESTED).integer("markov_rank", minimum=0)


def _reject_layouts(places: Places) -> None:
    """Raise for blocks whose slots mean, or see, something else.

    Raises:
        UnsupportedError: Naming the key.
    """
    for key, other in (
        ("sample_from_anchor", False),
        ("shift_label", False),
        ("dspark_bonus_anchor", True),
    ):
        found = places.flag(key)
        if found is not None and found[1] is other:
            raise UnsupportedError(
                "draft/slot-layout",
                f"{key} is {shown(other)}: drafts whose masks fill their own positions are not "
                "supported",
                where=found[0],
                help="supported: drafts whose anchor slot already predicts",
            )
    for key in (*_CAUSAL, "attention_sink_bias"):
        found = places.flag(key)
        if found is not None and found[1]:
            raise UnsupportedError(
                "draft/attention", f"drafts with {key} are not supported", where=found[0]
            )
    reject_rope_layout(places)


def _reject_networks(places: Places, text: TextConfig) -> None:
    """Raise for networks with other layers or heads.

    Raises:
        UnsupportedError: Naming the variant.
    """
    where = places.top.where
    reject_layers(places, text, windows=True)
    named = (places.top.string("model_type", default=""), text.model_type, *text.architectures)
    for family in _OTHER_FAMILIES:
        if any(name.lower().startswith(family) for name in named):
            raise UnsupportedError(
                "draft/kind",
                f"DSpark drafts of the {family} family are another network",
                where=where,
                help="supported: DSpark drafts with Qwen3-style layers",
            )
    for key, known in (("markov_head_type", "vanilla"), ("projector_type", "dspark")):
        found = places.string(key)
        if found is not None and found[1] != known:
            raise UnsupportedError(
                "draft/markov-type" if known == "vanilla" else "draft/kind",
                f"{key} {found[1]!r} is not supported",
                where=found[0],
                help=f"supported: {known}",
            )
