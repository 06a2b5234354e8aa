"""The image of the golden rows: a small picture in a short prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgecc.backends.base import Array
from edgecc.backends.runtime.golden import tower_tensor
from edgecc.backends.runtime.image_config import ImageConfig
from edgecc.backends.runtime.image_grid import Grid
from edgecc.backends.runtime.image_prompt import ImagePrompt, expand
from edgecc.backends.runtime.images import PreparedImage, prepare_pixels
from edgecc.ir.core import Module
from edgecc.ir.interpreter import Interpreter
from edgecc.roles import Role

BLOCKS = ((2, 2), (1, 2))
"""Rows and columns of tokens, most wanted first: with two of each, all three positions differ."""

IMAGE_ROWS = BLOCKS[0][0] * BLOCKS[0][1] + 2
"""Rows of the prompt: the image between two tokens of text."""


@dataclass(frozen=True, slots=True, eq=False)
class GoldenImage:
    """A picture and the prompt it stands in.

    Attributes:
        prompt: The prompt.
        picture: The picture, as the tower takes it.
    """

    prompt: ImagePrompt
    picture: PreparedImage

    def rows(self, interpreter: Interpreter) -> dict[str, Array]:
        """Golden rows by name: inputs of the tower, its features, where they go, positions."""
        graph = interpreter.module.graphs["vision"]
        named = {i.name: self.picture.inputs[i.role] for i in graph.inputs}
        (output,) = graph.outputs_by_role(Role.IMAGE_FEATURES)
        return {
            **{tower_tensor(role): array for role, array in self.picture.inputs.items()},
            "image_features": interpreter.run("vision", named)[output.name][0],
            "positions": self.prompt.positions,
            "image_rows": self.prompt.feature_rows,
        }


def golden_image(module: Module, rows: int) -> GoldenImage | None:
    """A picture for a module that reads images; None for others.

    Args:
        module: Its metadata has the sizes of images and of the vocabulary.
        rows: Most rows of the prompt. It has as many if they are those of an earlier one.
    """
    vision, target = module.metadata.get("vision"), module.metadata.get("target")
    if "vision" not in module.graphs or not isinstance(vision, dict):
        return None
    assert isinstance(target, dict)
    config = ImageConfig.from_metadata(vision)
    most = min(rows - 2, config.max_tokens)
    blocks = next((b for b in BLOCKS if b[0] * b[1] <= most), (1, 1))
    grid = Grid(blocks[0] * config.merge_size, blocks[1] * config.merge_size, config.merge_size)
    count = min(int(str(target["num_tokens"])), int(str(target["vocab_size"])))
    around = [t for t in (7919 * np.arange(1, 4) % count).tolist() if t != config.image_token_id]
    ids = [config.image_token_id] if rows < 3 else [around[0], config.image_token_id, around[-1]]
    shape = (grid.rows * config.patch_size, grid.columns * config.patch_size, 3)
    noise = (np.arange(np.prod(shape)) * 7919 % 251).astype(np.uint8).reshape(shape)
    return GoldenImage(expand(ids, [grid], config), prepare_pixels(noise, grid, config))
