"""Lowerings of data movement."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from edgecc.backends.tensorrt.emitter import Emitter, Tensor, lowers
from edgecc.errors import LegalizeError
from edgecc.ir.core import Node, Value, site
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes
from edgecc.ir.types import Dim, DType, Shape


def _axis(node: Node) -> int:
    assert isinstance(node.attrs, AxisAttributes)
    return node.attrs.axis


def cut(e: Emitter, value: Value, axis: int, start: int, stop: int) -> Tensor:
    """Elements `start`..`stop` of an axis; the other axes whole, whatever their sizes."""
    return cut_tensor(e, e.value(value), value.type.shape, axis, start, stop)


def cut_tensor(e: Emitter, x: Tensor, shape: Shape, axis: int, start: int, stop: int) -> Tensor:
    """`cut` of a tensor that is no IR value; `shape` is its shape."""
    rank = len(shape)
    starts = tuple(start if a == axis else 0 for a in range(rank))
    wanted: list[Dim] = [stop - start if a == axis else e.size(d) for a, d in enumerate(shape)]
    known = tuple(d if isinstance(d, int) else 0 for d in wanted)
    layer = e.layer("slice", e.network.add_slice(x, starts, known, (1,) * rank))
    if not all(isinstance(d, int) for d in wanted):
        sizes = [e.size_of(d, x, a) for a, d in enumerate(wanted)]
        layer.set_input(2, join(e, sizes, 0))
    return layer.get_output(0)


def as_rows(e: Emitter, value: Value) -> Tensor:
    """The rows of a value under each other: `[..., K]` as `[rows, K]`."""
    *lead, width = value.type.shape
    x = e.value(value)
    if len(lead) == 1:
        return x
    total = 1
    for dim in map(e.size, lead):
        if not isinstance(dim, int):  # left to the reshape
            return e.reshape(x, (dim, width))
        total *= dim
    return e.reshape(x, (total, width))


def join(e: Emitter, tensors: list[Tensor], axis: int) -> Tensor:
    """The tensors one after the other along an axis."""
    layer = e.layer("concat", e.network.add_concatenation(tensors))
    layer.axis = axis
    return layer.get_output(0)


@lowers("concat")
def concat(e: Emitter, node: Node) -> None:
    """A concatenation layer."""
    e.result(node, join(e, e.operands(node), _axis(node)))


@lowers("split")
def split(e: Emitter, node: Node) -> None:
    """A slice for each piece."""
    attrs = node.attrs
    assert isinstance(attrs, SplitAttributes)
    edges = np.cumsum((0, *attrs.sizes)).tolist()
    ranges = pairwise(edges)
    e.result(node, *(cut(e, node.operands[0], attrs.axis, *r) for r in ranges))


@lowers("slice")
def slice_(e: Emitter, node: Node) -> None:
    """A slice layer."""
    attrs = node.attrs
    assert isinstance(attrs, SliceAttributes)
    e.result(node, cut(e, node.operands[0], attrs.axis, attrs.start, attrs.stop))


@lowers("tail")
def tail(e: Emitter, node: Node) -> None:
    """A slice that starts at the difference of the sizes."""
    x, like = node.operands
    axis, rank = _axis(node), x.type.rank
    wanted = [e.run_size(like if a == axis else x, a) for a in range(rank)]
    sizes = join(e, wanted, 0)
    starts = e.binary("SUB", e.run_shape(e.value(x)), sizes)
    layer = e.layer("tail", e.network.add_slice(e.value(x), (0,) * rank, (0,) * rank, (1,) * rank))
    layer.set_input(1, starts)
    layer.set_input(2, sizes)
    e.result(node, layer.get_output(0))


@lowers("take_rows")
def take_rows(e: Emitter, node: Node) -> None:
    """A gather along axis 1."""
    x, rows = e.operands(node)
    e.result(node, e.out("gather", e.network.add_gather(x, rows, 1)))


@lowers("pad")
def pad(e: Emitter, node: Node) -> None:
    """A concatenation with a constant.

    Raises:
        LegalizeError: The size of another axis is known at run time only.
    """
    attrs = node.attrs
    assert isinstance(attrs, PadAttributes)
    (x,) = node.operands
    sizes = [attrs.after if a == attrs.axis else d for a, d in enumerate(e.shape(x))]
    if -1 in sizes:
        raise LegalizeError(
            "tensorrt/dynamic-shape",
            f"padding of {x.type}, whose sizes calls choose",
            where=site(e.graph, node),
            help="compile with one sequence at a time",
        )
    if not attrs.after:
        e.result(node, e.value(x))
        return
    fill = e.constant(np.full(sizes, attrs.value, dtype=x.type.dtype.numpy))
    e.result(node, join(e, [e.value(x), fill], attrs.axis))


@lowers("unsqueeze")
def unsqueeze(e: Emitter, node: Node) -> None:
    """A reshape."""
    e.result(node, e.reshape(e.operands(node)[0], node.result.type.shape))


@lowers("squeeze")
def squeeze(e: Emitter, node: Node) -> None:
    """A reshape."""
    e.result(node, e.reshape(e.operands(node)[0], node.result.type.shape))


@lowers("position_ids")
def position_ids(e: Emitter, node: Node) -> None:
    """`length[:, None] + (0, 1, ...)`."""
    length, x = node.operands
    steps = e.reshape(row_numbers(e, x), (1, x.type.shape[1]))
    column = e.reshape(e.value(length), (length.type.shape[0], 1))
    e.result(node, e.binary("SUM", column, steps))


def row_numbers(e: Emitter, value: Value) -> Tensor:
    """0, 1, ... for the rows (axis 1) of a value, i64 `[s]`."""
    return count_up(e, value.type.shape[1], e.value(value), 1)


def count_up(e: Emitter, dim: Dim, tensor: Tensor, axis: int) -> Tensor:
    """0, 1, ... below a dimension, i64 `[size]`.

    Args:
        e: Emitter of the network.
        dim: The dimension.
        tensor: A tensor that has it, should its size be known at run time only.
        axis: Which axis of the tensor it is.
    """
    size = e.size(dim)
    if isinstance(size, int):
        return e.constant(np.arange(size, dtype=np.int64))

    def fill() -> Tensor:
        kind = e.trt.FillOperation.LINSPACE
        layer = e.layer("rows", e.network.add_fill((0,), kind, e.type(DType.I64)))
        layer.set_input(0, e.size_of(dim, tensor, axis))
        layer.set_input(1, e.constant(np.array(0, dtype=np.int64)))
        layer.set_input(2, e.constant(np.array([1], dtype=np.int64)))
        return layer.get_output(0)

    return e.once(("rows", str(size)), fill)


@lowers("advance")
def advance(e: Emitter, node: Node) -> None:
    """`length + s`."""
    length, x = node.operands
    e.result(node, e.binary("SUM", e.value(length), e.run_size(x, 1)))
