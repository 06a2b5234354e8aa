"""DSpark and DFlash configs in every spelling.

Those of DeepSpec, z-lab, SpecForge / RadixArk, speculators, TorchSpec and NVIDIA exports.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, read_text_config
from edgecc.frontends.drafts.places import Places, no_tapped_layers, tapped_layers
from edgecc.frontends.drafts.variants import reject_layers, reject_rope_layout, reject_scales
from edgecc.frontends.fields import Fields

MARKOV_TYPES = ("vanilla", "gated", "rnn")

NESTED = ("dspark_config", "dflash_config", "eagle_config")
"""Objects of a draft's config that may hold its facts."""

_MAX_BLOCK = 512
"""Slots that are believed: published drafts have up to 16."""

_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_CAUSAL = ("is_causal", "causal", "causal_head", "dflash_query_causal")
_OTHER_FAMILIES = ("deepseek", "gemma")
_LAYOUT_KEYS = (("sample_from_anchor", True), ("shift_label", True), ("dspark_bonus_anchor", False))
"""Flags about the anchor's slot, and their value where it predicts."""


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """What the config of a DSpark or DFlash draft says, normalized.

    Attributes:
        text: Hyperparameters of the draft's own layers.
        block_size: Slots of the trained block, the anchor's included.
        target_layer_ids: Target layers (from 0) whose outputs the draft reads; -1: the embedding.
        mask_token_id: Token that fills the slots after the anchor.
        markov_rank: Width of the Markov head; None if only the tensors say.
        confidence: Whether a confidence head is declared; None if the config does not say.
        num_target_layers: Layers of the target the draft was trained for, if declared.
        numbering: The key that lists the tapped layers, for the report.
        anchor_predicts: Whether the anchor's slot predicts the token after it, so that each slot
            predicts one position on; else masks fill their own positions, and the anchor's slot
            predicts nothing.
        layout_from: What says so, for the report.
        markov_type: `vanilla`, `gated` or `rnn`; None if only the tensors say.
        draft_vocab_size: Rows of a reduced vocabulary, if declared.
    """

    text: TextConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int | None
    confidence: bool | None
    num_target_layers: int | None
    numbering: str
    anchor_predicts: bool = True
    layout_from: str = ""
    markov_type: str | None = None
    draft_vocab_size: int | None = None

    @property
    def first_slot(self) -> int:
        """The first slot that predicts."""
        return 0 if self.anchor_predicts else 1

    @property
    def proposals(self) -> int:
        """Most proposals of a block."""
        return self.block_size - self.first_slot

    @property
    def layout(self) -> str:
        """What slots mean, as a word."""
        return "anchor-predicts" if self.anchor_predicts else "masks-fill"


def read_dspark_config(checkpoint: Checkpoint, method: str = "dspark") -> DSparkConfig:
    """Read and check the config of a block draft.

    Args:
        checkpoint: The draft.
        method: `dspark`, or `dflash` for drafts without a Markov head.

    Raises:
        InputError: A fact is missing, contradictory or out of range.
        UnsupportedError: A variant this frontend does not build (named in the message).
    """
    places = Places(checkpoint, NESTED)
    text = read_text_config(checkpoint)
    _reject_attention(places)
    _reject_networks(places, text, method)
    reject_scales(places)
    found = tapped_layers(places)
    if found is None and method == "dflash":
        found = _spread_layers(places, text.num_hidden_layers)
    if found is None:
        raise no_tapped_layers(places.top.where)
    ids, numbering = found
    confidence = places.flag("enable_confidence_head")
    anchor_predicts, layout_from = _layout(places, text, method)
    least = 1 if anchor_predicts else 2
    return DSparkConfig(
        text=text,
        block_size=places.require(
            ("block_size",), lambda f, k: _block_size(f, k, least), "the block size"
        ),
        target_layer_ids=ids,
        mask_token_id=places.require(
            _MASK_KEYS, lambda f, k: f.integer(k, minimum=0), "the mask token"
        ),
        markov_rank=places.integer("markov_rank", minimum=0),
        confidence=None if confidence is None else confidence[1],
        num_target_layers=places.integer("num_target_layers"),
        numbering=numbering,
        anchor_predicts=anchor_predicts,
        layout_from=layout_from,
        markov_type=None if (kind := places.string("markov_head_type")) is None else kind[1],
        draft_vocab_size=places.integer("draft_vocab_size"),
    )


def _spread_layers(places: Places, layers: int) -> tuple[tuple[int, ...], str] | None:
    """The layers that z-lab's code taps where none are listed; None if it cannot be known.

    As many as the draft has, evenly from the second to the fourth from the end; halves go to even.
    """
    declared = places.integer("num_target_layers")
    if declared is None:
        return None
    if layers == 1:
        return (declared // 2,), "num_target_layers"
    step = (declared - 4) / (layers - 1)
    ids = tuple(round(1 + i * step) for i in range(layers))
    if sorted(set(ids)) != list(ids):
        raise no_tapped_layers(places.top.where)
    return ids, "num_target_layers"


def _block_size(fields: Fields, key: str, least: int) -> int:
    size = fields.integer(key, minimum=least)
    if size > _MAX_BLOCK:
        fields.fail(key, f"at most {_MAX_BLOCK} slots")
    return size


def _layout(places: Places, text: TextConfig, method: str) -> tuple[bool, str]:
    """Whether the anchor's slot predicts, and what says so.

    Keys decide. Where there is none, the family does: DeepSpec's drafts, which it publishes without
    a Markov head as well, sample from the anchor; drafts called DFlash do not.

    Raises:
        InputError: Keys contradict each other, or nothing says it.
    """
    said = [
        (found[0], found[1] is value)
        for key, value in _LAYOUT_KEYS
        if (found := places.flag(key)) is not None
    ]
    for place, predicts in said[1:]:
        if predicts is not said[0][1]:
            raise InputError(
                "draft/slot-layout",
                f"{said[0][0]} and {place} contradict each other: "
                f"{'the first' if said[0][1] else 'the second'} says that the anchor's slot "
                "predicts",
                where=place,
                help="remove the one that is wrong; read one slot off, every proposal is of the "
                "wrong position",
            )
    if said:
        return said[0][1], said[0][0].rpartition(": ")[2]
    if method == "dspark":
        return True, "the family"
    names = (*text.architectures, *_model_types(places, text))
    for name in names:
        for family, predicts in (("dspark", True), ("dflash", False)):
            if family in name.lower():
                return predicts, name
    raise InputError(
        "draft/slot-layout",
        "nothing says whether the anchor's slot predicts the next token: no "
        f"{_LAYOUT_KEYS[0][0]}, and {', '.join(names) or 'no architecture'} is no family edgecc "
        "knows",
        where=places.top.where,
        help="add the architecture or sample_from_anchor as the draft was trained: read one slot "
        "off, every proposal is of the wrong position",
    )


def _model_types(places: Places, text: TextConfig) -> tuple[str, ...]:
    keys = ("model_type", "speculators_model_type", "projector_type")
    found = (places.get((key,), lambda f, k: f.string(k)) for key in keys)
    return (*(name for name in found if name), text.model_type)


def declared_rank(checkpoint: Checkpoint) -> int | None:
    """The rank of the Markov head by the config alone, None if it is silent.

    Raises:
        InputError: It is no number, or given twice with different values.
    """
    return Places(checkpoint, NESTED).integer("markov_rank", minimum=0)


def _reject_attention(places: Places) -> None:
    """Raise for blocks whose slots see something else.

    Raises:
        UnsupportedError: Naming the key.
    """
    for key in (*_CAUSAL, "attention_sink_bias"):
        found = places.flag(key)
        if found is not None and found[1]:
            raise UnsupportedError(
                "draft/attention", f"drafts with {key} are not supported", where=found[0]
            )
    reject_rope_layout(places)


def _reject_networks(places: Places, text: TextConfig, method: str) -> None:
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
    projectors = ("dspark",) if method == "dspark" else ("dflash", "dspark")
    for key, known in (("markov_head_type", MARKOV_TYPES), ("projector_type", projectors)):
        found = places.string(key)
        if found is not None and found[1] not in known:
            raise UnsupportedError(
                "draft/markov-type" if key == "markov_head_type" else "draft/kind",
                f"{key} {found[1]!r} is not supported",
                where=found[0],
                help=f"supported: {', '.join(known)}",
            )
