"""Quantized floating-point encodings: NVFP4, MXFP4 and FP8, MXFP8 among the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm
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
ACTIVATION_SCALES = ("input_scale", "input_global_scale")
"""Components that scale what a layer reads; weights are the same without them."""

MX_BLOCK = 32
"""Columns that share a scale in the formats of the OCP Microscaling specification."""
DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True, slots=True)
class NVFP4(Encoding):
    """NVIDIA FP4: E2M1 codes, one E4M3 scale per block of columns, one float32 scale per weight.

    Components of a `[N, K]` weight (names as ModelOpt stores them):
        weight: u8 `[N, K/2]`, element 2j in the low nibble of byte j, 2j+1 in the high one.
        weight_scale: f8e4m3 `[N, K/block]`.
        weight_scale_2: f32 `[]`; with `divisor=True` it is `weight_global_scale`, what
            compressed-tensors stores.
        input_scale: f32 `[]`, only with `input_scale=True`; calibrated activation scale, used when
            activations are quantized as well and ignored otherwise. Its reciprocal,
            `input_global_scale`, with `divisor=True`.

    Value: `e2m1(code) * (float32(weight_scale) * weight_scale_2)`, both products in float32 and in
    this association, which is how ModelOpt dequantizes; `e2m1(code) * (float32(weight_scale) /
    weight_global_scale)` with `divisor=True`, as in compressed-tensors. The reciprocal of a global
    scale is not exact, so that neither form can carry the other.
    """

    block: int = 16
    input_scale: bool = False
    divisor: bool = False
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
            self.global_component: Component(DType.F32, (), rows=False),
        }
        if self.input_scale:
            name = "input_global_scale" if self.divisor else "input_scale"
            parts[name] = Component(DType.F32, (), rows=False)
        return parts

    @property
    def global_component(self) -> str:
        """Name of the component with the scale of the whole weight."""
        return "weight_global_scale" if self.divisor else "weight_scale_2"

    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """Exact float32 values `[rows, K]`."""
        return nvfp4.dequantize(
            parts["weight"],
            parts["weight_scale"],
            parts[self.global_component],
            divisor=self.divisor,
        )

    def __str__(self) -> str:
        return spell(
            self.kind,
            f"block={self.block}",
            "divisor" if self.divisor else "",
            "input_scale" if self.input_scale else "",
        )


@dataclass(frozen=True, slots=True)
class MXFP4(Encoding):
    """Microscaling FP4: E2M1 codes and one power of two per block of columns.

    Components of a `[N, K]` weight:
        weight: u8 `[N, K/2]`, element 2j in the low nibble of byte j, 2j+1 in the high one.
        weight_scale: f8e8m0 `[N, K/block]`, byte u stands for `2^(u - 127)`.

    Value: `e2m1(code) * 2^(u - 127)`, exact in bf16 as well as in float32. Producers: ModelOpt
    (`mxfp4`), compressed-tensors (`mxfp4-pack-quantized`), gpt-oss (`mxfp4`).
    """

    block: int = MX_BLOCK
    kind: ClassVar[str] = "mxfp4"

    def __post_init__(self) -> None:
        require_positive("block", self.block)

    def components(self, shape: IntShape) -> dict[str, Component]:
        """See the class.

        Raises:
            ValueError: Not a matrix, or K is odd or not a multiple of the block.
        """
        rows, columns = require_matrix(self.kind, shape, columns=lcm(self.block, 2))
        return {
            "weight": Component(DType.U8, (rows, columns // 2)),
            "weight_scale": Component(DType.F8E8M0, (rows, columns // self.block)),
        }

    def dequantize(self, parts: Mapping[str, Array]) -> Array:
        """Exact float32 values `[rows, K]`."""
        return nvfp4.dequantize_mx(parts["weight"], parts["weight_scale"])

    def __str__(self) -> str:
        return spell(self.kind, f"block={self.block}")


@dataclass(frozen=True, slots=True)
class FP8(Encoding):
    """8-bit E4M3 elements with one scale per weight, per row, or per block.

    Components of a `[N, K]` weight:
        weight: f8e4m3 `[N, K]`.
        weight_scale: `[]`, `[N]` or `[cdiv(N, R), cdiv(K, C)]` for scaling `tensor`, `channel` or
            `block` of R x C; the last blocks may be partial.
        input_scale: `[]`, only with `input_scale=True`; static activation scale, ignored unless
            activations are quantized as well.

    Scales are f32 in ModelOpt's files and bf16 in those of compressed-tensors: `scale_dtype`. Those
    of blocks may be powers of two, f8e8m0: with blocks of 1 x 32 that is MXFP8.
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
        powers = (DType.F8E8M0,) if self.scaling == "block" else ()
        if self.scale_dtype not in (*SCALE_DTYPES, *powers):
            raise ValueError(f"scales cannot be {self.scale_dtype.value}")

    @property
    def is_mx(self) -> bool:
        """Whether it is MXFP8: blocks of 32 columns of one row, scaled by powers of two."""
        return self == FP8("block", (1, MX_BLOCK), scale_dtype=DType.F8E8M0)

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
