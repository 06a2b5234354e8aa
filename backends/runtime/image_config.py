"""What the runtime must know to read images: the `vision` part of `bundle.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgecc.errors import BundleError

PREPROCESSING = "qwen2-vl-1"
"""The steps from a file to patches that this runtime takes: see `images` and `image_grid`."""


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """Sizes, normalization and placeholder tokens of images.

    Attributes:
        patch_size: Pixels along either side of a patch.
        temporal_patch_size: Frames of a patch; a still image is repeated.
        merge_size: Patches along either side of the block that becomes one token.
        grid_size: Learned position embeddings along either side of their grid.
        min_pixels: Smaller images are enlarged to this area.
        max_pixels: Larger ones are reduced to it.
        mean: Subtracted from each colour, of values in 0..1.
        std: What each colour is then divided by.
        max_tokens: Most tokens of one image that the compiled tower takes.
        feature_size: Values of the feature of a token.
        image_token_id: Placeholder of an image in a prompt, and of each of its tokens.
        start_token_id: Comes before an image; None if nothing does.
        end_token_id: Comes after an image; None if nothing does.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    grid_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_tokens: int
    feature_size: int
    image_token_id: int
    start_token_id: int | None = None
    end_token_id: int | None = None

    @property
    def factor(self) -> int:
        """Pixels along either side of what becomes one token."""
        return self.patch_size * self.merge_size

    @classmethod
    def from_metadata(cls, vision: Mapping[str, Any]) -> ImageConfig:
        """From the `vision` part of a manifest, or of a module's metadata.

        Raises:
            BundleError: Images need steps that this runtime does not know.
        """
        steps = vision["preprocessing"]
        if steps != PREPROCESSING:
            raise BundleError(
                "bundle/image-preprocessing",
                f"images of this bundle are prepared by {steps!r}, this edgecc knows "
                f"{PREPROCESSING!r}",
                where="bundle.json: vision",
                help="upgrade with: pip install --upgrade edgecc",
            )
        return cls(
            patch_size=vision["patch_size"],
            temporal_patch_size=vision["temporal_patch_size"],
            merge_size=vision["spatial_merge_size"],
            grid_size=vision["grid_size"],
            min_pixels=vision["min_pixels"],
            max_pixels=vision["max_pixels"],
            mean=tuple(vision["image_mean"]),
            std=tuple(vision["image_std"]),
            max_tokens=vision["max_image_tokens"],
            feature_size=vision["feature_size"],
            image_token_id=vision["image_token_id"],
            start_token_id=vision.get("vision_start_token_id"),
            end_token_id=vision.get("vision_end_token_id"),
        )
