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


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """What a DSpark draft's config says, normalized.

    Attributes:
        text: Hyperparameters of the draft's own layers.
        block_size: Slots of the trained block, the anchor's included.
        target_layer_ids: Target layers (from 0) whose outputs the draft reads; -1: the embedding.
        mask_token_id: Token that fills the slots after the anchor.
        markov_rank: Width of the Markov head.
        has_confidence: Whether a confidence head is declared.
        confidence_with_markov: Whether that head also reads the previous token's Markov embedding.
        num_target_layers: Layers of the target the draft was trained for, if declared.
        numbering: How the file numbers tapped layers, for the report.
    """

    text: TextConfig
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int
    has_confidence: bool
    confidence_with_markov: bool
    num_target_layers: int | None
    numbering: str


class _Places:
    """One key looked up in every object that may hold it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.top = Fields(checkpoint.config, f"{checkpoint.role}/config.json")
        nested = [self.top.section(name) for name in _NESTED]
        self.all = [self.top, *[n for n in nested if n is not None]]

    def find(self, keys: Sequence[str], read: Callable[[Fields, str], _T]) -> _T | None:
        """The value of a fact, wherever and however often it is written.

        Raises:
            InputError: Two places disagree.
        """
        found = [(f.at(k), read(f, k)) for k in keys for f in self.all if k in f]
        for place, value in found[1:]:
            if value != found[0][1]:
                raise InputError(
                    "draft/config-conflict",
                    f"{found[0][0]} is {found[0][1]}, {place} is {value}",
                    where=place,
                    help="remove the one that is wrong; tools disagree on which of them wins",
                )
        return found[0][1] if found else None

    def require(self, keys: Sequence[str], read: Callable[[Fields, str], _T], what: str) -> _T:
        """Like `find`, but the fact must be there.

        Raises:
            InputError: It is nowhere.
        """
        value = self.find(keys, read)
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

    def flag(self, key: str) -> bool | None:
        """A boolean fact, None when it is nowhere."""
        return self.find((key,), lambda f, k: f.boolean(k, default=False))

    def integer(self, key: str, minimum: int = 1) -> int | None:
        """An integer fact, None when it is nowhere."""
        return self.find((key,), lambda f, k: f.integer(k, minimum=minimum))


def read_dspark_config(checkpoint: Checkpoint) -> DSparkConfig:
    """Read and check a DSpark draft's config.

    Raises:
        InputError: A fact is missing, contradictory or out of range.
        UnsupportedError: A variant this frontend does not build (named in the message).
    """
    places = _Places(checkpoint)
    text = read_text_config(checkpoint)
    _reject_variants(places, text)
    ids, numbering = _tapped_layers(places)
    markov = places.find(("markov_head_type",), lambda f, k: f.string(k))
    if markov not in (None, "vanilla"):
        raise UnsupportedError(
            "draft/markov-type",
            f"markov_head_type {markov!r} is not supported",
            where=f"{places.top.where}: markov_head_type",
            help="supported: vanilla",
        )
    return DSparkConfig(
        text=text,
        block_size=places.require(("block_size",), lambda f, k: f.integer(k), "the block size"),
        target_layer_ids=ids,
        mask_token_id=places.require(
            _MASK_KEYS, lambda f, k: f.integer(k, minimum=0), "the mask token"
        ),
        markov_rank=places.require(
            ("markov_rank",), lambda f, k: f.integer(k, minimum=0), "the rank of the Markov head"
        ),
        has_confidence=bool(places.flag("enable_confidence_head")),
        confidence_with_markov=places.flag("confidence_head_with_markov") is not False,
        num_target_layers=places.integer("num_target_layers"),
        numbering=numbering,
    )


def _tapped_layers(places: _Places) -> tuple[tuple[int, ...], str]:
    """Tapped layers as outputs, from either numbering.

    `target_layer_ids` number the layer whose output is read; the `aux_hidden_state_layer_ids` of
    speculators and NVIDIA drafts number the layer whose input is read, which is one more.
    """

    def outputs(f: Fields, k: str) -> tuple[int, ...]:
        return f.integers(k, minimum=-1) or ()

    def inputs(f: Fields, k: str) -> tuple[int, ...]:
        return tuple(i - 1 for i in f.integers(k) or ())

    direct = places.find((_OUTPUT_IDS,), outputs)
    shifted = places.find(_INPUT_IDS, inputs)
    if direct is not None and shifted is not None and direct != shifted:
        raise InputError(
            "draft/config-conflict",
            f"{_OUTPUT_IDS} taps the outputs of layers {list(direct)}, the aux list those of "
            f"{list(shifted)}",
            where=places.top.where,
            help=f"{_OUTPUT_IDS} numbers outputs, aux_hidden_state_layer_ids numbers inputs",
        )
    ids = direct if direct is not None else shifted
    if not ids:
        raise InputError(
            "draft/tapped-layers",
            f"no tapped layers: {_OUTPUT_IDS} is missing or empty",
            where=places.top.where,
            notes=[f"looked for {k}" for k in (_OUTPUT_IDS, *_INPUT_IDS)],
            help="add the layers this draft was trained on",
        )
    if list(ids) != sorted(set(ids)) or ids[0] < -1:
        raise InputError(
            "draft/tapped-layers",
            f"tapped layers {list(ids)} (outputs, counted from 0) must increase",
            where=places.top.where,
            help="use the list this draft was trained with",
        )
    return ids, _OUTPUT_IDS if direct is not None else _INPUT_IDS[0]


def _reject_variants(places: _Places, text: TextConfig) -> None:
    """Raise for DSpark variants with another graph.

    Raises:
        UnsupportedError: Naming the variant.
    """
    where = places.top.where
    if places.flag("sample_from_anchor") is False:
        raise UnsupportedError(
            "draft/slot-layout",
            "drafts whose masks fill their own positions are not supported",
            where=f"{where}: sample_from_anchor",
            help="supported: drafts whose anchor slot already predicts",
        )
    causal = [k for k in ("is_causal", "causal", "causal_head") if places.flag(k)]
    sinks = [k for k in ("attention_sink_bias",) if places.flag(k)]
    if causal or sinks:
        raise UnsupportedError(
            "draft/attention", f"drafts with {(causal + sinks)[0]} are not supported", where=where
        )
    if any(w is not None for w in text.sliding_windows) or places.flag("use_swa"):
        raise UnsupportedError(
            "draft/sliding-window", "drafts with sliding windows are not supported", where=where
        )
    if places.top.string("model_type", default="").startswith("deepseek"):
        raise UnsupportedError(
            "draft/kind", "DeepSeek's bundled drafts are another network", where=where
        )
    if text.hidden_act not in ("silu", "swish"):
        raise UnsupportedError(
            "draft/activation", f"hidden_act {text.hidden_act!r} is not supported", where=where
        )
    for key in ("final_logit_softcapping", "output_multiplier", "logit_scale"):
        if places.find((key,), lambda f, k: f.number(k)) not in (None, 1.0):
            raise UnsupportedError(
                "draft/logit-scale", f"drafts with {key} are not supported", where=where
            )
