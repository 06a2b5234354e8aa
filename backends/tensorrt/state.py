"""Lowerings of layers with a recurrent state: short convolution and Gated DeltaNet, in float32."""

from __future__ import annotations

import numpy as np

from edgecc.backends.tensorrt.delta_rule import MAX_ROWS, DeltaInputs, Heads, Rows, delta_rule
from edgecc.backends.tensorrt.emitter import Emitter, Tensor, lowers
from edgecc.backends.tensorrt.shape import join
from edgecc.backends.tensorrt.weights import table
from edgecc.errors import LegalizeError
from edgecc.ir.core import Node, Value, site
from edgecc.ir.ops.state import GatedDeltaNetAttributes
from edgecc.ir.types import Dim, DType, Shape


@lowers("causal_conv1d")
def causal_conv1d(e: Emitter, node: Node) -> None:
    """A short convolution over the rows of a call, and the rows that the next call needs."""
    x, state = node.operands
    rows, before = (e.cast(t, DType.F32) for t in e.operands(node))
    window = join(e, [e.transpose(before, (0, 2, 1)), rows], 1)
    y = convolve(e, window, rows, x.type.shape, table(e, node.weights[0]))
    kept = e.transpose(_last_rows(e, window, x, int(str(state.type.shape[2]))), (0, 2, 1))
    result, after = node.results
    e.result(node, e.cast(y, result.type.dtype), e.cast(kept, after.type.dtype))


def convolve(e: Emitter, window: Tensor, rows: Tensor, shape: Shape, weight: Tensor) -> Tensor:
    """Taps from the oldest to the newest, each times the rows it meets, added in that order.

    Args:
        e: Emitter of the network.
        window: The rows, with those of the state before them.
        rows: The rows, `[b, rows, C]`.
        shape: Their shape.
        weight: `[C, 1, taps]`.
    """
    taps, width = int(weight.shape[2]), int(str(shape[2]))
    turned = e.transpose(weight, (1, 2, 0))  # [1, taps, C]
    total = None
    for j in range(taps):
        tap = e.out("slice", e.network.add_slice(turned, (0, j, 0), (1, 1, width), (1, 1, 1)))
        term = e.binary("PROD", _rows(e, window, rows, shape, j), tap)
        total = term if total is None else e.binary("SUM", total, term)
    return total


def _rows(e: Emitter, window: Tensor, rows: Tensor, shape: Shape, start: int) -> Tensor:
    """As many rows of the window as there are, from `start` on."""
    sizes = [e.size(d) for d in shape]
    known = tuple(d if isinstance(d, int) else 0 for d in sizes)
    layer = e.layer("rows", e.network.add_slice(window, (0, start, 0), known, (1, 1, 1)))
    if not all(isinstance(d, int) for d in sizes):
        layer.set_input(2, e.run_shape(rows))
    return layer.get_output(0)


def _last_rows(e: Emitter, window: Tensor, x: Value, count: int) -> Tensor:
    """The last rows of the window: as many as come before those of x."""
    batch, rows, width = e.shape(x)
    first = (0, max(rows, 0), 0)
    sizes = (max(batch, 0), count, width)
    layer = e.layer("last", e.network.add_slice(window, first, sizes, (1, 1, 1)))
    zero, number = (e.constant(np.array([n], dtype=np.int64)) for n in (0, count))
    if rows < 0:
        layer.set_input(1, join(e, [zero, e.run_size(x, 1), zero], 0))
    if batch < 0:
        layer.set_input(2, join(e, [e.run_size(x, 0), number, e.run_size(x, 2)], 0))
    return layer.get_output(0)


@lowers("gated_delta_net")
def gated_delta_net(e: Emitter, node: Node) -> None:
    """One triangular system for all rows of a call, see `delta_rule`.

    Raises:
        LegalizeError: A call may have more than `MAX_ROWS` rows.
    """
    attrs, result, after = node.attrs, *node.results
    assert isinstance(attrs, GatedDeltaNetAttributes)
    operands = [e.cast(x, DType.F32) for x in e.operands(node)]
    weights = [table(e, w) for w in node.weights]
    rows = rows_of(e, node, node.operands[0].type.shape[1], operands[0])
    heads = heads_of(attrs, after)
    out, state = delta_rule(rows, heads, DeltaInputs(*operands, *weights))
    e.result(node, e.cast(out, result.type.dtype), e.cast(state, after.type.dtype))


def rows_of(e: Emitter, node: Node, count: Dim, tensor: Tensor) -> Rows:
    """The rows that a recurrence goes over, which are axis 1 of a tensor.

    Raises:
        LegalizeError: They may be more than `MAX_ROWS`.
    """
    e.exact_float32 = True  # TF32 has as few digits as f16: states would lose small updates
    most = e.largest(count)
    if most > MAX_ROWS:
        raise LegalizeError(
            "tensorrt/too-many-rows",
            f"{node.op.name} takes up to {MAX_ROWS} rows a call, a prompt chunk has {most}",
            where=site(e.graph, node),
            help=f"compile with --prefill-chunk {MAX_ROWS} or less",
        )
    return Rows(e, count, tensor, most)


def heads_of(attrs: GatedDeltaNetAttributes, state: Value) -> Heads:
    """Sizes of a layer from its state `[b, value_heads, key_dim, value_dim]`."""
    batch, heads, key_dim, value_dim = state.type.shape
    return Heads(batch, attrs.key_heads, int(str(heads)), int(str(key_dim)), int(str(value_dim)))
