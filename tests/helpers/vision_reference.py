"""The vision tower of Qwen3.5 in float64 NumPy, written from its definition; shares no code with
edgecc.

A whole image in raster order: patches are only put into blocks where they are merged, so that the
order in which edgecc keeps them is a result here and not an assumption. Source: transformers'
modeling_qwen3_5.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from helpers.hybrid_reference import HybridTarget
from helpers.reference import Floats, Model


class Tower(Model):
    """A tower over an image `[height, width, 3]` of normalized colours."""

    def __init__(self, path: Path, prefix: str = "model.visual.") -> None:
        super().__init__(path)
        self.prefix = prefix
        self.vision = self.config["vision_config"]

    def features(self, image: Floats) -> Floats:
        """Features of the image's tokens `[m, out_hidden_size]`, in raster order of the tokens."""
        size, merge = self.vision["patch_size"], self.vision["spatial_merge_size"]
        rows, columns = image.shape[0] // size, image.shape[1] // size
        x = self._embed(image, rows, columns)
        for i in range(self.vision["depth"]):
            block = f"{self.prefix}blocks.{i}"
            x = x + self._attention(self._layer_norm(x, f"{block}.norm1"), f"{block}.attn", columns)
            y = self.linear(self._layer_norm(x, f"{block}.norm2"), f"{block}.mlp.linear_fc1")
            inner = math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)
            x = x + self.linear(y * (1 + np.tanh(inner)) / 2, f"{block}.mlp.linear_fc2")
        normed = self._layer_norm(x, f"{self.prefix}merger.norm").reshape(rows, columns, -1)
        tokens = [
            np.concatenate([normed[r + i, c + j] for i in range(merge) for j in range(merge)])
            for r in range(0, rows, merge)
            for c in range(0, columns, merge)
        ]
        y = self.linear(np.array(tokens), f"{self.prefix}merger.linear_fc1")
        y = y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))) / 2
        return self.linear(y, f"{self.prefix}merger.linear_fc2")

    def _embed(self, image: Floats, rows: int, columns: int) -> Floats:
        """Convolution over patches, which see the image in each of their frames; positions."""
        size, frames = self.vision["patch_size"], self.vision["temporal_patch_size"]
        kernel = self.tensor(f"{self.prefix}patch_embed.proj.weight")
        assert kernel.shape[2] == frames
        x = np.empty((rows, columns, kernel.shape[0]))
        for r, c in np.ndindex(rows, columns):
            patch = image[r * size : (r + 1) * size, c * size : (c + 1) * size]
            x[r, c] = np.einsum("octij,ijc->o", kernel, patch)
            x[r, c] += self.tensor(f"{self.prefix}patch_embed.proj.bias")
            x[r, c] += self._learned(r, rows, c, columns)
        return x.reshape(rows * columns, -1)

    def _learned(self, row: int, rows: int, column: int, columns: int) -> Floats:
        """Bilinear interpolation of the grid of position embeddings, corners on corners."""
        table = self.tensor(f"{self.prefix}pos_embed.weight")
        side = math.isqrt(len(table))
        grid = table.reshape(side, side, -1)
        places = [
            np.float32(i) * np.float32(side - 1) / np.float32(max(n - 1, 1))
            for i, n in ((row, rows), (column, columns))
        ]
        lines = []
        for place in places:
            low = int(place)
            lines.append([(low, 1 - float(place - low)), (min(low + 1, side - 1), place - low)])
        return sum(a * b * grid[i, j] for i, a in lines[0] for j, b in lines[1])

    def _attention(self, x: Floats, module: str, columns: int) -> Floats:
        heads = self.vision["num_heads"]
        q, k, v = (self.heads(y, heads) for y in np.split(self.linear(x, f"{module}.qkv"), 3, 1))
        q, k = self._rotate(q, columns), self._rotate(k, columns)
        y = np.empty_like(v)
        for h in range(heads):
            shares = np.exp(q[:, h] @ k[:, h].T / math.sqrt(q.shape[2]))
            y[:, h] = shares / shares.sum(1, keepdims=True) @ v[:, h]
        return self.linear(y.reshape(x.shape), f"{module}.proj")

    def _rotate(self, x: Floats, columns: int) -> Floats:
        """A quarter of the dims pairs turns with the row, the next quarter with the column."""
        out, half = x.copy(), x.shape[2] // 2
        for p in range(len(x)):
            for j in range(half):
                place = p // columns if j < half // 2 else p % columns
                inverse = np.float32(10000.0 ** (-2 * (j % (half // 2)) / half))
                angle = float(np.float32(place) * inverse)
                first, second = x[p, :, j], x[p, :, half + j]
                out[p, :, j] = first * math.cos(angle) - second * math.sin(angle)
                out[p, :, half + j] = second * math.cos(angle) + first * math.sin(angle)
        return out

    def _layer_norm(self, x: Floats, module: str) -> Floats:
        centered = x - x.mean(1, keepdims=True)
        scale = np.sqrt((centered**2).mean(1, keepdims=True) + 1e-6)
        return centered / scale * self.tensor(f"{module}.weight") + self.tensor(f"{module}.bias")


class MultimodalTarget(HybridTarget):
    """A decoder whose language model is the `text_config` of its checkpoint."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.config = {**self.config, **self.config["text_config"]}
        inner = "model.language_model."
        self.stored = {n.replace(inner, "model."): t for n, t in self.stored.items()}
