"""Integer encodings: 8 bits per row or per block, 4 bits per group of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edgecc import integers
from edgecc.ir.encodings.base import (
    Array,
    Component,
    Encoding,
    IntShape,
    require_matrix,
    require_positive,
    spell,
)
from edgecc.ir.encodings.floating import SCALE_DTYPES
from edgecc.ir.types import DType


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
        require_positive("block", self.block)

    def components(self, shape: IntShape) -> dict[str, Component]:
        """See the class.

        Raises:
            ValueError: Not a matrix, or K is not a multiple of the block.
        """
        rows, columns = require_matrix(self.kind, shape, columns=self.block)
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
        return spell(self.kind, f"block={self.block}")


@dataclass(frozen=True, slots=True)
class Int8(Encoding):
    """Signed 8-bit integers with one scale per row (ModelOpt W8A16).

    Components of a `[N, K]` weight: `weight` i8 `[N, K]`, `weight_scale` `[N]`, f32 in ModelOpt's
    files and bf16 in those of compressed-tensors. Value: `weight * float32(weight_scale)`.
    """

    scale_dtype: DType = DType.F32
    kind: ClassVar[str] = "int8"

    def __post_init__(self) -> None:
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scales cannot be {self.scale_dtype.value}")

    def components(self, shape: IntShape) -> dict[str, Component]:
        """See the class.

        Raises:
            ValueError: Not a matrix.
        """
        rows, columns = require_matrix(self.kind, shape)
        return {
            "weight": Component(DType.I8, (rows, columns)),
            "weight_scale": Component(self.scale_dtype, (rows,)),
        }

    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """Exact float32 values `[rows, K]`."""
        return integers.dequantize_int8(parts["weight"], parts["weight_scale"])

    def __str__(self) -> str:
        narrow = self.scale_dtype is not DType.F32
        return spell(self.kind, "channel", f"scale={self.scale_dtype.value}" if narrow else "")


@dataclass(frozen=True, slots=True)
class Int4(Encoding):
    """Signed 4-bit integers with one scale per group of columns (ModelOpt W4A16, AWQ, GPTQ).

    Components of a `[N, K]` weight:
        weight: u8 `[N/2, K]`: byte row r holds row 2r in the low and row 2r+1 in the high nibble,
            in two's complement.
        weight_scale: `[N, K/group]`, f32 in ModelOpt's files, f16 in those of AutoAWQ and GPTQ,
            bf16 in those of compressed-tensors.
        weight_zero_point: i8 `[N, K/group]`, only with `zero_point=True`. Producers count codes
            from 0 to 15; both codes and zero points are 8 less here.
        group_index: i32 `[K]`, only with `ordered=True`: the group of each column, where columns
            were quantized in an order of their own (`desc_act`, `actorder`).

    Value: `(weight - weight_zero_point) * float32(weight_scale)`, the product in float32.
    """

    group: int = 128
    zero_point: bool = False
    ordered: bool = False
    scale_dtype: DType = DType.F32
    kind: ClassVar[str] = "int4"

    def __post_init__(self) -> None:
        require_positive("group", self.group)
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scales cannot be {self.scale_dtype.value}")

    @property
    def is_symmetric(self) -> bool:
        """Whether a group is neighbouring columns with a scale and nothing else."""
        return not (self.zero_point or self.ordered)

    def components(self, shape: IntShape) -> dict[str, Component]:
        """See the class.

        Raises:
            ValueError: Not a matrix, N is odd, or K is not a multiple of the group.
        """
        rows, columns = require_matrix(self.kind, shape, columns=self.group, rows=2)
        groups = columns // self.group
        parts = {
            "weight": Component(DType.U8, (rows // 2, columns), row_group=2),
            "weight_scale": Component(self.scale_dtype, (rows, groups)),
        }
        if self.zero_point:
            parts["weight_zero_point"] = Component(DType.I8, (rows, groups))
        if self.ordered:
            parts["group_index"] = Component(DType.I32, (columns,), rows=False, below=groups)
        return parts

    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """Exact float32 values `[rows, K]`."""
        return integers.dequantize_int4(
            parts["weight"],
            parts["weight_scale"],
            parts.get("weight_zero_point"),
            parts.get("group_index"),
        )

    def __str__(self) -> str:
        narrow = self.scale_dtype is not DType.F32
        return spell(
            self.kind,
            f"group={self.group}",
            f"scale={self.scale_dtype.value}" if narrow else "",
            "zero_point" if self.zero_point else "",
            "ordered" if self.ordered else "",
        )
