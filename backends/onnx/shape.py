"""Lowerings of data movement."""

from __future__ import annotations

import numpy as np

from edgecc.backends.onnx.emitter import Emitter, is_static, lowers
from edgecc.ir.core import Node
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes


def _axis(node: Node) -> int:
    assert isinstance(node.attrs, AxisAttributes)
    return node.attrs.axis


@lowers("concat")
def concat(e: Emitter, node: Node) -> None:
    """`Concat`."""
    e.result(node, "Concat", e.operands(node), axis=_axis(node))


@lowers("split")
def split(e: Emitter, node: Node) -> None:
    """`Split` with given sizes."""
    attrs = node.attrs
    assert isinstance(attrs, SplitAttributes)
    e.result(node, "Split", [*e.operands(node), e.ints(*attrs.sizes)], axis=attrs.axis)


@lowers("slice")
def slice_(e: Emitter, node: Node) -> None:
    """`Slice` along one axis."""
    attrs = node.attrs
    assert isinstance(attrs, SliceAttributes)
    (x,) = e.operands(node)
    bounds = [e.ints(attrs.start), e.ints(attrs.stop), e.ints(attrs.axis)]
    e.result(node, "Slice", [x, *bounds])


@lowers("tail")
def tail(e: Emitter, node: Node) -> None:
    """`Slice` from minus the wanted size to the end."""
    axis = _axis(node)
    x, like = node.operands
    size = like.type.shape[axis]
    start = e.ints(-int(str(size))) if is_static(size) else e.op("Neg", [e.size(like, axis)])[0]
    end = e.ints(np.iinfo(np.int64).max)
    e.result(node, "Slice", [e.name(x), start, end, e.ints(axis)])


@lowers("take_rows")
def take_rows(e: Emitter, node: Node) -> None:
    """`Gather` along axis 1."""
    e.result(node, "Gather", e.operands(node), axis=1)


@lowers("pad")
def pad(e: Emitter, node: Node) -> None:
    """`Pad` with a constant at the end of one axis."""
    attrs = node.attrs
    assert isinstance(attrs, PadAttributes)
    (x,) = node.operands
    pads = [0] * (2 * x.type.rank)
    pads[x.type.rank + attrs.axis] = attrs.after
    value = e.constant(np.array(attrs.value, dtype=x.type.dtype.numpy))
    e.result(node, "Pad", [e.name(x), e.ints(*pads), value], mode="constant")


@lowers("unsqueeze")
def unsqueeze(e: Emitter, node: Node) -> None:
    """`Unsqueeze`."""
    e.result(node, "Unsqueeze", [*e.operands(node), e.ints(_axis(node))])


@lowers("squeeze")
def squeeze(e: Emitter, node: Node) -> None:
    """`Squeeze`."""
    e.result(node, "Squeeze", [*e.operands(node), e.ints(_axis(node))])


@lowers("position_ids")
def position_ids(e: Emitter, node: Node) -> None:
    """`length[:, None] + Range(0, s)`."""
    length, x = node.operands
    count = e.size(x, 1)
    (scalar,) = e.op("Squeeze", [count])
    zero, one = (e.constant(np.array(v, dtype=np.int64)) for v in (0, 1))
    (steps,) = e.op("Range", [zero, scalar, one])
    (column,) = e.op("Unsqueeze", [e.name(length), e.ints(1)])
    e.result(node, "Add", [column, steps])


@lowers("advance")
def advance(e: Emitter, node: Node) -> None:
    """`length + s`."""
    length, x = node.operands
    e.result(node, "Add", [e.name(length), e.size(x, 1)])
