"""Language models that draft for others: the target itself, and near relatives of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np

from helpers.checkpoints import DROP, Tensors, edit_json, edit_tensors


def write_relative(source: Path, folder: Path, amount: float, seed: int = 0) -> Path:
    """A copy of an unquantized checkpoint with noise on its matrices; returns its folder.

    Args:
        source: The checkpoint.
        folder: Where to write.
        amount: Of noise, relative to the root mean square of each matrix.
        seed: Of the noise.
    """
    shutil.copytree(source, folder)
    random = np.random.default_rng(seed)

    def change(tensors: Tensors) -> None:
        for name, array in tensors.items():
            if array.ndim == 2:
                size = np.sqrt(np.mean(np.square(array.astype(np.float64))))
                noise = amount * size * random.standard_normal(array.shape)
                tensors[name] = (array.astype(np.float64) + noise).astype(array.dtype)

    edit_tensors(folder, change)
    return folder


def write_first_layers(source: Path, folder: Path, layers: int) -> Path:
    """A copy of a checkpoint with its first layers only; returns its folder."""
    shutil.copytree(source, folder)

    def change(tensors: Tensors) -> Tensors:
        kept = re.compile(r"model\.layers\.(\d+)\.")
        return {
            name: array
            for name, array in tensors.items()
            if (found := kept.match(name)) is None or int(found[1]) < layers
        }

    edit_tensors(folder, change)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    kinds = config.get("layer_types")
    edit_json(
        folder / "config.json",
        num_hidden_layers=layers,
        layer_types=kinds[:layers] if kinds else DROP,
    )
    return folder
