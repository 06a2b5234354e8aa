"""Elementwise arithmetic."""

from __future__ import annotations

import math
from abc import abstractmethod
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
    TypeRuleError,
    WeightView,
    require,
    require_float,
    round_to,
)
from edgecc.ir.types import DType, TensorType
from edgecc.ir.weights import Weight

CASTS = (DType.F64, DType.F32, DType.BF16, DType.F16)


GELUS = ("none", "tanh")
"""Forms of GELU: exact, by the error function; and approximate, by a hyperbolic tangent."""


@dataclass(frozen=True, slots=True)
class GeluAttributes(Attributes):
    """`approximate`: `none` or `tanh`."""

    approximate: str = "none"


@dataclass(frozen=True, slots=True)
class CastAttributes(Attributes):
    """`dtype`: element type of the result: `f64`, `f32`, `bf16` or `f16`."""

    dtype: str


def sigmoid(x: Array) -> Array:
    """`1 / (1 + exp(-x))` without overflow for large negative x."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def silu(x: Array) -> Array:
    """`x * sigmoid(x)`."""
    return x * sigmoid(x)


def erf(x: Array) -> Array:
    """The error function, correctly rounded in float64 but for the last bit or two."""
    values = (math.erf(v) for v in x.ravel().tolist())
    return np.fromiter(values, np.float64, x.size).reshape(x.shape).astype(x.dtype)


def gelu(x: Array, approximate: str) -> Array:
    """`x * P(X <= x)` of a normal X, or its approximation by a hyperbolic tangent."""
    half, one = x.dtype.type(0.5), x.dtype.type(1)
    if approximate == "tanh":
        inner = x.dtype.type(math.sqrt(2 / math.pi)) * (x + x.dtype.type(0.044715) * x * x * x)
        share: Array = one + np.tanh(inner)
    else:
        share = one + erf(x * x.dtype.type(math.sqrt(0.5)))
    y: Array = half * x * share
    return y


class _Elementwise(Op[Attributes]):
    """Operands of one type; the result has that type."""

    traits = Trait.ELEMENTWISE

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The common operand type."""
        require_float(self.operands[0], operands[0])
        require(
            all(o == operands[0] for o in operands),
            f"operands must have one type, got {', '.join(map(str, operands))}",
        )
        return (operands[0],)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Apply `compute`."""
        return (self.compute(*operands),)

    @abstractmethod
    def compute(self, *operands: Array) -> Array:
        """The arithmetic itself."""


class Add(_Elementwise):
    """`a + b`, equal shapes."""

    name = "add"
    operands = ("a", "b")
    traits = Trait.ELEMENTWISE | Trait.COMMUTATIVE

    def compute(self, *operands: Array) -> Array:
        """Sum."""
        return operands[0] + operands[1]


class Sub(_Elementwise):
    """`a - b`, equal shapes."""

    name = "sub"
    operands = ("a", "b")

    def compute(self, *operands: Array) -> Array:
        """Difference."""
        return operands[0] - operands[1]


class Mul(_Elementwise):
    """`a * b`, equal shapes."""

    name = "mul"
    operands = ("a", "b")
    traits = Trait.ELEMENTWISE | Trait.COMMUTATIVE

    def compute(self, *operands: Array) -> Array:
        """Product."""
        return operands[0] * operands[1]


class Silu(_Elementwise):
    """`x * sigmoid(x)`."""

    name = "silu"
    operands = ("x",)

    def compute(self, *operands: Array) -> Array:
        """Swish with slope 1."""
        return silu(operands[0])


class Sigmoid(_Elementwise):
    """`1 / (1 + exp(-x))`."""

    name = "sigmoid"
    operands = ("x",)

    def compute(self, *operands: Array) -> Array:
        """Logistic function."""
        return sigmoid(operands[0])


class Tanh(_Elementwise):
    """`(exp(x) - exp(-x)) / (exp(x) + exp(-x))`, the hyperbolic tangent."""

    name = "tanh"
    operands = ("x",)

    def compute(self, *operands: Array) -> Array:
        """`numpy.tanh`."""
        y: Array = np.tanh(operands[0])
        return y


class Swiglu(_Elementwise):
    """`silu(gate) * up`, the activation of gated MLPs."""

    name = "swiglu"
    operands = ("gate", "up")

    def compute(self, *operands: Array) -> Array:
        """Swish of the gate times up."""
        return silu(operands[0]) * operands[1]


class Gelu(Op[GeluAttributes]):
    """Gaussian error linear unit: `x/2 * (1 + erf(x / sqrt(2)))`.

    With `approximate = "tanh"`: `x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))`. The two differ
    by up to 5e-4, so a model needs the one it was trained with.
    """

    name = "gelu"
    attributes = GeluAttributes
    operands = ("x",)
    traits = Trait.ELEMENTWISE

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: GeluAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of x."""
        require_float("x", operands[0])
        require(
            attrs.approximate in GELUS,
            f"approximate must be one of {', '.join(GELUS)}, got {attrs.approximate!r}",
        )
        return (operands[0],)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: GeluAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """See `gelu`."""
        return (gelu(operands[0], attrs.approximate),)


class Cast(Op[CastAttributes]):
    """X in another floating-point type, rounded to nearest, ties to even.

    Values too large for f16 become infinite.
    """

    name = "cast"
    attributes = CastAttributes
    operands = ("x",)
    traits = Trait.ELEMENTWISE

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: CastAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The shape of x in the wanted type."""
        (x,) = operands
        require_float("x", x)
        found = next((d for d in CASTS if d.value == attrs.dtype), None)
        if found is None:
            valid = ", ".join(d.value for d in CASTS)
            raise TypeRuleError(f"dtype must be one of {valid}, got {attrs.dtype!r}")
        return (TensorType(found, x.shape),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: CastAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Rounded, and held in the evaluation dtype."""
        return (round_to(operands[0], DType(attrs.dtype)),)


OPS = (Add(), Cast(), Gelu(), Mul(), Silu(), Sigmoid(), Sub(), Swiglu(), Tanh())
