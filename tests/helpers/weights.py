"""Weights for small modules: inline ones of every encoding, and stored ones behind fake readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgecc.ir import NVFP4, Dense, DType, Encoding, Inline, Module, Stored, StoredPart, Weight

Array: TypeAlias = NDArray[Any]
Parts: TypeAlias = Mapping[str, Array]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Magnitudes of the E2M1 codes 0..7 in the OCP Microscaling specification; 8..15 are negative."""


def inline(shape: tuple[int, ...], encoding: Encoding, parts: Parts) -> Weight:
    """A weight that holds its component arrays."""
    source = Inline(tuple((name, np.asarray(a).tobytes()) for name, a in parts.items()))
    return Weight(shape, encoding, source)


def dense(values: Array, dtype: DType | None = None) -> Weight:
    """A dense inline weight, `float32` unless told otherwise or the values are integers."""
    values = np.asarray(values)
    if dtype is None:
        dtype = DType.F32 if values.dtype.kind == "f" else DType.of(values.dtype)
    return inline(values.shape, Dense(dtype), {"weight": values.astype(dtype.numpy)})


@dataclass(frozen=True)
class Packed:
    """An NVFP4 weight and its values, computed here from codes and scales."""

    codes: Array
    scale: Array
    global_scale: np.float32
    block: int = 16

    @property
    def parts(self) -> dict[str, Array]:
        """Component arrays as ModelOpt stores them."""
        return {
            "weight": self.codes[:, 0::2] | self.codes[:, 1::2] << 4,
            "weight_scale": self.scale,
            "weight_scale_2": np.array(self.global_scale),
        }

    @property
    def shape(self) -> tuple[int, int]:
        """Logical shape `[N, K]`."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def encoding(self) -> NVFP4:
        """Its encoding."""
        return NVFP4(self.block)

    @property
    def weight(self) -> Weight:
        """The table entry."""
        return inline(self.shape, self.encoding, self.parts)

    @property
    def values(self) -> Array:
        """Float64 values: exact but for the two float32 roundings of the format."""
        magnitude = np.array(E2M1)[self.codes & 7]
        signed = np.where(self.codes & 8, -magnitude, magnitude)
        factor = (self.scale.astype(np.float64) * np.float64(self.global_scale)).astype(np.float32)
        product = signed * np.repeat(factor.astype(np.float64), self.block, axis=1)
        return product.astype(np.float32).astype(np.float64)


def packed(
    rng: np.random.Generator,
    rows: int,
    columns: int,
    *,
    block: int = 4,
    global_scale: float = 0.0625,
) -> Packed:
    """A random NVFP4 weight: all codes, scales around one."""
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    scale = rng.uniform(0.25, 2, (rows, columns // block)).astype(ml_dtypes.float8_e4m3fn)
    return Packed(codes, scale, np.float32(global_scale), block)


@dataclass
class MemoryReader:
    """Tensors of a pretended checkpoint, and a record of what was read."""

    tensors: dict[str, Array] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> Array:
        """Rows of a tensor."""
        self.reads.append(key)
        return self.tensors[key][start:stop] if start is not None else self.tensors[key]


class ForbiddenReader:
    """A checkpoint nobody may read."""

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> Array:
        """Fail."""
        raise AssertionError(f"{key} was read")


def store(module: Module, checkpoint: str, symbol: str, weight: Weight) -> str:
    """Add an inline weight as a stored one: its components become tensors of a checkpoint."""
    assert isinstance(weight.source, Inline)
    reader = module.weights.readers.setdefault(checkpoint, MemoryReader())
    assert isinstance(reader, MemoryReader)
    components = weight.encoding.components(weight.shape)
    parts = []
    for name, data in weight.source.parts:
        component = components[name]
        key = f"{symbol}.{name}"
        array = np.frombuffer(data, component.dtype.numpy).reshape(component.shape)
        reader.tensors[key] = array
        parts.append(StoredPart(name, "model.safetensors", key))
    source = Stored(checkpoint, tuple(parts))
    return module.weights.add(symbol, Weight(weight.shape, weight.encoding, source))
