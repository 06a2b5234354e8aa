"""Random values at the speed of the disk.

A pool of random values is drawn once per type. Each tensor reads it from a place of its own, round
and round. The pool's length is a prime: no two tensors, and no two rows of one, begin at the same
place in it, so none are equal, although they are shifted copies of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from benchmarks.checkpoints.quantization import BLOCK_SCALES, FP8_STD, Tensor

Array: TypeAlias = NDArray[Any]

POOLS: Final = (65_521, 1_048_573, 16_777_213)
"""Lengths of pools, all prime; small checkpoints need not wait for a large one."""

_ROUNDS: Final = 16
"""Times that the largest tensor may go round."""

_STRIDE: Final = 32_749
"""Between the places where one tensor and the next begin."""

_CHUNK: Final = 1 << 20
_FLOATS: Final = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}


class Values:
    """Values of the tensors of one checkpoint.

    Args:
        seed: Equal seeds give equal values; others have pools of their own.
        largest: Elements of the largest tensor.
    """

    def __init__(self, seed: int, largest: int) -> None:
        self._seed = seed
        self._size = next((n for n in POOLS if n * _ROUNDS >= largest), POOLS[-1])
        self._next = 0

    def blocks(self, tensor: Tensor) -> Iterator[Array]:
        """Consecutive values of a tensor, a block at a time; every call takes another place."""
        place = self._next * _STRIDE % self._size
        self._next += 1
        spec, elements = tensor.spec, int(np.prod(tensor.spec.shape, dtype=np.int64))
        if spec.dtype == "U8":
            yield from self._read(self._bytes, place, elements)
        elif spec.dtype == "F8_E4M3":
            pool = self._elements if tensor.std else self._scales
            yield from self._read(pool, place, elements)
        elif spec.dtype in _FLOATS:
            for block in self._read(self._normals, place, elements):
                yield _normal(block, tensor).astype(_FLOATS[spec.dtype])
        else:
            yield _MAPS[spec.dtype](elements, tensor)

    def _read(self, pool: Array, place: int, elements: int) -> Iterator[Array]:
        while elements:
            block = pool[place : place + min(elements, _CHUNK)]
            yield block
            elements -= len(block)
            place = (place + len(block)) % len(pool)

    def _random(self, stream: int) -> np.random.Generator:
        return np.random.default_rng((self._seed, stream))

    @cached_property
    def _normals(self) -> Array:
        return self._random(0).standard_normal(self._size, dtype=np.float32)

    @cached_property
    def _elements(self) -> Array:
        scaled = self._random(1).standard_normal(self._size, dtype=np.float32)
        scaled *= np.float32(FP8_STD)
        return np.clip(scaled, -448, 448, out=scaled).astype(ml_dtypes.float8_e4m3fn)

    @cached_property
    def _bytes(self) -> Array:
        """Two random codes a byte."""
        return np.frombuffer(self._random(2).bytes(self._size), np.uint8)

    @cached_property
    def _scales(self) -> Array:
        codes = self._random(3).integers(*BLOCK_SCALES, self._size, dtype=np.uint8)
        return codes.view(ml_dtypes.float8_e4m3fn)


def _normal(block: Array, tensor: Tensor) -> Array:
    return block * np.float32(tensor.std) + np.float32(tensor.mean)


_MAPS: Final[dict[str, Callable[[int, Tensor], Array]]] = {
    "I64": lambda size, tensor: np.zeros(size, np.int64),
    "BOOL": lambda size, tensor: (np.arange(size) < tensor.mean).view(np.uint8),
}
