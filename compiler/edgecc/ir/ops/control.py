"""Calling another graph of the module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgecc.ir.encodings import Array
from edgecc.ir.ops.base import (
    Attributes,
    EvalContext,
    Op,
    Scope,
    WeightView,
    require,
    require_equal,
)
from edgecc.ir.types import DimExpr, Shape, TensorType
from edgecc.ir.weights import Weight


@dataclass(frozen=True, slots=True)
class CallAttributes(Attributes):
    """`callee`: name of the called graph."""

    callee: str


class Call(Op[CallAttributes]):
    """Evaluates another graph: operands are its inputs, results its outputs, both by position.

    Dimension symbols of the callee that are whole axes of its inputs are bound by the operands, so
    one graph can be called with different numbers of rows. Calls never form a cycle.
    """

    name = "call"
    attributes = CallAttributes
    operands = ("inputs",)
    results = ("outputs",)
    variadic = True

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: CallAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The callee's output types under the binding of its symbols."""
        require(attrs.callee in scope, f"no graph @{attrs.callee}")
        callee = scope[attrs.callee]
        require_equal("number of inputs", len(operands), len(callee.inputs))
        binding: dict[str, DimExpr | int] = {}
        for found, expected in zip(operands, callee.inputs, strict=True):
            require_equal(f"dtype of an input of @{attrs.callee}", found.dtype, expected.dtype)
            require_equal(f"rank of an input of @{attrs.callee}", found.rank, expected.rank)
            _bind(found.shape, expected.shape, binding)
        for found, expected in zip(operands, callee.inputs, strict=True):
            require_equal(
                f"shape of an input of @{attrs.callee}",
                found.shape,
                _apply(expected.shape, binding),
            )
        return tuple(TensorType(o.dtype, _apply(o.shape, binding)) for o in callee.outputs)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: CallAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Evaluate the callee."""
        return ctx.call(attrs.callee, operands)


def _bind(found: Shape, expected: Shape, binding: dict[str, DimExpr | int]) -> None:
    for have, want in zip(found, expected, strict=True):
        if isinstance(want, DimExpr) and len(want.terms) == 1 and want.terms[0][1] == 1:
            size = have - want.constant
            require(not isinstance(size, int) or size >= 0, f"an axis of {have} is not {want}")
            binding.setdefault(want.terms[0][0], size)


def _apply(shape: Shape, binding: dict[str, DimExpr | int]) -> Shape:
    result: list[DimExpr | int] = []
    for dim in shape:
        if not isinstance(dim, DimExpr):
            result.append(dim)
            continue
        total: DimExpr | int = dim.constant
        for symbol, factor in dim.terms:
            require(symbol in binding, f"symbol {symbol} of the callee is bound by no input")
            total = total + binding[symbol] * factor
        result.append(total)
    return tuple(result)


OPS = (Call(),)
