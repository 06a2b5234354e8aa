"""Images as a vision tower takes them.

`prepare` is the way in: files in, one `PreparedImage` each out, with all inputs of the tower and
the number of tokens the image becomes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgecc.backends.base import Array, FloatArray, IntArray, Role
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_files import (
    ImageSource,
    NamedImage,
    Pixels,
    read_image,
    resize,
)
from edgecc.backends.runtime.image_grid import (
    Grid,
    fitted_size,
    interpolation,
    normalized,
    patches,
)
from edgecc.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class PreparedImage:
    """One image, ready for the tower.

    Attributes:
        grid: Its patches.
        pixel_values: f32 `[1, patches, 3 * T * P * P]`.
        positions: Row and column of each patch, i64 `[2, 1, patches]`.
        interpolation_ids: Learned position embeddings of each patch, i64 `[1, patches, 4]`.
        interpolation_weights: Their weights, f32 `[1, patches, 4]`.
    """

    grid: Grid
    pixel_values: FloatArray
    positions: IntArray
    interpolation_ids: IntArray
    interpolation_weights: FloatArray

    @property
    def tokens(self) -> int:
        """Tokens the image becomes."""
        return self.grid.tokens

    @property
    def inputs(self) -> dict[Role, Array]:
        """The inputs of the tower."""
        return {
            Role.PIXEL_VALUES: self.pixel_values,
            Role.POSITIONS: self.positions,
            Role.INTERPOLATION_IDS: self.interpolation_ids,
            Role.INTERPOLATION_WEIGHTS: self.interpolation_weights,
        }


def prepare(
    images: Sequence[ImageSource | NamedImage | PreparedImage], config: ImageConfig
) -> list[PreparedImage]:
    """Read, resize and cut images into patches.

    Args:
        images: Paths, bytes of files, or Pillow images, with names for messages or without; those
            that are prepared stay as they are.
        config: Of the bundle.

    Raises:
        RequestError: One is no image, damaged, too narrow, or has more tokens than fit.
        ResourceError: A file cannot be read.
        UnsupportedError: Pillow is not installed.
    """
    return [
        image
        if isinstance(image, PreparedImage)
        else _prepare(image if isinstance(image, NamedImage) else _named(image, i), config)
        for i, image in enumerate(images)
    ]


def _prepare(image: NamedImage, config: ImageConfig) -> PreparedImage:
    def fitted(height: int, width: int) -> Grid:
        return _grid(height, width, config, image.name)

    pixels = read_image(image.source, image.name, fitted)
    grid = fitted(pixels.height, pixels.width)
    size = grid.rows * config.patch_size, grid.columns * config.patch_size
    return prepare_pixels(resize(pixels, *size), grid, config)


def _grid(height: int, width: int, config: ImageConfig, where: str) -> Grid:
    """Patches of an image in the size that it is resized to.

    Raises:
        RequestError: It is too narrow, or has more tokens than fit.
    """
    fitted = fitted_size(height, width, config, where)
    grid = Grid(fitted[0] // config.patch_size, fitted[1] // config.patch_size, config.merge_size)
    if grid.tokens > config.max_tokens:
        raise RequestError(
            "image/too-many-tokens",
            f"the image has {grid.tokens} tokens ({fitted[1]} x {fitted[0]} pixels), the bundle "
            f"takes images of at most {config.max_tokens}",
            where=where,
            help="make the image smaller, or compile with a larger --max-input-len",
        )
    return grid


def prepare_pixels(pixels: Pixels, grid: Grid, config: ImageConfig) -> PreparedImage:
    """Cut an image that has its size already into patches.

    Args:
        pixels: RGB `[height, width, 3]`.
        grid: Its patches.
        config: Of the bundle.
    """
    ids, factors = interpolation(grid, config.grid_size)
    flat = patches(normalized(pixels, config), grid, config)
    return PreparedImage(
        grid=grid,
        pixel_values=np.ascontiguousarray(flat[None]),
        positions=grid.places()[:, None],
        interpolation_ids=ids[None],
        interpolation_weights=factors[None],
    )


def _named(source: ImageSource, index: int) -> NamedImage:
    if isinstance(source, str | os.PathLike):
        return NamedImage(source, os.fspath(source))
    return NamedImage(source, f"image {index + 1}")
