"""Geometry of images: sizes, the order of patches, and what a vision tower reads besides pixels.

Everything follows transformers 5.24 (`image_processing_pil_qwen2_vl`, `vision_utils`), to the bit
where it is float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from edgecc.backends.base import FloatArray, IntArray
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_files import Pixels
from edgecc.errors import RequestError

MAX_RATIO = 200
"""Largest quotient of the sides of an image."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of an image.

    Attributes:
        rows: Of patches; a multiple of the merge size.
        columns: Likewise.
        merge: Patches along either side of a block.
    """

    rows: int
    columns: int
    merge: int

    @property
    def blocks(self) -> tuple[int, int]:
        """Rows and columns of blocks: of tokens."""
        return self.rows // self.merge, self.columns // self.merge

    @property
    def tokens(self) -> int:
        """Tokens the image becomes."""
        rows, columns = self.blocks
        return rows * columns

    def places(self) -> IntArray:
        """Row and column of each patch, i64 `[2, patches]`, block by block, each in raster order.

        The four patches of a block follow each other: they become one token.
        """
        rows, columns = np.mgrid[: self.rows, : self.columns]
        blocks = (self.blocks[0], self.merge, self.blocks[1], self.merge)
        return np.stack(
            [axis.reshape(blocks).transpose(0, 2, 1, 3).reshape(-1) for axis in (rows, columns)]
        )


def fitted_size(height: int, width: int, config: ImageConfig, where: str) -> tuple[int, int]:
    """Height and width that an image is resized to.

    Multiples of the pixels of a token, of an area between `min_pixels` and `max_pixels`, and as
    near as possible to the image's own shape (transformers' `smart_resize`).

    Raises:
        RequestError: One side is more than 200 times the other.
    """
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_RATIO:
        raise RequestError(
            "image/aspect-ratio",
            f"{width} x {height} pixels: one side is {ratio:.0f} times the other, at most "
            f"{MAX_RATIO} times are possible",
            where=where,
            help="cut the image into pieces",
        )
    factor = config.factor
    fitted = round(height / factor) * factor, round(width / factor) * factor
    if fitted[0] * fitted[1] > config.max_pixels:
        shrink = math.sqrt(height * width / config.max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if fitted[0] * fitted[1] < config.min_pixels:
        grow = math.sqrt(config.min_pixels / (height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return fitted


def normalized(pixels: Pixels, config: ImageConfig) -> FloatArray:
    """`(x / 255 - mean) / std` of RGB values `[h, w, 3]`; f32.

    There are 256 values of each colour, so they are computed once.
    """
    levels = (np.arange(256) * (1 / 255)).astype(np.float32)[:, None]
    mean, std = (np.array(v, dtype=np.float32) for v in (config.mean, config.std))
    table = (levels - mean) / std
    return np.stack([table[:, c][pixels[..., c]] for c in range(3)], axis=-1)


def patches(pixels: FloatArray, grid: Grid, config: ImageConfig) -> FloatArray:
    """Pixels as flat patches `[patches, 3 * T * P * P]` in the order of `Grid.places`.

    Within a patch: colour, frame, row, column. All frames of a still image are the same.
    """
    size, merge = config.patch_size, grid.merge
    rows, columns = grid.blocks
    split = pixels.reshape(rows, merge, size, columns, merge, size, 3)
    ordered = split.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    frames = np.repeat(ordered, config.temporal_patch_size, axis=5)
    return frames.reshape(grid.rows * grid.columns, -1)


def interpolation(grid: Grid, grid_size: int) -> tuple[IntArray, FloatArray]:
    """How learned position embeddings of a square grid are resampled to that of an image.

    Bilinear, corners on corners.

    Returns:
        Embeddings `[patches, 4]` i64, and their weights, f32.
    """
    (upper, lower), (top, bottom) = _neighbours(grid.places()[0], grid.rows, grid_size)
    (left, right), (west, east) = _neighbours(grid.places()[1], grid.columns, grid_size)
    ids = [row * grid_size + column for row in (upper, lower) for column in (left, right)]
    factors = [v * h for v in (top, bottom) for h in (west, east)]
    return np.stack(ids, axis=-1), np.stack(factors, axis=-1)


def _neighbours(
    places: IntArray, count: int, grid_size: int
) -> tuple[tuple[IntArray, IntArray], tuple[FloatArray, FloatArray]]:
    """The two nearest grid lines of each place on one axis, and their weights."""
    span, divisor = np.float32(grid_size - 1), np.float32(max(count - 1, 1))
    source = places.astype(np.float32) * span / divisor
    first = np.floor(source).astype(np.int64)
    second = np.minimum(first + 1, grid_size - 1)
    before = np.float32(1) - (source - np.floor(source))
    return (first, second), (before, np.float32(1) - before)
