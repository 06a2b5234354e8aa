"""Prompts with images: placeholders, where features go, and positions on three axes.

A chat template writes one placeholder an image. It becomes as many as the image has tokens; their
embeddings are replaced by the features of the image. Text tokens count up on all three axes (time,
row, column) together; tokens of an image share one time and count rows and columns from there; text
goes on after the longer side of the image. KV caches go by the plain number of a token all the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgecc.backends.base import Array, FloatArray, IntArray, Role
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_grid import Grid
from edgecc.backends.runtime.images import PreparedImage
from edgecc.errors import RequestError


@dataclass(frozen=True, slots=True, eq=False)
class ImagePrompt:
    """A prompt whose images have taken their places.

    Attributes:
        token_ids: i64 `[T]`, a placeholder for each token of an image.
        feature_rows: For each token the row of the features of all images together, or -1;
            i64 `[T]`.
        positions: Time, row and column of each token, i64 `[3, T]`.
        delta: What later tokens add to their plain number to get all three positions; at most 0.
    """

    token_ids: IntArray
    feature_rows: IntArray
    positions: IntArray
    delta: int

    @classmethod
    def of_text(cls, token_ids: IntArray) -> ImagePrompt:
        """A prompt without images."""
        count = len(token_ids)
        return cls(token_ids, np.full(count, -1, dtype=np.int64), _text(0, count), 0)

    def positions_from(self, first: int, count: int) -> IntArray:
        """Positions `[3, count]` of tokens `first`, `first + 1` ..., in the prompt or after it."""
        after = np.arange(first, first + count) + self.delta
        positions = np.tile(after, (3, 1))
        inside = max(0, min(first + count, len(self.token_ids)) - first)
        positions[:, :inside] = self.positions[:, first : first + inside]
        return positions

    def rows_from(self, first: int, count: int) -> IntArray:
        """Like `feature_rows`, for tokens in the prompt or after it: i64 `[count]`."""
        rows = np.full(count, -1, dtype=np.int64)
        inside = self.feature_rows[first : first + count]
        rows[: len(inside)] = inside
        return rows

    def inputs_from(self, first: int, count: int, features: FloatArray) -> dict[Role, Array]:
        """What a target that reads images takes besides its other inputs, for some of its tokens.

        Args:
            first: Number of the first token, in the prompt or after it.
            count: How many tokens.
            features: Of all images together, f32 `[m, H]`; those that the tokens need are passed
                on, and one row that none of them reads if they need none.

        Returns:
            Positions i64 `[3, 1, count]`, features f32 `[1, n, H]` and their rows i64 `[1, count]`.
        """
        rows = self.rows_from(first, count)
        used = rows[rows >= 0]
        if used.size:
            low, high = int(used[0]), int(used[-1]) + 1
            rows = np.where(rows >= 0, rows - low, -1)
            needed = features[low:high]
        else:
            needed = np.zeros((1, features.shape[1]), dtype=np.float32)
        return {
            Role.POSITIONS: self.positions_from(first, count)[:, None],
            Role.IMAGE_FEATURES: np.ascontiguousarray(needed[None]),
            Role.IMAGE_ROWS: rows[None],
        }


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of a prompt, and where they are in it.

    Attributes:
        prompt: The prompt.
        pictures: The images, in order.
    """

    prompt: ImagePrompt
    pictures: tuple[PreparedImage, ...]


def in_front(token_ids: Sequence[int] | IntArray, count: int, config: ImageConfig) -> IntArray:
    """A prompt of text with placeholders of so many images before it."""
    around = (config.start_token_id, config.image_token_id, config.end_token_id)
    image = [token for token in around if token is not None]
    return np.array([*(image * count), *token_ids], dtype=np.int64)


def placeholders(token_ids: IntArray, count: int, config: ImageConfig) -> IntArray:
    """Where the placeholders of a prompt are.

    Args:
        token_ids: The prompt, one placeholder an image.
        count: How many images there are.
        config: Of the bundle.

    Raises:
        RequestError: There are more or fewer placeholders.
    """
    found = np.flatnonzero(token_ids == config.image_token_id)
    if len(found) != count:
        raise RequestError(
            "image/placeholders",
            f"the prompt has {_count(len(found), 'image placeholder')} "
            f"(token {config.image_token_id}) for {_count(count, 'image')}",
            help="write one placeholder for each image: a chat template does, where a message has "
            "a part of type image",
        )
    return found


def expand(
    token_ids: Sequence[int] | IntArray, grids: Sequence[Grid], config: ImageConfig
) -> ImagePrompt:
    """Give each image its place in a prompt.

    Args:
        token_ids: The prompt, one placeholder an image.
        grids: Patches of the images, in order.
        config: Of the bundle.

    Raises:
        RequestError: There are more or fewer placeholders than images.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    found = placeholders(ids, len(grids), config)
    counts = np.ones(len(ids), dtype=np.int64)
    counts[found] = [grid.tokens for grid in grids]
    is_image = np.repeat(ids == config.image_token_id, counts)
    rows = np.where(is_image, np.cumsum(is_image) - 1, -1)
    positions = _positions(ids, found, grids)
    total = int(counts.sum())
    delta = int(positions.max(initial=-1)) + 1 - total
    return ImagePrompt(np.repeat(ids, counts), rows.astype(np.int64), positions, delta)


def _positions(ids: IntArray, found: IntArray, grids: Sequence[Grid]) -> IntArray:
    """`[3, T]`: runs of text, and the images between them."""
    pieces: list[IntArray] = []
    now, done = 0, 0
    for place, grid in zip(found.tolist(), grids, strict=True):
        pieces.append(_text(now, place - done))
        now += place - done
        rows, columns = grid.blocks
        inside = np.mgrid[:1, :rows, :columns].reshape(3, -1)
        pieces.append(inside + now)
        now += max(rows, columns)
        done = place + 1
    pieces.append(_text(now, len(ids) - done))
    return np.concatenate(pieces, axis=1)


def _text(first: int, count: int) -> IntArray:
    return np.tile(np.arange(first, first + count, dtype=np.int64), (3, 1))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
