"""Which arrays the layers of a graph take for its weights, and what those are made of.

Known from the IR alone, before any network exists: it decides which weights are inputs and which
are constants, and what the weight file has to hold. Each packed encoding is widened by dequantize
layers whose scales are exact in 16 bits, and leaves a float32 factor for the product:

- `nvfp4`: E2M1 codes, block scales in E4M3; the global scale is left, the reciprocal of a divisor.
- `int8_block` made from NVFP4: signed codes (twice E2M1), half the block scales in 16 bits; the
  global scale is left.
- `fp8` per tensor or channel, `int8` per channel: elements; their own scales are left.
- `int4` without zero points: elements and the scales of groups in float32: no 16-bit type holds the
  product, so it is in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from edgecc.backends.base import Array
from edgecc.backends.layouts import Parts
from edgecc.backends.stored_weights import layout_of, stored_symbol
from edgecc.backends.tensorrt import forms
from edgecc.errors import LegalizeError
from edgecc.ir.core import Graph, Module, Node
from edgecc.ir.encodings import ACTIVATION_SCALES, FP8, NVFP4, Dense, Int4, Int8, Int8Block
from edgecc.ir.types import DType
from edgecc.ir.weights import Derived, WeightTable

NARROW = (DType.BF16, DType.F16)


@dataclass(frozen=True, slots=True)
class Operand:
    """One array that a layer takes: a constant of the network, or an input of it.

    Attributes:
        form: How it is made, one of `forms.FORMS`.
        symbol: The weight it is made of, as the weight file has it.
        components: Of that weight.
        dtype: Element type in the network.
        shape: In elements.
        block: Rows and columns that share a scale, of `values-fp8-block`.
    """

    form: str
    symbol: str
    components: tuple[str, ...]
    dtype: DType
    shape: tuple[int, ...]
    block: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.nbytes(prod(self.shape))

    def array(self, parts: Parts) -> Array:
        """The elements, two a byte for 4-bit types; a view where they lie as they are stored."""
        chosen = {c: parts[c] for c in self.components}
        if self.form == "stored":
            return chosen[self.components[0]]
        made = [a for _, a in forms.row_blocks(self.form, chosen, self.dtype.value, self.block)]
        return made[0] if len(made) == 1 else np.concatenate(made)


@dataclass(frozen=True, slots=True)
class Matrix:
    """What the matrix of a linear layer is in a network.

    Attributes:
        precision: For people.
        elements: `[N, K]`.
        scale: Of blocks of the elements, or None.
        factor: Of the product, or None.
    """

    precision: str
    elements: Operand
    scale: Operand | None = None
    factor: Operand | None = None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """All of them."""
        return tuple(o for o in (self.elements, self.scale, self.factor) if o is not None)


def table_operand(module: Module, symbol: str) -> Operand:
    """The array of a dense weight.

    Raises:
        LegalizeError: It is packed.
    """
    table = module.weights
    symbol = table.resolve(symbol)
    weight, base = table[symbol], stored_symbol(table, symbol)
    if not isinstance(weight.encoding, Dense):
        raise refused(module, symbol)
    dtype = weight.encoding.dtype
    if base == symbol:
        return Operand("stored", symbol, ("weight",), dtype, weight.shape)
    encoding = table[base].encoding
    form = f"values-{layout_of(encoding)}"
    block = encoding.block if isinstance(encoding, FP8) and encoding.scaling == "block" else ()
    every = encoding.components(table[base].shape)
    components = tuple(name for name in every if name not in ACTIVATION_SCALES)
    return Operand(form, base, components, dtype, weight.shape, block)


def matrix(module: Module, symbol: str, dtype: DType) -> Matrix:
    """The arrays of the matrix of a linear layer.

    Args:
        module: Owner of the weight.
        symbol: The weight.
        dtype: What the product is computed in.

    Raises:
        LegalizeError: There is no form for its encoding.
    """
    symbol = module.weights.resolve(symbol)
    make = _MATRICES.get(module.weights[symbol].encoding.kind)
    if make is None:
        raise refused(module, symbol)
    return make(module, symbol, narrow(dtype))


def graph_operands(module: Module, graph: Graph) -> Iterator[Operand]:
    """Arrays that may be inputs of a network. The builder computes with those of `constant`."""
    for node in graph.nodes:
        if node.op.name != "constant":
            yield from _node_operands(module, node)


def _node_operands(module: Module, node: Node) -> Iterator[Operand]:
    for index, symbol in enumerate(node.weights):
        if node.op.name == "linear" and index == 0:
            yield from matrix(module, symbol, node.result.type.dtype).operands
        else:
            yield table_operand(module, symbol)


def product_type(module: Module, symbol: str, dtype: DType) -> DType:
    """The type that a linear layer multiplies in, given that of its result."""
    encoding = module.weights[module.weights.resolve(symbol)].encoding
    return DType.F32 if isinstance(encoding, Int4) else dtype


def narrow(dtype: DType) -> DType:
    """The type that scales are held in: 16 bits also for products in float32."""
    return dtype if dtype in NARROW else DType.BF16


def refused(module: Module, symbol: str) -> LegalizeError:
    """The error about an encoding that no layer reads."""
    return LegalizeError(
        "tensorrt/encoding",
        f"{module.weights[symbol].encoding} has no form in TensorRT",
        where=f"weight @{symbol}: {module.weights.origin(symbol)}",
        help="run lower-encodings before lowering",
    )


def _dense(module: Module, symbol: str, inner: DType) -> Matrix:
    elements = table_operand(module, symbol)
    return Matrix(elements.dtype.value, elements)


def _nvfp4(module: Module, symbol: str, inner: DType) -> Matrix:
    rows, columns = module.weights[symbol].shape
    scales = (rows, columns // _block(module.weights, symbol))
    return Matrix(
        "nvfp4",
        Operand("stored", symbol, ("weight",), DType.F4E2M1, (rows, columns)),
        Operand("stored", symbol, ("weight_scale",), DType.F8E4M3, scales),
        _global_factor(module.weights, symbol),
    )


def _int8_block(module: Module, symbol: str, inner: DType) -> Matrix:
    table = module.weights
    source = table[symbol].source
    base = table.resolve(source.inputs[0]) if isinstance(source, Derived) else ""
    if not base or not isinstance(table[base].encoding, NVFP4):
        raise refused(module, symbol)
    rows, columns = table[symbol].shape
    block = _block(table, base)
    return Matrix(
        f"int8, {inner.value} scales of {block}",
        Operand("doubled", base, ("weight",), DType.I8, (rows, columns)),
        Operand("halved", base, ("weight_scale",), inner, (rows, columns // block)),
        _global_factor(table, base),
    )


def _unit_scaled(module: Module, symbol: str, inner: DType) -> Matrix:
    """8-bit elements, exact in 16 bits; the scale of the weight or of each row is left."""
    weight = module.weights[symbol]
    encoding = weight.encoding
    if isinstance(encoding, FP8) and encoding.scaling == "block":
        raise refused(module, symbol)
    scale = encoding.components(weight.shape)["weight_scale"]
    kind = DType.F8E4M3 if isinstance(encoding, FP8) else DType.I8
    return Matrix(
        encoding.kind,
        Operand("stored", symbol, ("weight",), kind, weight.shape),
        factor=_factor(symbol, "weight_scale", prod(scale.shape)),
    )


def _int4(module: Module, symbol: str, inner: DType) -> Matrix:
    rows, columns = module.weights[symbol].shape
    encoding = module.weights[symbol].encoding
    assert isinstance(encoding, Int4)
    if columns % 2 or not encoding.is_symmetric:
        raise refused(module, symbol)
    groups = (rows, columns // encoding.group)
    form = "stored" if encoding.scale_dtype is DType.F32 else "widened"
    return Matrix(
        f"int4, f32 scales of {encoding.group}",
        Operand("int4", symbol, ("weight",), DType.I4, (rows, columns)),
        Operand(form, symbol, ("weight_scale",), DType.F32, groups),
    )


def _global_factor(table: WeightTable, symbol: str) -> Operand:
    """What the global scale of NVFP4 multiplies the product by."""
    encoding = table[symbol].encoding
    assert isinstance(encoding, NVFP4)
    factor = _factor(symbol, encoding.global_component, 1)
    return replace(factor, form="reciprocal") if encoding.divisor else factor


def _factor(symbol: str, component: str, count: int) -> Operand:
    return Operand("factor", symbol, (component,), DType.F32, (1, count))


def _block(table: WeightTable, symbol: str) -> int:
    encoding = table[symbol].encoding
    assert isinstance(encoding, NVFP4)
    return encoding.block


_MATRICES: Mapping[str, Callable[[Module, str, DType], Matrix]] = {
    Dense.kind: _dense,
    NVFP4.kind: _nvfp4,
    Int8Block.kind: _int8_block,
    FP8.kind: _unit_scaled,
    Int8.kind: _unit_scaled,
    Int4.kind: _int4,
}
