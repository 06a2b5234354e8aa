"""Quantized floating-point encodings: NVFP4 and FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from edgecc import fp8, nvfp4
from edgecc.ir.encodings.base import (
    Array,
    Component,
    Encoding,
    IntShape,
    require_matrix,
    require_positive,
    spell,
)
from edgecc.ir.types import DType

SCALINGS = ("tensor", "channel", "block")
SCALE_DTYPES = (DType.F32, DType.BF16, DType.F16)
DEFAULT_BLOCK = (128, 128)


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
        require_positive("block", self.block)

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
        return spell(self.kind, f"block={self.block}", "input_scale" if self.input_scale else "")


@dataclass(frozen=True, slots=True)
class FP8(Encoding):
    """8-bit E4M3 elements with one scale per weight, per row, or per block.

    Components of a `[N, K]` weight:
        weight: f8e4m3 `[N, K]`.
        weight_scale: `[]`, `[N]` or `[cdiv(N, R), cdiv(K, C)]` for scaling `tensor`, `channel` or
            `block` of R x C; the last blocks may be partial.
        input_scale: `[]`, only with `input_scale=True`; static activation scale, ignored unless
            activations are quantized as well.

    Scales are f32 in ModelOpt's files and bf16 in those of compressed-tensors: `scale_dtype`.
    Value: `float32(weight) * float32(weight_scale)`, the product in float32.
    """

    scaling: str = "tensor"
    block: tuple[int, int] = DEFAULT_BLOCK
    input_scale: bool = False
    scale_dtype: DType = DType.F32
    kind: ClassVar[str] = "fp8"

    def __post_init__(self) -> None:
        if self.scaling not in SCALINGS:
            raise ValueError(f"scaling must be one of {SCALINGS}, found {self.scaling!r}")
        if self.scaling != "block" and self.block != DEFAULT_BLOCK:
            raise ValueError(f"scaling {self.scaling} has no block, found {self.block}")
        for size in self.block:
            require_positive("block", size)
        if self.scale_dtype not in SCALE_DTYPES:
            raise ValueError(f"scales cannot be {self.scale_dtype.value}")

    def components(self, shape: IntShape) -> dict[str, Component]:
        """See the class.

        Raises:
            ValueError: Not a matrix.
        """
        rows, columns = require_matrix(self.kind, shape)
        high, wide = self.block
        scales = {
            "tensor": Component(self.scale_dtype, (), rows=False),
            "channel": Component(self.scale_dtype, (rows,)),
            "block": Component(
                self.scale_dtype, (-(-rows // high), -(-columns // wide)), row_group=high
            ),
        }
        parts = {
            "weight": Component(DType.F8E4M3, (rows, columns)),
            "weight_scale": scales[self.scaling],
        }
        if self.input_scale:
            parts["input_scale"] = Component(self.scale_dtype, (), rows=False)
        return parts

    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """Exact float32 values `[rows, K]`."""
        block = self.block if self.scaling == "block" else None
        return fp8.dequantize(parts["weight"], parts["weight_scale"], block)

    def __str__(self) -> str:
        blocks = f"block={self.block[0]}x{self.block[1]}"
        return spell(
            self.kind,
            blocks if self.scaling == "block" else self.scaling,
            "" if self.scale_dtype is DType.F32 else f"scale={self.scale_dtype.value}",
            "input_scale" if self.input_scale else "",
        )
