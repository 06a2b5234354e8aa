"""Moving data: concatenate, split, slice, take rows, pad, positions and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgecc.ir.encodings import Array
from edgecc.ir.ops.base import (
    Attributes,
    EvalContext,
    Op,
    Scope,
    WeightView,
    check_indices,
    require,
    require_equal,
    require_type,
)
from edgecc.ir.types import Dim, DType, TensorType
from edgecc.ir.weights import Weight


@dataclass(frozen=True, slots=True)
class AxisAttributes(Attributes):
    """`axis`: which axis, counted from 0."""

    axis: int


@dataclass(frozen=True, slots=True)
class SplitAttributes(Attributes):
    """`axis`, and `sizes` of the pieces along it."""

    axis: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SliceAttributes(Attributes):
    """`axis`, and the half-open range `start`..`stop` along it."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PadAttributes(Attributes):
    """`axis`, how many elements go `after` the end, and their `value`."""

    axis: int
    after: int
    value: int


def _replace(shape: tuple[Dim, ...], axis: int, dim: Dim) -> tuple[Dim, ...]:
    return (*shape[:axis], dim, *shape[axis + 1 :])


def _require_axis(x: TensorType, axis: int) -> None:
    require(0 <= axis < x.rank, f"axis {axis} is outside {x}")


class Concat(Op[AxisAttributes]):
    """Tensors of one dtype, joined along `axis`; the other axes are equal."""

    name = "concat"
    attributes = AxisAttributes
    operands = ("x", "more")
    variadic = True

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: AxisAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """Sum along the axis."""
        first = operands[0]
        _require_axis(first, attrs.axis)
        total: Dim = 0
        for x in operands:
            require_equal("dtype", x.dtype, first.dtype)
            require_equal("rank", x.rank, first.rank)
            require_equal(
                "the other axes",
                _replace(x.shape, attrs.axis, 0),
                _replace(first.shape, attrs.axis, 0),
            )
            total = total + x.shape[attrs.axis]
        return (TensorType(first.dtype, _replace(first.shape, attrs.axis, total)),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: AxisAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """`numpy.concatenate`."""
        return (np.concatenate(operands, axis=attrs.axis),)


class Split(Op[SplitAttributes]):
    """Pieces of given `sizes` along `axis`: one result per size."""

    name = "split"
    attributes = SplitAttributes
    operands = ("x",)
    results = ("pieces",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: SplitAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """One type per size; sizes add up to the axis."""
        (x,) = operands
        _require_axis(x, attrs.axis)
        require(
            len(attrs.sizes) > 0 and min(attrs.sizes) > 0, f"sizes {attrs.sizes} must be positive"
        )
        require_equal("sum of sizes", sum(attrs.sizes), x.shape[attrs.axis])
        return tuple(TensorType(x.dtype, _replace(x.shape, attrs.axis, s)) for s in attrs.sizes)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: SplitAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """`numpy.split` at the running sums."""
        edges = np.cumsum(attrs.sizes)[:-1]
        return tuple(np.split(operands[0], edges, axis=attrs.axis))


class Slice(Op[SliceAttributes]):
    """Elements `start`..`stop` of an axis of known size."""

    name = "slice"
    attributes = SliceAttributes
    operands = ("x",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: SliceAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """`stop - start` along the axis."""
        (x,) = operands
        _require_axis(x, attrs.axis)
        size = x.shape[attrs.axis]
        require(
            isinstance(size, int) and 0 <= attrs.start < attrs.stop <= size,
            f"range {attrs.start}..{attrs.stop} is outside axis {attrs.axis} of {x}",
        )
        return (TensorType(x.dtype, _replace(x.shape, attrs.axis, attrs.stop - attrs.start)),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: SliceAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Basic slicing."""
        index = [slice(None)] * operands[0].ndim
        index[attrs.axis] = slice(attrs.start, attrs.stop)
        return (operands[0][tuple(index)],)


class Tail(Op[AxisAttributes]):
    """The last rows of x along `axis`, as many as `like` has there.

    The way to drop leading rows whose number is only known at run time.
    """

    name = "tail"
    attributes = AxisAttributes
    operands = ("x", "like")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: AxisAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """X with the axis of `like`."""
        x, like = operands
        _require_axis(x, attrs.axis)
        _require_axis(like, attrs.axis)
        missing = like.shape[attrs.axis] - x.shape[attrs.axis]
        require(
            not isinstance(missing, int) or missing <= 0,
            f"axis {attrs.axis} of {x} has no {like.shape[attrs.axis]} last rows",
        )
        return (TensorType(x.dtype, _replace(x.shape, attrs.axis, like.shape[attrs.axis])),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: AxisAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Slice from the end."""
        x, like = operands
        first = x.shape[attrs.axis] - like.shape[attrs.axis]
        index = [slice(None)] * x.ndim
        index[attrs.axis] = slice(first, None)
        return (x[tuple(index)],)


class TakeRows(Op[Attributes]):
    """Rows of axis 1 by index: `[b, t, H]` and i64 `[r]` give `[b, r, H]`."""

    name = "take_rows"
    operands = ("x", "rows")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """Axis 1 becomes the number of indices."""
        x, rows = operands
        require_type("x", x, rank=3)
        require_type("rows", rows, DType.I64, rank=1)
        return (TensorType(x.dtype, (x.shape[0], rows.shape[0], x.shape[2])),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """`numpy.take` along axis 1; indices out of range raise."""
        x, rows = operands
        check_indices("take_rows", rows, x.shape[1])
        return (np.take(x, rows, axis=1),)


class Pad(Op[PadAttributes]):
    """`after` copies of an integer `value` appended along `axis`."""

    name = "pad"
    attributes = PadAttributes
    operands = ("x",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: PadAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The axis grows by `after`."""
        (x,) = operands
        _require_axis(x, attrs.axis)
        require(attrs.after >= 0, f"after must not be negative, got {attrs.after}")
        return (
            TensorType(x.dtype, _replace(x.shape, attrs.axis, x.shape[attrs.axis] + attrs.after)),
        )

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: PadAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """`numpy.pad` with a constant."""
        widths = [(0, 0)] * operands[0].ndim
        widths[attrs.axis] = (0, attrs.after)
        return (np.pad(operands[0], widths, constant_values=attrs.value),)


class Unsqueeze(Op[AxisAttributes]):
    """A new axis of size 1 at `axis`."""

    name = "unsqueeze"
    attributes = AxisAttributes
    operands = ("x",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: AxisAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """One more axis."""
        (x,) = operands
        require(0 <= attrs.axis <= x.rank, f"axis {attrs.axis} is outside {x}")
        return (TensorType(x.dtype, (*x.shape[: attrs.axis], 1, *x.shape[attrs.axis :])),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: AxisAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """`numpy.expand_dims`."""
        return (np.expand_dims(operands[0], attrs.axis),)


class Squeeze(Op[AxisAttributes]):
    """Drops an axis of size 1."""

    name = "squeeze"
    attributes = AxisAttributes
    operands = ("x",)

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: AxisAttributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """One axis less."""
        (x,) = operands
        _require_axis(x, attrs.axis)
        require_equal("size of the squeezed axis", x.shape[attrs.axis], 1)
        return (TensorType(x.dtype, (*x.shape[: attrs.axis], *x.shape[attrs.axis + 1 :])),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: AxisAttributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """`numpy.squeeze`."""
        return (np.squeeze(operands[0], axis=attrs.axis),)


def _require_rows_after(length: TensorType, x: TensorType) -> None:
    """`length` counts, for each sequence, the rows before those of x."""
    require_type("length", length, DType.I64, rank=1)
    require(x.rank >= 2, f"x must have at least two axes, got {x}")
    require_equal("batch", x.shape[0], length.shape[0])


class PositionIds(Op[Attributes]):
    """Positions of new rows: `length` i64 `[b]` and x `[b, s, ...]` give i64 `[b, s]`."""

    name = "position_ids"
    operands = ("length", "x")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """`[b, s]`."""
        length, x = operands
        _require_rows_after(length, x)
        return (TensorType(DType.I64, x.shape[:2]),)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Broadcast sum."""
        length, x = operands
        return (length[:, None] + np.arange(x.shape[1], dtype=np.int64),)


class Advance(Op[Attributes]):
    """Length after new rows: `length` i64 `[b]` and x `[b, s, ...]` give i64 `[b]`."""

    name = "advance"
    operands = ("length", "x")

    def infer(
        self,
        operands: Sequence[TensorType],
        weights: Sequence[Weight],
        attrs: Attributes,
        scope: Scope,
    ) -> tuple[TensorType, ...]:
        """The type of `length`."""
        length, x = operands
        _require_rows_after(length, x)
        return (length,)

    def evaluate(
        self,
        operands: Sequence[Array],
        weights: Sequence[WeightView],
        attrs: Attributes,
        ctx: EvalContext,
    ) -> tuple[Array, ...]:
        """Sum with the size of axis 1."""
        return (operands[0] + np.int64(operands[1].shape[1]),)


OPS = (
    Advance(),
    Concat(),
    Split(),
    Slice(),
    Tail(),
    TakeRows(),
    Pad(),
    Unsqueeze(),
    Squeeze(),
    PositionIds(),
)
