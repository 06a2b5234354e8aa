"""Values that depend on no input."""

from __future__ import annotations

from collections.abc import Sequence

from edgecc.ir.encodings import Array, Dense
from edgecc.ir.ops.base import Attributes, EvalContext, Op, Scope, WeightView
from edgecc.ir.types import DType, TensorType
from edgecc.ir.weights import Weight


class Constant(Op[Attributes]):
    """The values of a weight, of any encoding and rank: made by `fold-constants`.

    The result has the weight's shape. It is f32, or the weight's own element type if those are
    integers or truth values.
    """

    name = "constant"
    weights = ("value",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """Shape of the weight, element type of its values."""
        encoding = weights[0].encoding
        dtype = encoding.dtype if isinstance(encoding, Dense) else DType.F32
        return (TensorType(DType.F32 if dtype.is_float else dtype, weights[0].shape),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Dequantized."""
        return (weights[0].dense(),)


OPS = (Constant(),)
