"""Lowerings of normalizations."""

from __future__ import annotations

from edgecc.backends.onnx.emitter import CONTRIB, Emitter, lowers
from edgecc.devices import Dialect
from edgecc.ir.core import Node
from edgecc.ir.ops.norm import AddRmsNormAttributes, LayerNormAttributes, RmsNormAttributes


@lowers("rms_norm")
def rms_norm(e: Emitter, node: Node) -> None:
    """`RMSNormalization`, around two reshapes when the last axis has groups."""
    attrs = node.attrs
    assert isinstance(attrs, RmsNormAttributes)
    (x,) = e.operands(node)
    weight = e.weight(node.weights[0])
    if attrs.groups == 1:
        e.result(node, "RMSNormalization", [x, weight], axis=-1, epsilon=attrs.eps)
        return
    keep = [0] * (node.result.type.rank - 1)
    (grouped,) = e.op("Reshape", [x, e.ints(*keep, attrs.groups, -1)])
    (normed,) = e.op("RMSNormalization", [grouped, weight], axis=-1, epsilon=attrs.eps)
    e.result(node, "Reshape", [normed, e.ints(*keep, -1)])


@lowers("layer_norm")
def layer_norm(e: Emitter, node: Node) -> None:
    """`LayerNormalization`."""
    attrs = node.attrs
    assert isinstance(attrs, LayerNormAttributes)
    inputs = [*e.operands(node), *(e.weight(w) for w in node.weights)]
    e.result(node, "LayerNormalization", inputs, axis=-1, epsilon=attrs.eps)


@lowers("add_rms_norm", Dialect.STANDARD)
def add_rms_norm_standard(e: Emitter, node: Node) -> None:
    """`Add`, then `RMSNormalization`."""
    attrs = node.attrs
    assert isinstance(attrs, AddRmsNormAttributes)
    normed, total = (e.name(r) for r in node.results)
    e.op("Add", e.operands(node), [total])
    weight = e.weight(node.weights[0])
    e.op("RMSNormalization", [total, weight], [normed], axis=-1, epsilon=attrs.eps)


@lowers("add_rms_norm", Dialect.ORT_CONTRIB)
def add_rms_norm(e: Emitter, node: Node) -> None:
    """`SkipSimplifiedLayerNormalization`; its second and third outputs are for training."""
    attrs = node.attrs
    assert isinstance(attrs, AddRmsNormAttributes)
    normed, total = (e.name(r) for r in node.results)
    if node.results[0].type.rank not in (2, 3):  # all the kernel takes
        add_rms_norm_standard(e, node)
        return
    e.op(
        "SkipSimplifiedLayerNormalization",
        [*e.operands(node), e.weight(node.weights[0])],
        [normed, "", "", total],
        domain=CONTRIB,
        epsilon=attrs.eps,
    )
