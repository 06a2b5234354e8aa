"""Groups of columns that share a scale: how many there are, and which columns are in each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.declaration import Scheme
from edgecc.frontends.quantization.stored import (
    SCALE_DTYPES,
    bad,
    check_tensor,
    check_whole_blocks,
    sidecar,
)
from edgecc.ir.types import DType, format_shape


def count_groups(checkpoint: Checkpoint, key: str, axis: int, rows: int, columns: int) -> int:
    """The number of groups, from the scales, whose other axis is rows.

    Raises:
        InputError: They have another dtype or shape.
        UnsupportedError: Groups do not have equally many columns.
    """
    info = checkpoint.info(key)
    fits = len(info.shape) == 2 and info.shape[1 - axis] == rows and 0 not in info.shape
    if info.dtype not in SCALE_DTYPES or not fits:
        shape = ("groups", str(rows)) if axis == 0 else (str(rows), "groups")
        raise bad(
            "quant/bad-scale",
            f"the scales are {info.dtype.value} {format_shape(info.shape)}, expected "
            f"floating-point numbers [{', '.join(shape)}]",
            checkpoint.location(key),
        )
    groups = info.shape[axis]
    check_whole_blocks(checkpoint, key, columns, -(-columns // groups))
    if columns % groups:
        raise bad(
            "quant/bad-scale",
            f"{groups} scales a row for {columns} columns, which are no {groups} equal groups",
            checkpoint.location(key),
        )
    return groups


def check_declared(
    checkpoint: Checkpoint, key: str, columns: int, groups: int, scheme: Scheme | None
) -> None:
    """Check that the last group is whole: as many scales would fit equal groups of another size.

    Raises:
        UnsupportedError: It has fewer columns.
    """
    size = scheme.group if scheme is not None else None
    if size and 0 < size < columns and groups == -(-columns // size):
        check_whole_blocks(checkpoint, key, columns, size)


def group_order(
    checkpoint: Checkpoint, module: str, component: str, format_: str, scheme: Scheme | None
) -> str:
    """The tensor with the group of each column; empty if there is none, and need not be.

    Raises:
        InputError: It is missing, and columns of a group are declared to be no neighbours.
    """
    if scheme is not None and scheme.ordered:
        return sidecar(checkpoint, module, component, f"{format_}, with an order of columns")
    key = f"{module}.{component}"
    return key if key in checkpoint.tensors else ""


def is_ordered(checkpoint: Checkpoint, key: str, columns: int, groups: int) -> bool:
    """Whether groups are anything but neighbouring columns.

    Raises:
        InputError: The tensor has another dtype or shape, names a group that is not there, or more
            columns of one than of others.
    """
    check_tensor(
        checkpoint, key, "groups of columns", (DType.I32, DType.I64), (columns,), "quant/bad-groups"
    )
    found = checkpoint.read(key)
    if columns and not 0 <= int(found.min()) <= int(found.max()) < groups:
        place = int(np.argmax((found < 0) | (found >= groups)))
        raise bad(
            "quant/bad-groups",
            f"column {place} is of group {int(found[place])}, expected 0 to {groups - 1}",
            checkpoint.location(key),
        )
    _check_sizes(checkpoint, key, np.bincount(found, minlength=groups))
    neighbours = np.arange(columns) // (columns // groups)
    if (found == neighbours).all():
        return False
    if checkpoint.info(key).dtype is not DType.I32:
        raise bad("quant/bad-groups", "groups are i64, expected i32", checkpoint.location(key))
    return True


def _check_sizes(checkpoint: Checkpoint, key: str, sizes: NDArray[np.int64]) -> None:
    """Check that groups have equally many columns; one may have fewer, the rest of a row.

    Raises:
        InputError: They do not.
    """
    size = int(sizes.max(initial=0))
    fewer = np.flatnonzero(sizes < size)
    if len(fewer) > 1 or not sizes.all():
        group = int(np.argmin(sizes))
        raise bad(
            "quant/bad-groups",
            f"group {group} has {int(sizes[group])} columns and group {int(np.argmax(sizes))} has "
            f"{size}, expected equally many",
            checkpoint.location(key),
        )
