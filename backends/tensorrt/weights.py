"""Weights as constants of a network, in the narrowest form that keeps their values.

Each packed encoding is widened by dequantize layers whose scales are exact in 16 bits, and leaves
a float32 factor for the product:

- `nvfp4`: E2M1 codes, block scales widened from E4M3 with a scale of one; the global scale is left.
- `int8_block` made from NVFP4: signed codes (twice E2M1), half the block scales in 16 bits; the
  global scale is left.
- `fp8` per tensor or channel, `int8` per channel: a scale of one; their own scales are left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from edgecc import nvfp4
from edgecc.backends.base import Array
from edgecc.backends.tensorrt.emitter import NUMPY_16, Emitter, Tensor
from edgecc.errors import LegalizeError
from edgecc.ir.encodings import FP8, NVFP4, Dense, Encoding, Int8, Int8Block
from edgecc.ir.types import DType
from edgecc.ir.weights import Derived

Matrix: TypeAlias = tuple[Tensor, Tensor | None]
"""`[N, K]` in the type of the product, and the factor left for it."""

Form: TypeAlias = Callable[[Emitter, str, DType, DType], Matrix]
"""From a symbol, the type that dequantize layers give, and that of the matrix."""


def table(e: Emitter, symbol: str) -> Tensor:
    """A dense weight as it is stored.

    Raises:
        LegalizeError: It is packed.
    """
    symbol = e.module.weights.resolve(symbol)
    weight = e.module.weights[symbol]
    encoding = weight.encoding
    if not isinstance(encoding, Dense):
        raise _refused(e, symbol, encoding)

    def make() -> Tensor:
        data = e.module.weights.read(symbol)["weight"]
        _note(e, symbol, encoding.dtype.value, data)
        return e.data(data, encoding.dtype, weight.shape)

    return e.once(("table", symbol), make)


def matrix(e: Emitter, symbol: str, dtype: DType, *, packed: bool = False) -> Matrix:
    """The matrix of a linear layer.

    Args:
        e: Emitter of the network.
        symbol: The weight.
        dtype: What the product is computed in.
        packed: Whether it is a product of packed numbers, with quantized activations: then the
            dequantize layers give its type, with no cast between.

    Raises:
        LegalizeError: There is no form for its encoding.
    """
    symbol = e.module.weights.resolve(symbol)
    encoding = e.module.weights[symbol].encoding
    form = _FORMS.get(encoding.kind)
    if form is None:
        raise _refused(e, symbol, encoding)
    inner = dtype if packed else _narrow(dtype)
    found: Matrix = e.once(("matrix", symbol, inner, dtype), lambda: form(e, symbol, inner, dtype))
    return found


def _refused(e: Emitter, symbol: str, encoding: Encoding) -> LegalizeError:
    return LegalizeError(
        "tensorrt/encoding",
        f"{encoding} has no form in TensorRT",
        where=f"weight @{symbol}: {e.module.weights.origin(symbol)}",
        help="run lower-encodings before lowering",
    )


def _note(e: Emitter, symbol: str, form: str, *arrays: Array) -> None:
    e.forms[symbol] = (form, sum(a.nbytes for a in arrays))


def _narrow(dtype: DType) -> DType:
    """The type that scales are held in: 16 bits also for products in float32."""
    return dtype if dtype in NUMPY_16 else DType.BF16


def _dequantize(e: Emitter, codes: Tensor, scale: Tensor, dtype: DType) -> Tensor:
    return e.out("dequantize", e.network.add_dequantize(codes, scale, e.type(dtype)))


def _scalar(e: Emitter, value: Array, dtype: DType) -> Tensor:
    return e.constant(np.asarray(value).astype(dtype.numpy).reshape(()))


def _factor(e: Emitter, scale: Array) -> Tensor:
    """A float32 factor of the product, for all or one for each column."""
    return e.constant(np.atleast_1d(scale.astype(np.float32))[None, :])


def _dense(e: Emitter, symbol: str, inner: DType, dtype: DType) -> Matrix:
    return e.cast(table(e, symbol), dtype), None


def _nvfp4(e: Emitter, symbol: str, inner: DType, dtype: DType) -> Matrix:
    weight = e.module.weights[symbol]
    parts = e.module.weights.read(symbol)
    codes, scale = parts["weight"], parts["weight_scale"]
    _note(e, symbol, "nvfp4", codes, scale)
    scales = e.data(scale, DType.F8E4M3, scale.shape)
    widened = _dequantize(e, scales, _scalar(e, np.array(1), inner), inner)
    values = _dequantize(e, e.data(codes, DType.F4E2M1, weight.shape), widened, inner)
    return e.cast(values, dtype), _factor(e, parts["weight_scale_2"])


def _int8_block(e: Emitter, symbol: str, inner: DType, dtype: DType) -> Matrix:
    weights = e.module.weights
    weight = weights[symbol]
    source = weight.source
    base = weights.resolve(source.inputs[0]) if isinstance(source, Derived) else ""
    if not base or not isinstance(weights[base].encoding, NVFP4):
        raise _refused(e, symbol, weight.encoding)
    parts = weights.read(base)
    codes = (2 * nvfp4.unpack_e2m1(parts["weight"])).astype(np.int8)
    scale = (parts["weight_scale"].astype(np.float32) / 2).astype(inner.numpy)
    _note(e, symbol, f"int8, {inner.value} scales of 16", codes, scale)
    values = _dequantize(
        e, e.data(codes, DType.I8, weight.shape), e.data(scale, inner, scale.shape), inner
    )
    return e.cast(values, dtype), _factor(e, parts["weight_scale_2"])


def _unit_scaled(e: Emitter, symbol: str, inner: DType, dtype: DType) -> Matrix:
    """8-bit elements, exact in 16 bits; the scale of the weight or of each row is left."""
    weight = e.module.weights[symbol]
    parts = e.module.weights.read(symbol)
    codes, scale = parts["weight"], parts["weight_scale"]
    if isinstance(weight.encoding, FP8) and weight.encoding.scaling == "block":
        raise _refused(e, symbol, weight.encoding)
    _note(e, symbol, weight.encoding.kind, codes, scale)
    kind = DType.F8E4M3 if isinstance(weight.encoding, FP8) else DType.I8
    one = _scalar(e, np.array(1), inner)
    values = _dequantize(e, e.data(codes, kind, weight.shape), one, inner)
    return e.cast(values, dtype), _factor(e, np.asarray(scale))


_FORMS: Mapping[str, Form] = {
    Dense.kind: _dense,
    NVFP4.kind: _nvfp4,
    Int8Block.kind: _int8_block,
    FP8.kind: _unit_scaled,
    Int8.kind: _unit_scaled,
}


def as_json(forms: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Stored form and bytes of each weight, for the manifest."""
    return {s: {"precision": form, "bytes": nbytes} for s, (form, nbytes) in forms.items()}
