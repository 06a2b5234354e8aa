"""Weight encodings: how a logical matrix is stored, and how to get its exact values back.

An `Encoding` is a type, equal by value. It knows the component tensors of a weight (a packed NVFP4
matrix is three tensors), their dtypes and shapes, and the exact dequantization in the association
the producing library uses. Formats and formulas: NVIDIA ModelOpt's unified Hugging Face export
(0.47) and the OCP Microscaling specification for E2M1 and E4M3.

Component arrays are NumPy arrays in the component's own dtype; dequantization works on any block of
rows, so callers can stream a matrix that would not fit into memory.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc import nvfp4
from edgecc.ir.types import DType

Array: TypeAlias = NDArray[Any]
IntShape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Component:
    """One tensor of an encoded weight.

    Attributes:
        dtype: Element type as stored.
        shape: Shape as stored (packed dimensions count bytes).
        rows: Whether axis 0 runs over the rows of the weight, so that a block of rows can be cut.
    """

    dtype: DType
    shape: IntShape
    rows: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes the tensor takes."""
        return self.dtype.nbytes(prod(self.shape))


class Encoding(ABC):
    """Layout of one weight. Subclasses are frozen dataclasses."""

    kind: ClassVar[str]

    @abstractmethod
    def components(self, shape: IntShape) -> dict[str, Component]:
        """Component tensors of a weight of logical `shape`, in storage order.

        Raises:
            ValueError: The encoding cannot hold this shape (odd or indivisible width, rank).
        """

    @abstractmethod
    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """Exact values of a block of rows, float32 (integers stay integers).

        Args:
            parts: Component arrays; those with `rows` hold the same block of rows.
        """

    @abstractmethod
    def __str__(self) -> str:
        """Spelling in IR text, for example `nvfp4<block=16>`."""

    def nbytes(self, shape: IntShape) -> int:
        """Bytes all components of a weight of logical `shape` take."""
        return sum(c.nbytes for c in self.components(shape).values())


@dataclass(frozen=True, slots=True)
class Dense(Encoding):
    """Plain elements of one dtype; one component, `weight`."""

    dtype: DType
    kind: ClassVar[str] = "dense"

    def components(self, shape: IntShape) -> dict[str, Component]:
        """One tensor of the weight's own shape."""
        return {"weight": Component(self.dtype, shape, rows=len(shape) > 0)}

    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """The elements; 16-bit floats widen exactly to float32, float64 stays."""
        weight = parts["weight"]
        if self.dtype.is_float and self.dtype is not DType.F64:
            return weight.astype(np.float32)
        return weight

    def __str__(self) -> str:
        return f"dense<{self.dtype.value}>"


@dataclass(frozen=True, slots=True)
class NVFP4(Encoding):
    """NVIDIA FP4: E2M1 codes, one E4M3 scale per block of columns, one float32 scale per weight.

    Components of a `[N, K]` weight (names as ModelOpt stores them):
        weight: u8 `[N, K/2]`, element 2j in the low nibble of byte j, 2j+1 in the high one.
        weight_scale: f8e4m3 `[N, K/block]`.
        weight_scale_2: f32 `[]`.
        input_scale: f32 `[]`, only with `input_scale=True`; calibrated activation scale, used when
            activations are quantized as well and ignored otherwise.

    Value: `e2m1(code) * (float32(weight_scale) * weight_scale_2)`, both products in float32 and in
    this association, which is how ModelOpt dequantizes.
    """

    block: int = 16
    input_scale: bool = False
    kind: ClassVar[str] = "nvfp4"

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be positive, found {self.block}")

    def components(self, shape: IntShape) -> dict[str, Component]:
        """See the class.

        Raises:
            ValueError: Not a matrix, or K is not a multiple of the block.
        """
        if len(shape) != 2 or shape[1] % self.block or shape[1] % 2:
            raise ValueError(
                f"nvfp4 needs a [N, K] weight with K even and a multiple of {self.block}, "
                f"found {list(shape)}"
            )
        rows, columns = shape
        parts = {
            "weight": Component(DType.U8, (rows, columns // 2)),
            "weight_scale": Component(DType.F8E4M3, (rows, columns // self.block)),
            "weight_scale_2": Component(DType.F32, (), rows=False),
        }
        if self.input_scale:
            parts["input_scale"] = Component(DType.F32, (), rows=False)
        return parts

    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """Exact float32 values `[rows, K]`."""
        return nvfp4.dequantize(parts["weight"], parts["weight_scale"], parts["weight_scale_2"])

    def __str__(self) -> str:
        extra = ", input_scale" if self.input_scale else ""
        return f"nvfp4<block={self.block}{extra}>"


@dataclass(frozen=True, slots=True)
class Int8Block(Encoding):
    """Unsigned 8-bit codes around 128 with one float32 scale per block of columns.

    Components of a `[N, K]` weight: `weight` u8 `[N, K]`, `weight_scale` f32 `[N, K/block]`.
    Value: `(code - 128) * scale`. With `code = 128 + 2 * e2m1` and `scale = block scale * global/2`
    it carries an NVFP4 weight bit for bit (doubling E2M1 gives integers, halving is exact).
    """

    block: int = 16
    kind: ClassVar[str] = "int8_block"

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be positive, found {self.block}")

    def components(self, shape: IntShape) -> dict[str, Component]:
        """See the class.

        Raises:
            ValueError: Not a matrix, or K is not a multiple of the block.
        """
        if len(shape) != 2 or shape[1] % self.block:
            raise ValueError(
                f"int8_block needs a [N, K] weight with K a multiple of {self.block}, "
                f"found {list(shape)}"
            )
        rows, columns = shape
        return {
            "weight": Component(DType.U8, (rows, columns)),
            "weight_scale": Component(DType.F32, (rows, columns // self.block)),
        }

    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """Exact float32 values `[rows, K]`."""
        codes = parts["weight"].astype(np.float32) - np.float32(128)
        rows, columns = codes.shape
        blocked = codes.reshape(rows, columns // self.block, self.block)
        return (blocked * parts["weight_scale"][:, :, None]).reshape(rows, columns)

    def __str__(self) -> str:
        return f"int8_block<block={self.block}>"


_ENCODING = re.compile(r"([a-z0-9_]+)(?:<(.*)>)?")


def parse_encoding(text: str) -> Encoding:
    """The inverse of `str(encoding)`.

    Raises:
        ValueError: No such encoding or argument; what is valid is listed.
    """
    match = _ENCODING.fullmatch(text.strip())
    kind, inner = (match[1], match[2] or "") if match else (text, "")
    arguments = [a.strip() for a in inner.split(",") if a.strip()]
    if kind == "dense" and len(arguments) == 1:
        try:
            return Dense(DType(arguments[0]))
        except ValueError:
            raise ValueError(f"unknown element type {arguments[0]!r} in {text!r}") from None
    flags = {a for a in arguments if "=" not in a}
    values = dict(a.split("=", 1) for a in arguments if "=" in a)
    block = values.pop("block", "")
    if block.isdecimal() and not values:
        if kind == "nvfp4" and flags <= {"input_scale"}:
            return NVFP4(int(block), input_scale=bool(flags))
        if kind == "int8_block" and not flags:
            return Int8Block(int(block))
    raise ValueError(
        f"unknown encoding {text!r}; valid: dense<TYPE>, nvfp4<block=N>, "
        "nvfp4<block=N, input_scale>, int8_block<block=N>"
    )
