"""What rules look at: the open checkpoints, and their configs as far as those can be read."""

from __future__ import annotations

from dataclasses import dataclass

from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import config_fields
from edgecc.frontends.drafts.names import canonical_name
from edgecc.frontends.fields import Fields
from edgecc.frontends.quantization.names import as_weight
from edgecc.frontends.strict_json import JsonObject


@dataclass(frozen=True, slots=True)
class Side:
    """One checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        top: The whole config.
        text: The part of it that describes the language model.
    """

    checkpoint: Checkpoint
    top: Fields
    text: Fields

    @property
    def role(self) -> str:
        """`target` or `draft`."""
        return self.checkpoint.role

    def stores(self, name: str) -> bool:
        """Whether a tensor is stored, by its canonical name, in whatever encoding."""
        stored = map(canonical_name, self.checkpoint.tensors)
        return any(as_weight(tensor).endswith(name) for tensor in stored)

    def quantization(self) -> tuple[Fields, ...]:
        """The objects that say how the weights are quantized, those that there are.

        Raises:
            InputError: One of them is no object.
        """
        found = [self.top.section("quantization_config"), self.text.section("quantization_config")]
        side: JsonObject | None = self.checkpoint.json("hf_quant_config.json")
        if side is not None:
            found.append(Fields(side, f"{self.role}/hf_quant_config.json").section("quantization"))
        unique = {fields.where: fields for fields in found if fields is not None}
        return tuple(unique.values())


@dataclass(frozen=True, slots=True)
class Pair:
    """What is examined: a target, a draft, or both.

    Attributes:
        target: The target, if there is one that can be opened.
        draft: Likewise the draft.
    """

    target: Side | None = None
    draft: Side | None = None

    @property
    def sides(self) -> tuple[Side, ...]:
        """Those that there are."""
        return tuple(side for side in (self.target, self.draft) if side is not None)


def side_of(checkpoint: Checkpoint | None) -> Side | None:
    """A checkpoint with its configs.

    Raises:
        InputError: The config has something else in the place of an object.
    """
    if checkpoint is None:
        return None
    top, text = config_fields(checkpoint)
    return Side(checkpoint, top, text)
