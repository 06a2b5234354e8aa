"""What the config of a Qwen3.5 target says of its vision tower, checked.

Rules and defaults follow transformers' configuration_qwen3_5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from edgecc.errors import UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.config import MAX_HEAD_DIM, TextConfig, config_fields, rope_fields
from edgecc.frontends.fields import Fields
from edgecc.ir.rope import AXIAL, RopeParams

_GELUS = {"gelu_pytorch_tanh": "tanh", "gelu": "none"}


@dataclass(frozen=True, slots=True)
class VisionConfig:
    """Sizes of a vision tower.

    Attributes:
        depth: Blocks.
        hidden_size: Width of the tower.
        num_heads: Attention heads.
        intermediate_size: Width inside its MLPs.
        in_channels: Colours of a pixel.
        patch_size: Pixels along either side of a patch.
        temporal_patch_size: Frames of a patch; a still image is repeated.
        spatial_merge_size: Patches along either side of the block that becomes one token.
        grid_size: Learned position embeddings along either side of their grid.
        approximate: Form of the GELU inside the blocks, see the op `gelu`.
        rope: Rotary embedding of a head.
        image_token_id: Placeholder of one image token.
        vision_start_token_id: Comes before the placeholders of an image.
        vision_end_token_id: Comes after them.
        where: File and object, for messages.
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    in_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    grid_size: int
    approximate: str
    rope: RopeParams
    image_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    where: str

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden_size // self.num_heads

    @property
    def patches_per_token(self) -> int:
        """Patches that become one token."""
        return self.spatial_merge_size**2


def read_vision(checkpoint: Checkpoint, config: TextConfig) -> VisionConfig:
    """Read and check the sizes of the vision tower.

    Args:
        checkpoint: The target.
        config: Its language model.

    Raises:
        InputError: A key is missing, has a wrong type, or contradicts another.
        UnsupportedError: The config asks for another network.
    """
    top, _ = config_fields(checkpoint)
    vision = top.section("vision_config")
    if vision is None:
        top.fail("vision_config", "an object, because tensors of a vision tower are stored")
    _check_variant(vision)
    hidden, heads = vision.integer("hidden_size"), vision.integer("num_heads")
    if hidden % heads or hidden // heads % 4 or hidden // heads > MAX_HEAD_DIM:
        vision.fail("num_heads", f"a number that divides {hidden} into heads of 4, 8, 12 ... dims")
    depth, stored = vision.integer("depth"), len(checkpoint.tensors)
    if depth > stored:  # a missing block would be looked for so many times
        vision.fail("depth", f"at most the {stored} tensors stored")
    out = vision.integer("out_hidden_size")
    if out != config.hidden_size:
        vision.fail("out_hidden_size", f"the {config.hidden_size} of the language model")
    embeddings = vision.integer("num_position_embeddings", default=2304)
    if math.isqrt(embeddings) ** 2 != embeddings:
        vision.fail("num_position_embeddings", "a square number")
    theta = rope_fields(vision).number("rope_theta", default=10000.0)
    return VisionConfig(
        depth=depth,
        hidden_size=hidden,
        num_heads=heads,
        intermediate_size=vision.integer("intermediate_size"),
        in_channels=vision.integer("in_channels", default=3),
        patch_size=vision.integer("patch_size", default=16),
        temporal_patch_size=vision.integer("temporal_patch_size", default=2),
        spatial_merge_size=vision.integer("spatial_merge_size", default=2),
        grid_size=math.isqrt(embeddings),
        approximate=_GELUS[_activation(vision)],
        rope=RopeParams(theta, hidden // heads, AXIAL),
        image_token_id=_token(top, config, "image_token_id"),
        vision_start_token_id=_token(top, config, "vision_start_token_id"),
        vision_end_token_id=_token(top, config, "vision_end_token_id"),
        where=vision.where,
    )


def _activation(vision: Fields) -> str:
    return vision.string("hidden_act", default="gelu_pytorch_tanh")


def _check_variant(vision: Fields) -> None:
    activation = _activation(vision)
    if activation not in _GELUS:
        raise UnsupportedError(
            "vision/activation",
            f"hidden_act {activation!r} is not supported in a vision tower",
            where=vision.at("hidden_act"),
            help=f"supported: {', '.join(_GELUS)}",
        )
    if blocks := vision.integers("deepstack_visual_indexes"):
        raise UnsupportedError(
            "vision/deepstack",
            f"features of inner blocks ({list(blocks[:8])}, deepstack) are added to language "
            "layers: the classes of this model_type have no such layers",
            where=vision.at("deepstack_visual_indexes"),
            help="leave the vision tower out: --components text",
        )
    if vision.integer("in_channels", default=3) != 3:
        vision.fail("in_channels", "3: images are read as RGB")


def _token(top: Fields, config: TextConfig, key: str) -> int:
    found = top.integer(key, minimum=0)
    if found >= config.vocab_size:
        top.fail(key, f"an id below vocab_size {config.vocab_size}")
    return found
