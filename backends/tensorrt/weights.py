"""Layers that widen weights, in the narrowest form that keeps their values.

Which arrays they take is said by `operands.py`; whether those are constants or inputs of the
network, by the emitter.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from edgecc.backends.tensorrt.emitter import Emitter, Tensor
from edgecc.backends.tensorrt.operands import Matrix, narrow, table_operand
from edgecc.backends.tensorrt.operands import matrix as matrix_operands
from edgecc.ir.types import DType

Product: TypeAlias = tuple[Tensor, Tensor | None]
"""`[N, K]` in the type of the product, and the factor left for it."""


def table(e: Emitter, symbol: str, *, bind: bool = True) -> Tensor:
    """A dense weight as it is stored.

    Args:
        e: Emitter of the network.
        symbol: The weight.
        bind: False where the builder has to know the values.

    Raises:
        LegalizeError: It is packed.
    """
    operand = table_operand(e.module, symbol)
    return e.weight(symbol, operand.dtype.value, operand, bind=bind)


def matrix(e: Emitter, symbol: str, dtype: DType) -> Product:
    """The matrix of a linear layer.

    Args:
        e: Emitter of the network.
        symbol: The weight.
        dtype: What the product is computed in.

    Raises:
        LegalizeError: There is no form for its encoding.
    """
    symbol = e.module.weights.resolve(symbol)
    found: Product = e.once(("matrix", symbol, dtype), lambda: _widened(e, symbol, dtype))
    return found


def _widened(e: Emitter, symbol: str, dtype: DType) -> Product:
    made = matrix_operands(e.module, symbol, dtype)
    inner = narrow(dtype)
    elements, factor = _tensor(e, symbol, made, "elements"), _tensor(e, symbol, made, "factor")
    if made.factor is None:  # dense
        return e.cast(elements, dtype), None
    scale = _one(e, inner)
    if made.scale is not None:
        scale = _tensor(e, symbol, made, "scale")
        if made.scale.dtype is not inner:
            scale = _dequantize(e, scale, _one(e, inner), inner)
    return e.cast(_dequantize(e, elements, scale, inner), dtype), factor


def _tensor(e: Emitter, symbol: str, made: Matrix, part: str) -> Tensor | None:
    operand = getattr(made, part)
    return None if operand is None else e.weight(symbol, made.precision, operand)


def _one(e: Emitter, dtype: DType) -> Tensor:
    return e.constant(np.array(1, dtype=dtype.numpy))


def _dequantize(e: Emitter, codes: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    return e.out("dequantize", e.network.add_dequantize(codes, scale, e.type(dtype)))
