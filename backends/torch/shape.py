"""Moving data: concatenate, split, slice, take rows, pad, positions and lengths."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from edgecc.backends.torch.attention import positions_from
from edgecc.backends.torch.kernel import Call, Kernel
from edgecc.ir.ops import Attributes
from edgecc.ir.ops.base import check_indices
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes


def advance(call: Call[Attributes]) -> Tensor:
    """Length plus the size of axis 1."""
    length, x = call.operands
    return length + x.shape[1]


def concat(call: Call[AxisAttributes]) -> Tensor:
    """`torch.cat`."""
    return torch.cat(call.operands, dim=call.attrs.axis)


def split(call: Call[SplitAttributes]) -> tuple[Tensor, ...]:
    """`torch.split` by sizes."""
    return torch.split(call.operands[0], list(call.attrs.sizes), dim=call.attrs.axis)


def slice_(call: Call[SliceAttributes]) -> Tensor:
    """`narrow`."""
    attrs = call.attrs
    return call.operands[0].narrow(attrs.axis, attrs.start, attrs.stop - attrs.start)


def tail(call: Call[AxisAttributes]) -> Tensor:
    """The end of the axis; too few rows there are found out when shapes are checked."""
    x, like = call.operands
    axis = call.attrs.axis
    rows = min(like.shape[axis], x.shape[axis])
    return x.narrow(axis, x.shape[axis] - rows, rows)


def take_rows(call: Call[Attributes]) -> Tensor:
    """`index_select` along axis 1.

    Raises:
        RequestError: An index is out of range.
    """
    x, rows = call.operands
    check_indices("take_rows", rows.cpu().numpy(), x.shape[1])
    return x.index_select(1, rows)


def pad(call: Call[PadAttributes]) -> Tensor:
    """`torch.nn.functional.pad`, which counts axes from the last."""
    (x,) = call.operands
    widths = [0, 0] * (x.ndim - call.attrs.axis - 1) + [0, call.attrs.after]
    return functional.pad(x, widths, value=call.attrs.value)


def unsqueeze(call: Call[AxisAttributes]) -> Tensor:
    """A new axis."""
    return call.operands[0].unsqueeze(call.attrs.axis)


def squeeze(call: Call[AxisAttributes]) -> Tensor:
    """One axis less."""
    return call.operands[0].squeeze(call.attrs.axis)


def position_ids(call: Call[Attributes]) -> Tensor:
    """Start plus row number."""
    length, x = call.operands
    return positions_from(length, x.shape[1])


KERNELS: Mapping[str, Kernel] = {
    "advance": advance,
    "concat": concat,
    "split": split,
    "slice": slice_,
    "tail": tail,
    "take_rows": take_rows,
    "pad": pad,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "position_ids": position_ids,
}
