"""EAGLE3 configs in every spelling: SafeAILab, AngelSlim, SpecForge, speculators, DeepSpec."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import TextConfig, read_text_config
from edgecc.frontends.drafts.places import Places, shown, tapped_layers
from edgecc.frontends.drafts.variants import reject_layers, reject_rope_layout, reject_scales

_NESTED = ("eagle_config",)
_DEFAULT_STEPS = 7
"""Drafts are trained for any number of steps; released ones are run for 5 to 7."""

DEFAULT_TAPS = 3
_LEAST_LAYERS = 7
"""Of a target whose default taps are three different layers."""

_OTHER_NETWORKS = (
    ("use_aux_hidden_state", False, "EAGLE drafts that read one hidden state of the target"),
    ("norm_before_fc", True, "drafts that norm the features before fc"),
    ("fc_norm", True, "drafts that norm the features before fc"),
    ("parallel_drafting", True, "P-EAGLE drafts"),
)
"""Flags, the value that means another network, and which one."""


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """What an EAGLE3 draft's config says, normalized.

    Attributes:
        text: Hyperparameters of the draft's layer; `vocab_size` is the target's.
        steps: Proposals per round, where nobody asks for another number.
        target_layer_ids: Target layers (from 0) whose outputs the draft reads; -1: the embedding.
            None: those of `default_taps`.
        numbering: The key that lists them, for the report.
        draft_vocab_size: Rows of the draft's head; None if only the tensors say.
        target_hidden_size: Hidden size of the target, if declared.
        num_target_layers: Layers of the target the draft was trained for, if declared.
        target_model_type: Family of the target the draft was trained for, if declared.
        norm_before_residual: The residual stream starts from the normed state.
        norm_output: Later steps read the normed state of the step before.
    """

    text: TextConfig
    steps: int
    target_layer_ids: tuple[int, ...] | None
    numbering: str
    draft_vocab_size: int | None
    target_hidden_size: int | None
    num_target_layers: int | None
    target_model_type: str | None
    norm_before_residual: bool
    norm_output: bool


def read_eagle3_config(checkpoint: Checkpoint) -> Eagle3Config:
    """Read and check an EAGLE3 draft's config.

    Raises:
        InputError: A fact is missing, contradictory or out of range.
        UnsupportedError: A variant this frontend does not build (named in the message).
    """
    places = Places(checkpoint, _NESTED)
    text = read_text_config(checkpoint)
    _reject_networks(places, text)
    reject_rope_layout(places)
    reject_layers(places, text)
    reject_scales(places)
    ids, numbering = tapped_layers(places) or (None, "EAGLE3's default, the inputs of 2, n/2, n-3")
    return Eagle3Config(
        text=text,
        steps=places.integer("ttt_length") or _DEFAULT_STEPS,
        target_layer_ids=ids,
        numbering=numbering,
        draft_vocab_size=places.integer("draft_vocab_size"),
        target_hidden_size=places.integer("target_hidden_size"),
        num_target_layers=places.integer("num_target_layers"),
        target_model_type=family[1] if (family := places.string("target_model_type")) else None,
        norm_before_residual=_set(places, "norm_before_residual"),
        norm_output=_set(places, "norm_output"),
    )


def default_taps(target: TextConfig) -> tuple[int, ...]:
    """The layers an EAGLE3 draft reads whose config lists none, as outputs.

    Engines number them by their inputs, 2, n // 2 and n - 3 of n layers: one more than the layer
    whose output that is.

    Raises:
        InputError: The target has so few layers that these are not three.
    """
    layers = target.num_hidden_layers
    if layers < _LEAST_LAYERS:
        raise InputError(
            "draft/tapped-layers",
            f"the config lists no tapped layers, and the default (inputs of layers 2, n/2 and n-3) "
            f"needs a target of at least {_LEAST_LAYERS} layers, this one has {layers}",
            where="draft/config.json",
            help="add target_layer_ids: the layers whose outputs this draft was trained on",
        )
    return 1, layers // 2 - 1, layers - 4


def _set(places: Places, key: str) -> bool:
    found = places.flag(key)
    return found is not None and found[1]


def _reject_networks(places: Places, text: TextConfig) -> None:
    """Raise for drafts that compute something else.

    Raises:
        UnsupportedError: Naming the variant.
    """
    for key, other, what in _OTHER_NETWORKS:
        flag = places.flag(key)
        if flag is not None and flag[1] is other:
            raise UnsupportedError(
                "draft/kind",
                f"{key} is {shown(other)}: {what} are not supported",
                where=flag[0],
            )
    family = places.string("speculators_model_type")
    if family is not None and family[1] != "eagle3":
        raise UnsupportedError(
            "draft/kind", f"{family[1]} drafts are not supported", where=family[0]
        )
    if any(name.startswith("PEagle") for name in text.architectures):
        raise UnsupportedError(
            "draft/kind", "P-EAGLE drafts are not supported", where=places.top.at("architectures")
        )
    if text.num_hidden_layers != 1:
        raise UnsupportedError(
            "draft/layers",
            f"EAGLE3 drafts of {text.num_hidden_layers} layers are not supported",
            where=f"{text.where}: num_hidden_layers",
            help="supported: one layer",
        )
