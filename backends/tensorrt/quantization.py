"""Lowering of quantized activations.

Nothing is rounded here that the op does not round: quotients are taken in float32, numbers are
widened with a scale of one, which is exact, and the scale multiplies the product in float32. Where
both sides of a product are widened like this in float32, the builder makes it a product of the
packed numbers that sums in float32. The layer that quantizes to NVFP4 takes a global scale that has
to be known when an engine is built; it gets one, and what it reads is divided before.
"""

from __future__ import annotations

import numpy as np

from edgecc.backends.tensorrt.emitter import Emitter, Tensor, lowers
from edgecc.backends.tensorrt.shape import as_rows
from edgecc.backends.tensorrt.weights import table
from edgecc.errors import LegalizeError
from edgecc.ir.core import Node, Value, site
from edgecc.ir.encodings import FP8, NVFP4
from edgecc.ir.ops.quantization import FakeQuantizeAttributes, activation_encoding
from edgecc.ir.types import DType

BLOCK = 16
"""Elements that share a scale in the dynamic quantize layer of NVFP4."""


@lowers("fake_quantize")
def fake_quantize(e: Emitter, node: Node) -> None:
    """The widened values, unless only linear layers read them: those take the packed numbers."""
    outputs = {o.value for o in e.graph.outputs}
    if node.result in outputs or any(u.op.name != "linear" for u in node.result.users()):
        rows, scale = _quantize(e, node)
        wide = e.cast(e.binary("PROD", rows, scale), node.result.type.dtype)
        e.result(node, e.reshape(wide, node.result.type.shape))


def quantized(e: Emitter, value: Value) -> tuple[Tensor, Tensor] | None:
    """What a value is made of if it was quantized.

    Returns:
        Packed numbers widened without their scale, f32 `[rows, K]`, and the scale, f32 `[1, 1]`.
    """
    node = value.producer
    if node is None or node.op.name != "fake_quantize":
        return None
    return _quantize(e, node)


def _quantize(e: Emitter, node: Node) -> tuple[Tensor, Tensor]:
    attrs = node.attrs
    assert isinstance(attrs, FakeQuantizeAttributes)
    encoding = activation_encoding(attrs.encoding)
    scale = table(e, node.weights[0])
    key = ("quantized", node.result)

    def make() -> Tensor:
        x = e.cast(as_rows(e, node.operands[0]), DType.F32)
        if isinstance(encoding, FP8):
            return _static(e, x, scale)
        if encoding != NVFP4(BLOCK):
            raise LegalizeError(
                "tensorrt/activations",
                f"TensorRT quantizes activations in blocks of {BLOCK}, not to {encoding}",
                where=site(e.graph, node),
            )
        return _dynamic(e, x, scale)

    return e.once(key, make), _factor(e, scale)


def _static(e: Emitter, x: Tensor, scale: Tensor) -> Tensor:
    layer = e.network.add_quantize(x, scale, e.type(DType.F8E4M3))
    return _widen(e, e.out("quantize", layer), _one(e))


def _dynamic(e: Emitter, x: Tensor, scale: Tensor) -> Tensor:
    x, one = e.binary("DIV", x, _factor(e, scale)), _one(e)
    layer = e.layer(
        "dynamic_quantize",
        e.network.add_dynamic_quantize(x, 1, BLOCK, e.type(DType.F4E2M1), e.type(DType.F8E4M3)),
    )
    layer.set_input(1, one)
    scales = _widen(e, layer.get_output(1), one)
    return _widen(e, layer.get_output(0), scales)


def _factor(e: Emitter, scale: Tensor) -> Tensor:
    return e.once(("factor", scale.name), lambda: e.reshape(scale, (1, 1)))


def _widen(e: Emitter, x: Tensor, scale: Tensor) -> Tensor:
    return e.out("dequantize", e.network.add_dequantize(x, scale, e.type(DType.F32)))


def _one(e: Emitter) -> Tensor:
    return e.constant(np.ones((), np.float32))
