"""Normalizations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgecc.ir.encodings import Array
from edgecc.ir.ops.base import (
    Attributes,
    EvalContext,
    Op,
    Scope,
    Trait,
    WeightView,
    require,
    require_equal,
    require_float,
)
from edgecc.ir.types import TensorType
from edgecc.ir.weights import Weight


@dataclass(frozen=True, slots=True)
class RmsNormAttributes(Attributes):
    """`eps`: added to the mean square. `groups`: how many equal groups the last axis has."""

    eps: float
    groups: int = 1


@dataclass(frozen=True, slots=True)
class AddRmsNormAttributes(Attributes):
    """`eps`: added to the mean square."""

    eps: float


@dataclass(frozen=True, slots=True)
class LayerNormAttributes(Attributes):
    """`eps`: added to the variance."""

    eps: float


class RmsNorm(Op[RmsNormAttributes]):
    """`x / sqrt(mean(x^2) + eps) * w` over the last axis, or over each of its `groups`.

    f32 `[..., H]` and a weight `[H / groups]`. With `groups` = heads it is the per-head query and
    key norm of Qwen3: one weight of head_dim shared by all heads.
    """

    name = "rms_norm"
    attributes = RmsNormAttributes
    operands = ("x",)
    weights = ("weight",)
    traits = Trait.ROWWISE

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: RmsNormAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of x."""
        (x,) = operands
        require_float("x", x)
        width = x.shape[-1] if x.rank else 0
        require(
            isinstance(width, int) and width > 0 < attrs.groups and width % attrs.groups == 0,
            f"the last axis of {x} must divide into {attrs.groups} groups",
        )
        require(attrs.eps > 0, f"eps must be positive, got {attrs.eps}")
        require_equal("shape of the weight", weights[0].shape, (int(str(width)) // attrs.groups,))
        return (x,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: RmsNormAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Mean square in the evaluation dtype."""
        x = operands[0]
        grouped = x.reshape(*x.shape[:-1], attrs.groups, x.shape[-1] // attrs.groups)
        return (_normalize(grouped, weights[0].dense(), attrs.eps).reshape(x.shape),)


class AddRmsNorm(Op[AddRmsNormAttributes]):
    """Residual addition and the normalization of the sum: made by `fuse-residual-norm`.

    `sum = a + b` and `normed = sum / sqrt(mean(sum^2) + eps) * w` over the last axis: two operands
    f32 `[..., H]` and a weight `[H]`.
    """

    name = "add_rms_norm"
    attributes = AddRmsNormAttributes
    operands = ("a", "b")
    weights = ("weight",)
    results = ("normed", "sum")
    traits = Trait.ROWWISE | Trait.COMMUTATIVE

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: AddRmsNormAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The common operand type, twice."""
        a, b = operands
        require_float("a", a)
        require(a == b, f"operands must have one type, got {a}, {b}")
        require(a.rank >= 1, f"a must have at least one axis, got {a}")
        require(attrs.eps > 0, f"eps must be positive, got {attrs.eps}")
        require_equal("shape of the weight", weights[0].shape, a.shape[-1:])
        return (a, a)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: AddRmsNormAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Like `add`, then `rms_norm`."""
        total = operands[0] + operands[1]
        return _normalize(total, weights[0].dense(), attrs.eps), total


class LayerNorm(Op[LayerNormAttributes]):
    """`(x - mean) / sqrt(variance + eps) * w + bias` over the last axis.

    F32 `[..., H]`, a weight and a bias `[H]`; the variance is that of the row itself (divided by
    H).
    """

    name = "layer_norm"
    attributes = LayerNormAttributes
    operands = ("x",)
    weights = ("weight", "bias")
    traits = Trait.ROWWISE

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: LayerNormAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of x."""
        (x,) = operands
        require_float("x", x)
        width = x.shape[-1] if x.rank else 0
        require(
            isinstance(width, int) and width > 0,
            f"the last axis of {x} must have a known size above 0",
        )
        require(attrs.eps > 0, f"eps must be positive, got {attrs.eps}")
        require_equal("shape of the weight", weights[0].shape, x.shape[-1:])
        require_equal("shape of the bias", weights[1].shape, x.shape[-1:])
        return (x,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: LayerNormAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Mean and variance in the evaluation dtype."""
        x = np.ascontiguousarray(operands[0])
        centered = x - np.mean(x, axis=-1, keepdims=True)
        variance = np.mean(np.square(centered), axis=-1, keepdims=True)
        normed = centered / np.sqrt(variance + x.dtype.type(attrs.eps))
        return (normed * weights[0].dense() + weights[1].dense(),)


def _normalize(x: Array, weight: Array, eps: float) -> Array:
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    return x / np.sqrt(mean + x.dtype.type(eps)) * weight  # type: ignore[no-any-return]


OPS = (RmsNorm(), AddRmsNorm(), LayerNorm())
