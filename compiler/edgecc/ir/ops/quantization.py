"""Quantization of activations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from edgecc import fp8, nvfp4
from edgecc.ir.encodings import FP8, NVFP4, Array, Dense, parse_encoding
from edgecc.ir.ops.base import (
    Attributes,
    EvalContext,
    Op,
    Scope,
    Trait,
    TypeRuleError,
    WeightView,
    require,
    require_equal,
    require_float,
)
from edgecc.ir.types import DType, TensorType
from edgecc.ir.weights import Weight


@dataclass(frozen=True, slots=True)
class FakeQuantizeAttributes(Attributes):
    """`encoding`: what x is rounded to, `nvfp4<block=N>` or `fp8<tensor>`."""

    encoding: str


@functools.cache
def activation_encoding(text: str) -> NVFP4 | FP8:
    """The encoding that activations are rounded to.

    Raises:
        ValueError: It is none of the two that activations can have.
    """
    found = parse_encoding(text)
    if found == FP8() or (isinstance(found, NVFP4) and not found.input_scale):
        assert isinstance(found, FP8 | NVFP4)
        return found
    raise ValueError(f"activations are rounded to nvfp4<block=N> or fp8<tensor>, not to {found}")


class FakeQuantize(Op[FakeQuantizeAttributes]):
    """X rounded to what a packed encoding can hold, and widened again.

    Floating-point `[..., K]` and a calibrated scale g, dense f32 `[]`, give the type of x.

    - `nvfp4<block=N>`, two levels, blocks along the last axis, K a multiple of N:
      `s = e4m3(clamp(amax / (6 g), 2^-9, 448))`, 1 for a block of zeros, and
      `e2m1(x / (s g)) * (s g)`, saturating at 6. The scales of blocks come from the data.
    - `fp8<tensor>`, one level: `e4m3(clamp(x / g, -448, 448)) * g`.

    Rounding is to nearest, ties to even; a result of zero is +0. This is what NVIDIA ModelOpt 0.47
    calls fake quantization: a product with the result is a product of packed numbers, which devices
    with FP4 or FP8 arithmetic compute as such. NaN makes its block NaN in `nvfp4`, and stays itself
    in `fp8`.
    """

    name = "fake_quantize"
    attributes = FakeQuantizeAttributes
    operands = ("x",)
    weights = ("scale",)
    traits = Trait.ROWWISE | Trait.STEPWISE

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: FakeQuantizeAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of x."""
        (x,) = operands
        require_float("x", x)
        require(x.rank >= 1, f"x must have at least one axis, got {x}")
        try:
            encoding = activation_encoding(attrs.encoding)
        except ValueError as error:
            raise TypeRuleError(str(error)) from None
        if isinstance(encoding, NVFP4):
            width = x.shape[-1]
            require(
                isinstance(width, int) and width % encoding.block == 0,
                f"the last axis of {x} must be a multiple of {encoding.block}",
            )
        require_equal("shape of the scale", weights[0].shape, ())
        require_equal("encoding of the scale", weights[0].encoding, Dense(DType.F32))
        return (x,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: FakeQuantizeAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Quotients and products in the evaluation dtype."""
        scale = operands[0].dtype.type(weights[0].dense())
        encoding = activation_encoding(attrs.encoding)
        if isinstance(encoding, NVFP4):
            return (nvfp4.fake_quantize(operands[0], scale, encoding.block),)
        return (fp8.fake_quantize(operands[0], scale),)


OPS = (FakeQuantize(),)
