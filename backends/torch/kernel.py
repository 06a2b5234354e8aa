"""What a kernel gets and gives: one node, ready to be computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from torch import Tensor

from edgecc.backends.torch.weights import TorchWeight
from edgecc.ir.ops import Attributes

A = TypeVar("A", bound=Attributes)


@dataclass(frozen=True, slots=True)
class Call(Generic[A]):
    """The operands of one node.

    Attributes:
        operands: Values, floating-point ones in the dtype of the executor.
        weights: Weights, those that are there of the optional ones.
        attrs: The attributes of the op.
        run: Evaluates another graph of the module: inputs to outputs, by position.
    """

    operands: tuple[Tensor, ...]
    weights: tuple[TorchWeight, ...]
    attrs: A
    run: Callable[[str, tuple[Tensor, ...]], tuple[Tensor, ...]]


Kernel: TypeAlias = Callable[[Call[Any]], Tensor | tuple[Tensor, ...]]
"""Computes an op. Operands are values and never written to."""
