"""DSpark configs in every spelling: DeepSpec, SpecForge / RadixArk, speculators, NVIDIA exports.

The families write the same facts in different places. All places are read, nulls are ignored, and
two values that differ are an error: guessing a precedence has cost other tools acceptance silently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, read_text_config
from edgecc.frontends.fields import Fields

_T = TypeVar("_T")

_NESTED = ("dspark_config", "dflash_config", "eagle_config")
_MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
_OUTPUT_IDS = "target_layer_ids"
_INPUT_IDS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
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


class _Places:
    """One key looked up in every object that may hold it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.top = Fields(checkpoint.config, f"{checkpoint.role}/config.json")
        nested = [self.top.section(name) for name in _NESTED]
        self.all = [self.top, *[n for n in nested if n is not None]]

    def find(self, keys: Sequence[str], read: Callable[[Fields, str], _T]) -> tuple[str, _T] | None:
        """A fact and its place, wherever and however often it is written.

        Raises:
            InputError: Two places disagree.
        """
        found = [(f.at(k), read(f, k)) for k in keys for f in self.all if k in f]
        for place, value in found[1:]:
            if value != found[0][1]:
                raise InputError(
                    "draft/config-conflict",
                    f"{found[0][0]} is {_shown(found[0][1])}, {place} is {_shown(value)}",
                    where=place,
                    help="remove the one that is wrong; tools disagree on which of them wins",
                )
        return found[0] if found else None

    def get(self, keys: Sequence[str], read: Callable[[Fields, str], _T]) -> _T | None:
        """Like `find`, without the place."""
        found = self.find(keys, read)
        return None if found is None else found[1]

    def require(self, keys: Sequence[str], read: Callable[[Fields, str], _T], what: str) -> _T:
        """Like `get`, but the fact must be there.

        Raises:
            InputError: It is nowhere.
        """
        value = self.get(keys, read)
        if value is None:
            raise InputError(
                "config/missing-key",
                f"{what} is missing",
                where=self.top.where,
                notes=[f"looked for {k} in {', '.join(f.where for f in self.all)}" for k in keys],
                help="a default would be silently wrong for this draft: add the key it was "
                "trained with",
            )
        return value

    def flag(self, key: str) -> tuple[str, bool] | None:
        """A boolean fact and its place."""
        return self.find((key,), lambda f, k: f.boolean(k, default=False))

    def string(self, key: str) -> tuple[str, str] | None:
        """A text and its place."""
        return self.find((key,), lambda f, k: f.string(k))

    def integer(self, key: str, minimum: int = 1) -> int | None:
        """An integer fact, None when it is nowhere."""
        return self.get((key,), lambda f, k: f.integer(k, minimum=minimum))


def read_dspark_config(checkpoint: Checkpoint) -> DSparkConfig:
    """Read and check a DSpark draft's config.

    Raises:
        InputError: A fact is missing, contradictory or out of range.
        UnsupportedError: A variant this frontend does not build (named in the message).
    """
    places = _Places(checkpoint)
    text = read_text_config(checkpoint)
    _reject_layouts(places)
    _reject_networks(places, text)
    _reject_scales(places)
    ids, numbering = _tapped_layers(places)
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
    return _Places(checkpoint).integer("markov_rank", minimum=0)


def _tapped_layers(places: _Places) -> tuple[tuple[int, ...], str]:
    """Tapped layers as outputs, from either numbering, and the key they come from.

    `target_layer_ids` number the layer whose output is read; the `aux_hidden_state_layer_ids` of
    speculators and NVIDIA drafts number the layer whose input is read, which is one more.
    """
    direct = places.find((_OUTPUT_IDS,), lambda f, k: f.integers(k, minimum=-1))
    shifted = places.find(_INPUT_IDS, _shifted)
    if direct is not None and shifted is not None and direct[1] != shifted[1]:
        raise InputError(
            "draft/config-conflict",
            f"{direct[0]} taps the outputs of layers {_shown(direct[1])}, {shifted[0]} those of "
            f"{_shown(shifted[1])}",
            where=shifted[0],
            help=f"{_OUTPUT_IDS} numbers outputs, {_INPUT_IDS[0]} numbers inputs: one more",
        )
    place, ids = direct or shifted or ("", ())
    if not ids:
        raise InputError(
            "draft/tapped-layers",
            f"no tapped layers: {_OUTPUT_IDS} is missing or empty",
            where=place or places.top.where,
            notes=[f"looked for {k}" for k in (_OUTPUT_IDS, *_INPUT_IDS)],
            help="add the layers this draft was trained on",
        )
    if list(ids) != sorted(set(ids)):
        raise InputError(
            "draft/tapped-layers",
            f"tapped layers {_shown(ids)} (outputs, counted from 0) must increase",
            where=place,
            help="use the list this draft was trained with",
        )
    return ids, place.rpartition(": ")[2].rpartition(".")[2]


def _shifted(fields: Fields, key: str) -> tuple[int, ...]:
    return tuple(i - 1 for i in fields.integers(key) or ())


def _reject_layouts(places: _Places) -> None:
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
                f"{key} is {_shown(other)}: drafts whose masks fill their own positions are not "
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
    for key in ("rope_is_neox_style", "is_neox_style"):
        found = places.flag(key)
        if found is not None and not found[1]:
            raise UnsupportedError(
                "draft/rope-layout",
                "drafts that rotate interleaved pairs are not supported",
                where=found[0],
                help="supported: halves of each head rotated (neox style)",
            )


def _reject_networks(places: _Places, text: TextConfig) -> None:
    """Raise for networks with other layers or heads.

    Raises:
        UnsupportedError: Naming the variant.
    """
    where = places.top.where
    swa = places.flag("use_swa")
    if any(w is not None for w in text.sliding_windows) or (swa is not None and swa[1]):
        raise UnsupportedError(
            "draft/sliding-window", "drafts with sliding windows are not supported", where=where
        )
    named = (places.top.string("model_type", default=""), text.model_type, *text.architectures)
    for family in _OTHER_FAMILIES:
        if any(name.lower().startswith(family) for name in named):
            raise UnsupportedError(
                "draft/kind",
                f"DSpark drafts of the {family} family are another network",
                where=where,
                help="supported: DSpark drafts with Qwen3-style layers",
            )
    if text.hidden_act not in ("silu", "swish"):
        raise UnsupportedError(
            "draft/activation", f"hidden_act {text.hidden_act!r} is not supported", where=where
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


def _reject_scales(places: _Places) -> None:
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


def _shown(value: object) -> str:
    """A value as JSON writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
