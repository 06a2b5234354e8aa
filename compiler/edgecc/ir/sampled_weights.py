"""Stand-ins for large weights: a few random rows, repeated, in the encoding of the real ones.

Comparing a module before and after a pass needs *some* values for its weights, the same on both
sides, not those of a checkpoint of gigabytes. A stored weight above a size gets a tile of random
rows (valid codes, positive scales) instead of being read; components without rows, such as NVFP4's
global scale, are read, because passes look at them. Derived weights follow by their recipes.

Equal weights must stay equal: a pass may make one the alias of the other. The random numbers are
therefore seeded by the content hash where it is known, else by the place in the checkpoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from edgecc.ir.encodings import Dense
from edgecc.ir.random_weights import random_parts
from edgecc.ir.recipes import RECIPES
from edgecc.ir.weights import BLOCK_BYTES, Derived, Parts, Stored, Weight, WeightTable

SAMPLE_BYTES = 32 << 10
"""Stored weights of more bytes are sampled."""

TILE_ROWS = 31
"""Rows that repeat. A prime, so that shifting rows by any usual width shows."""

ROWWISE = frozenset({"dequantize", "int8_codes"})
"""Recipes of one input that make each row from the same row of it."""


class Segment(NamedTuple):
    """Rows `start:stop` of a weight, of which the first `period` repeat."""

    start: int
    stop: int
    period: int


class SampledWeights(WeightTable):
    """A copy of a weight table in which large stored weights are replaced by samples.

    Args:
        table: The real one; nothing but small weights and scalars is read from it.
        limit: Stored weights of more bytes are replaced.
        tiles: Samples made before, to be used again.
    """

    def __init__(
        self,
        table: WeightTable,
        limit: int = SAMPLE_BYTES,
        tiles: dict[str, Parts] | None = None,
    ) -> None:
        super().__init__()
        self._weights = dict(table)
        self.readers = table.readers
        self._real = table
        self._limit = limit
        self._tiles: dict[str, Parts] = {} if tiles is None else tiles

    def read(self, symbol: str, start: int = 0, stop: int | None = None) -> Parts:
        """Rows of the sample, or of the weight itself if it is small."""
        name = self.resolve(symbol)
        weight = self[name]
        if not self._is_sampled(weight):
            return super().read(name, start, stop)
        components = weight.encoding.components(weight.shape)
        stop = weight.shape[0] if stop is None else stop
        parts: Parts = {}
        for component, array in self._tile(name, weight).items():
            if components[component].rows:  # an encoding may store several rows together
                array = array[np.arange(*components[component].cut(start, stop)) % len(array)]
            parts[component] = array
        return parts

    def row_blocks(
        self, symbol: str, block_bytes: int = BLOCK_BYTES
    ) -> Iterator[tuple[int, int, Parts]]:
        """One block for each run of repeating rows.

        Rows that are stacked come in the blocks they would have come in alone: a matrix product
        gives them the same bits, whatever they are stacked with.
        """
        segments = self._segments(self.resolve(symbol))
        if segments is None:
            yield from super().row_blocks(symbol, block_bytes)
            return
        for start, stop, period in segments:
            yield start, stop, self.read(symbol, start, min(start + period, stop))

    def _is_sampled(self, weight: Weight) -> bool:
        """Integers are ids and not numbers: they are always read."""
        encoding = weight.encoding
        if not _is_stored(weight) or not weight.shape:
            return False
        if isinstance(encoding, Dense) and not encoding.dtype.is_float:
            return False
        return weight.nbytes > self._limit

    def _segments(self, symbol: str) -> Sequence[Segment] | None:
        """How the rows of a weight repeat; None where that is not known and it is large."""
        weight = self[symbol]
        source = weight.source
        if weight.shape[:1] == (0,):
            return []
        if self._is_sampled(weight):
            return [Segment(0, weight.shape[0], _period(weight))]
        if isinstance(source, Derived) and _is_rowwise(weight, source):
            return self._segments(self.resolve(source.inputs[0]))
        if isinstance(source, Derived) and source.recipe == "concat_rows":
            return self._stacked(source.inputs)
        if weight.shape and weight.nbytes <= self._limit:
            return [Segment(0, weight.shape[0], weight.shape[0])]
        return None

    def _stacked(self, symbols: Sequence[str]) -> Sequence[Segment] | None:
        found: list[Segment] = []
        for symbol in symbols:
            segments = self._segments(self.resolve(symbol))
            if segments is None:
                return None
            offset = found[-1].stop if found else 0
            found += [Segment(s + offset, e + offset, p) for s, e, p in segments]
        return found

    def _tile(self, symbol: str, weight: Weight) -> Parts:
        source = weight.source
        key = f"{self._real.known_digest(symbol) or source!r} {weight.shape} {weight.encoding}"
        if key not in self._tiles:
            seed = hashlib.sha256(key.encode()).digest()
            rng = np.random.default_rng(np.frombuffer(seed, np.uint32))
            self._tiles[key] = self._sample(rng, symbol, weight)
        return self._tiles[key]

    def _sample(self, rng: np.random.Generator, symbol: str, weight: Weight) -> Parts:
        """Random rows, with the real components that have none."""
        shape = (_period(weight), *weight.shape[1:])
        components = weight.encoding.components(shape)
        source = weight.source
        if isinstance(source, Stored):
            reader = self.readers[source.checkpoint]
            real = {
                part.component: reader.read(part.key).reshape(components[part.component].shape)
                for part in source.parts
                if not components[part.component].rows
            }
        else:
            made = super().read(symbol, 0, 0)
            real = {name: made[name] for name, c in components.items() if not c.rows}
        return random_parts(rng, shape, weight.encoding, real)


def _is_stored(weight: Weight) -> bool:
    """Whether the bytes of a weight are those of a checkpoint, or the same in another order."""
    source = weight.source
    if isinstance(source, Derived):
        return RECIPES[source.recipe].repacks
    return isinstance(source, Stored)


def _is_rowwise(weight: Weight, source: Derived) -> bool:
    """Whether equal rows of the first input become equal rows."""
    alone = weight.encoding.row_group(weight.shape) == 1
    return source.recipe in ROWWISE or (source.recipe == "quantize" and alone)


def _period(weight: Weight) -> int:
    """Rows that repeat: an odd number of whole row groups."""
    group = weight.encoding.row_group(weight.shape)
    return min(group * (-(-TILE_ROWS // group) | 1), weight.shape[0])
