"""Weights for small modules: inline ones of every encoding, and stored ones behind fake readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgecc.ir import (
    FP8,
    NVFP4,
    Dense,
    DType,
    Encoding,
    Inline,
    Int4,
    Int8,
    Int8Block,
    Module,
    Stored,
    StoredPart,
    Weight,
)

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


@dataclass(frozen=True)
class Sample:
    """A random weight of any encoding: its components, and its values computed in float64."""

    encoding: Encoding
    parts: Parts
    values: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape."""
        return self.values.shape

    @property
    def weight(self) -> Weight:
        """The table entry."""
        return inline(self.shape, self.encoding, self.parts)


def sample(rng: np.random.Generator, encoding: Encoding, rows: int, columns: int) -> Sample:
    """A random weight `[rows, columns]` of an encoding: every code, scales around one.

    The values are products of float64 numbers, rounded once to float32 like the format says; they
    are built element by element index, not by the encoding's own code.
    """
    if isinstance(encoding, NVFP4):
        made = packed(rng, rows, columns, block=encoding.block)
        return Sample(encoding, made.parts | _input_scale(encoding), made.values)
    if isinstance(encoding, Dense):
        array = rng.standard_normal((rows, columns)).astype(encoding.dtype.numpy)
        return Sample(encoding, {"weight": array}, array.astype(np.float64))
    row, column = np.indices((rows, columns))
    if isinstance(encoding, FP8):
        bits = rng.integers(0, 0x7F, (rows, columns), dtype=np.uint8)  # 0x7f is NaN
        bits |= rng.integers(0, 2, bits.shape, dtype=np.uint8) << 7
        stored = bits.view(ml_dtypes.float8_e4m3fn)
        high, wide = encoding.block
        shape, index = {
            "tensor": ((), ()),
            "channel": ((rows,), (row,)),
            "block": ((-(-rows // high), -(-columns // wide)), (row // high, column // wide)),
        }[encoding.scaling]
        scale = np.asarray(rng.uniform(0.01, 2, shape)).astype(encoding.scale_dtype.numpy)
        parts = {"weight": stored, "weight_scale": scale} | _input_scale(encoding)
        return Sample(encoding, parts, _product(stored, scale[index]))
    if isinstance(encoding, Int8):
        stored = rng.integers(-128, 128, (rows, columns), dtype=np.int8)
        scale = rng.uniform(0.01, 2, rows).astype(encoding.scale_dtype.numpy)
        return Sample(
            encoding, {"weight": stored, "weight_scale": scale}, _product(stored, scale[row])
        )
    if isinstance(encoding, Int8Block):
        stored = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
        scale = rng.uniform(0.01, 2, (rows, columns // encoding.block)).astype(np.float32)
        factors = scale[row, column // encoding.block]
        values = _product(stored.astype(np.int16) - 128, factors)
        return Sample(encoding, {"weight": stored, "weight_scale": scale}, values)
    assert isinstance(encoding, Int4)
    codes = rng.integers(-8, 8, (rows, columns))
    stored = ((codes[0::2] & 15) | (codes[1::2] & 15) << 4).astype(np.uint8)
    scale = rng.uniform(0.01, 2, (rows, columns // encoding.group)).astype(np.float32)
    values = _product(codes, scale[row, column // encoding.group])
    return Sample(encoding, {"weight": stored, "weight_scale": scale}, values)


SMALL_ENCODINGS: tuple[Encoding, ...] = (
    Dense(DType.F32),
    Dense(DType.BF16),
    NVFP4(4),
    NVFP4(8, input_scale=True),
    Int8Block(4),
    FP8("tensor"),
    FP8("tensor", input_scale=True, scale_dtype=DType.BF16),
    FP8("channel"),
    FP8("channel", scale_dtype=DType.BF16),
    FP8("block", (4, 4)),
    FP8("block", (3, 16), scale_dtype=DType.BF16),
    Int8(),
    Int8(DType.BF16),
    Int4(4),
)
"""Every encoding, for weights of an even number of rows and columns that are a multiple of 8."""


def _input_scale(encoding: NVFP4 | FP8) -> dict[str, Array]:
    dtype = DType.F32 if isinstance(encoding, NVFP4) else encoding.scale_dtype
    return {"input_scale": np.array(0.5, dtype.numpy)} if encoding.input_scale else {}


def _product(stored: Array, factors: Array) -> Array:
    """The exact product, rounded once to float32, as float64."""
    exact = stored.astype(np.float64) * factors.astype(np.float64)
    return exact.astype(np.float32).astype(np.float64)


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
