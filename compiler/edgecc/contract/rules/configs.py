"""Rules about config.json of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from edgecc.contract.rule import Rule


class ConfigKeys(Rule):
    """Every key that decides what is computed is there and has a possible value.

    What it checks
        Presence, type and range of the keys of a decoder, in the text part of multimodal configs as
        well. Null counts as absent, true is not a number, and ids lie below `vocab_size`.

    Why it matters
        Readers that take a default for a key they do not find (because it is nested one level
        deeper, or misspelt) build another model without saying so.

    What to do
        Correct the key that is named, or fetch config.json again.
    """

    name = "config-keys"
    ids: ClassVar[Mapping[str, str]] = {
        "config/missing-key": "a key is missing that has no safe default",
        "config/bad-value": "a key has a value that cannot be right",
        "draft/config-conflict": "a draft's config gives a fact twice, with different values",
    }


class Geometry(Rule):
    """Heads, head size and kinds of layers agree between config and weights.

    What it checks
        The head size: the config's value, else what the key projection says, else the quotient;
        config and weights must agree. `layer_types` has one known entry a layer, and each layer
        stores the projections of its kind. Gates of attention and of Gated DeltaNet are those that
        are built.

    Why it matters
        A head size derived as `hidden_size / heads` is wrong for most current models, and some
        wrong values still give shapes that fit.

    What to do
        Fetch config and weights again: they are of different models or revisions.
    """

    name = "geometry"
    ids: ClassVar[Mapping[str, str]] = {
        "config/head-dim": "head_dim is not what the key projection has",
        "config/layer-type": "layers of an unknown kind",
        "config/output-gate": "a flag about the gate of attention contradicts the architecture",
        "target/layer-kind": "a layer's tensors are of another kind than the config says",
        "target/no-gate": "the query projection has no rows for the gate",
        "target/output-gate": "the gate of Gated DeltaNet is of another kind",
    }


class RotaryEmbedding(Rule):
    """Rotary embeddings are of a known type, with all of their parameters.

    What it checks
        Type and parameters in either spelling (`rope_parameters`, or `rope_theta` with
        `rope_scaling`, `type` or `rope_type`), for target and draft separately; sections of
        multimodal embeddings cover the rotated dims.

    Why it matters
        A scaling that is ignored is right for short prompts and fails after some thousand tokens.
        A draft whose scaling is ignored is accepted less with every position, without an error.

    What to do
        Correct the parameters, or use a checkpoint with one of the supported types.
    """

    name = "rotary-embedding"
    ids: ClassVar[Mapping[str, str]] = {
        "rope/unsupported-type": "a type that edgecc does not compute",
        "rope/per-layer": "parameters differ between layers",
        "rope/sections": "the sections of a multimodal embedding do not fit",
        "rope/default-theta": "there is no rope_theta, and the default is taken",
        "draft/rope-layout": "a draft rotates neighbours instead of halves",
    }


class Biases(Rule):
    """A bias exists if its tensor is stored; flags of the config only say what to expect.

    What it checks
        `attention_bias` and `mlp_bias` against the stored tensors, and that all layers with a
        projection have its bias, or none.

    Why it matters
        A bias left out, or one left uninitialized because a flag announced it, changes every
        result a little and stops nothing.

    What to do
        Check that config and weights belong together.
    """

    name = "biases"
    ids: ClassVar[Mapping[str, str]] = {
        "config/bias-flag": "a flag says otherwise than the stored tensors",
        "checkpoint/missing-bias": "some layers have a bias and others not",
    }


class Architecture(Rule):
    """The target is of an architecture that edgecc builds exactly.

    What it checks
        `model_type`, and the options of an architecture that would change what is computed:
        activation, types of layers, experts.

    Why it matters
        A network that is almost the right one gives text that is almost right.

    What to do
        Use a target of a supported architecture.
    """

    name = "architecture"
    ids: ClassVar[Mapping[str, str]] = {
        "target/architecture": "there is no frontend for this model_type",
        "target/activation": "the MLP has another activation",
        "target/layer-type": "layers of a type that the architecture does not have",
        "target/experts": "a mixture of experts",
    }
