"""Rules about the tensors of a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from edgecc.contract.rule import Rule


class Layers(Rule):
    """The stored layers are those that the config counts, without gaps.

    What it checks
        Numbers of layers in tensor names against `num_hidden_layers`. Nothing is renumbered.

    Why it matters
        A pruned or partly fetched checkpoint loads in tools that take the layers they find, and
        the layers that a draft reads then are others.

    What to do
        Fetch config and weights again, or export the checkpoint again.
    """

    name = "layers"
    ids: ClassVar[Mapping[str, str]] = {
        "checkpoint/missing-layers": "layers of the config are not stored",
        "checkpoint/surplus-layers": "more layers are stored than the config counts",
    }


class Tensors(Rule):
    """Every parameter is stored once, in the shape the config gives it, and read.

    What it checks
        Presence, shape and dtype of every tensor of the network, and that no tensor which belongs
        to it is left unread. Names may carry the prefixes of other classes; two names for one
        parameter are an error. Tensors of other parts (vision, multi-token prediction) are listed.

    Why it matters
        A parameter that is not read changes results without any other sign. Equal shapes prove
        nothing, so that each tensor is looked up by its name.

    What to do
        Fetch config and weights again; remove the tensor that is stale.
    """

    name = "tensors"
    ids: ClassVar[Mapping[str, str]] = {
        "checkpoint/missing-tensor": "a tensor is missing",
        "checkpoint/shape": "a tensor has another shape or dtype than the config gives it",
        "checkpoint/dtype": "a dtype without counterpart",
        "checkpoint/unread-parameter": "a stored parameter has no place in this architecture",
        "checkpoint/not-finite": "a value is NaN or infinite (seen when compiling)",
        "target/duplicate-tensor": "two tensors of the target mean the same",
        "target/two-models": "two language models are stored",
        "target/fused-projections": "projections are stored fused",
        "draft/duplicate-tensor": "two tensors of the draft mean the same",
        "draft/fused-qkv": "q, k and v of the draft are stored fused",
    }


class Vision(Rule):
    """The vision tower and the image processor are those that edgecc computes exactly.

    What it checks
        Only if the tower is asked for (`--components all`): its activation and layout, and the
        settings of the image processor.

    Why it matters
        A picture that is resized or cut otherwise gives other patches, and other text.

    What to do
        Leave the tower out, or fetch the processor's config.
    """

    name = "vision"
    ids: ClassVar[Mapping[str, str]] = {
        "vision/activation": "the tower has another activation",
        "vision/deepstack": "the tower feeds inner layers of the language model",
        "vision/no-processor": "the config of the image processor is missing",
        "vision/processor": "a setting of the image processor is not supported",
        "vision/resample": "pictures are resized in another way",
        "vision/too-small": "a prompt has no room for the smallest picture",
        "vision/no-tower": "a tower was asked for, and there is none",
    }
