"""4-bit integers in 32-bit words: AutoAWQ, GPTQ and compressed-tensors `pack-quantized`.

A recipe of the IR gives the words another order (`edgecc.ir.word_recipes`); here their tensors are
checked and the recipe is chosen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.declaration import Scheme
from edgecc.frontends.quantization.layouts import unsupported
from edgecc.frontends.quantization.stored import (
    SCALE_DTYPES,
    EncodedWeight,
    bad,
    check_tensor,
    check_whole_blocks,
    matrix_shape,
    sidecar,
)
from edgecc.ir import words
from edgecc.ir.encodings import Int4
from edgecc.ir.types import DType, format_shape

AWQ_FORMAT = "AWQ (qweight, qzeros, scales)"
GPTQ_FORMAT = "GPTQ (qweight, qzeros, scales, g_idx)"
PACKED_FORMAT = "compressed-tensors pack-quantized (weight_packed, weight_scale, weight_shape)"

_BITS = 32
_FETCH = "config and weights may be of different revisions: fetch both again"
_SYMMETRIC = {True: 0x7777_7777, False: 0x8888_8888}
"""Words of zero points in the middle, for GPTQ's first format and for the second."""


def read_awq(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], scheme: Scheme | None
) -> EncodedWeight:
    """A weight of AutoAWQ: `qweight` `[K, N/8]`, `qzeros` `[G, N/8]`, `scales` `[G, N]`.

    Args:
        checkpoint: Where the tensors are.
        module: Module name.
        shape: Logical `[N, K]` the model needs.
        scheme: What is declared.

    Raises:
        InputError: A tensor is missing, or of a wrong dtype or shape.
        UnsupportedError: Another number of bits, or columns that are no whole number of groups.
    """
    key = f"{module}.qweight"
    rows, columns = matrix_shape(checkpoint, key, shape)
    _check_words(checkpoint, key, (columns, rows), 1, "AWQ")
    names = ("scales", "qzeros")
    parts = {"qweight": key, **{n: sidecar(checkpoint, module, n, AWQ_FORMAT) for n in names}}
    groups = _groups(checkpoint, parts["scales"], 0, rows, columns)
    _check_declared(checkpoint, parts["scales"], columns, groups, scheme)
    zeros = (groups, rows // words.CODES)
    check_tensor(checkpoint, parts["qzeros"], "zero points", (DType.I32,), zeros)
    return _weight(checkpoint, module, shape, parts, "awq_int4", zero_point=True)


def read_gptq(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], scheme: Scheme | None
) -> EncodedWeight:
    """A weight of GPTQ: `qweight` `[K/8, N]`, `scales` `[G, N]`, `qzeros` `[G, N/8]`, `g_idx`.

    Zero points that are all in the middle are left out. A file that says it has the first format
    and holds the middle of the second in every word has the second.

    Raises:
        InputError: See `read_awq`; or zero points of a symmetric weight that are not all equal, or
            columns of groups that are not there or not told.
        UnsupportedError: See `read_awq`.
    """
    key = f"{module}.qweight"
    rows, columns = matrix_shape(checkpoint, key, shape)
    _check_words(checkpoint, key, (columns, rows), 0, "GPTQ")
    parts = {"qweight": key, "scales": sidecar(checkpoint, module, "scales", GPTQ_FORMAT)}
    groups = _groups(checkpoint, parts["scales"], 0, rows, columns)
    zeros = sidecar(checkpoint, module, "qzeros", GPTQ_FORMAT)
    packed = (groups, -(-rows // words.CODES))
    check_tensor(checkpoint, zeros, "zero points", (DType.I32,), packed)
    v1 = scheme is not None and scheme.v1
    beside: tuple[str, ...] = ()
    symmetric = False
    if scheme is not None and scheme.symmetric:
        v1, symmetric = _middle(checkpoint, zeros, v1)
    if symmetric:
        beside = (zeros,)
    else:
        parts["qzeros"] = zeros
    order = _order(checkpoint, module, "g_idx", GPTQ_FORMAT, scheme)
    if not order:
        _check_declared(checkpoint, parts["scales"], columns, groups, scheme)
    return _weight(
        checkpoint,
        module,
        shape,
        parts,
        "gptq_int4",
        zero_point=not symmetric,
        order=order,
        beside=beside,
        v1=v1,
    )


def read_packed(
    checkpoint: Checkpoint, module: str, shape: tuple[int, ...], scheme: Scheme | None
) -> EncodedWeight:
    """A weight of compressed-tensors: `weight_packed` `[N, K/8]`, `weight_scale` `[N, G]`.

    With zero points, `weight_zero_point` `[N/8, G]`; with an order of columns, `weight_g_idx`.

    Raises:
        InputError: See `read_awq`; or `weight_shape` says something else.
        UnsupportedError: See `read_awq`.
    """
    key = f"{module}.weight_packed"
    rows, columns = matrix_shape(checkpoint, key, shape)
    _check_stated_shape(checkpoint, module, shape)
    _check_words(checkpoint, key, (rows, columns), 1, "compressed-tensors")
    parts = {"weight_packed": key}
    parts["weight_scale"] = sidecar(checkpoint, module, "weight_scale", PACKED_FORMAT)
    groups = _groups(checkpoint, parts["weight_scale"], 1, rows, columns)
    order = _order(checkpoint, module, "weight_g_idx", PACKED_FORMAT, scheme)
    if not order:
        _check_declared(checkpoint, parts["weight_scale"], columns, groups, scheme)
    zeros = f"{module}.weight_zero_point"
    stored = zeros in checkpoint.tensors
    if not stored and scheme is not None and scheme.symmetric is False:
        sidecar(checkpoint, module, "weight_zero_point", f"{PACKED_FORMAT}, asymmetric")
    if stored:
        packed = (-(-rows // words.CODES), groups)
        check_tensor(checkpoint, zeros, "zero points", (DType.I32,), packed)
        parts["weight_zero_point"] = zeros
    return _weight(
        checkpoint,
        module,
        shape,
        parts,
        "packed_int4",
        zero_point=stored,
        order=order,
        beside=tuple(n for n in (f"{module}.weight_shape",) if n in checkpoint.tensors),
    )


def _weight(
    checkpoint: Checkpoint,
    module: str,
    shape: tuple[int, ...],
    parts: Mapping[str, str],
    recipe: str,
    *,
    zero_point: bool,
    order: str = "",
    beside: tuple[str, ...] = (),
    **params: bool,
) -> EncodedWeight:
    """The weight that a recipe makes of these tensors, in the order of its inputs."""
    codes, scales, *rest = parts.items()
    rows, columns = shape
    scale = checkpoint.info(scales[1])
    groups = scale.shape[1 if recipe == "packed_int4" else 0]
    ordered = bool(order) and _is_ordered(checkpoint, order, columns, groups)
    inputs = dict([codes, scales, *rest])
    if ordered:
        inputs[order.rpartition(".")[2]] = order
    elif order:
        beside = (*beside, order)
    if rows % 2:
        raise unsupported("4-bit integers and an odd number of rows", checkpoint.location(codes[1]))
    return EncodedWeight(
        Int4(columns // groups, zero_point, ordered, scale.dtype),
        inputs,
        module,
        shape,
        recipe,
        {"zero_point": zero_point, "ordered": ordered, **params},
        beside,
    )


def _check_words(
    checkpoint: Checkpoint, key: str, values: tuple[int, int], packed: int, producer: str
) -> None:
    """Check the codes: eight values a word, along one axis.

    Args:
        checkpoint: Where they are.
        key: Their tensor.
        values: Shape of the values, in the order of the tensor.
        packed: The axis along which values share a word.
        producer: For messages.

    Raises:
        InputError: The codes have another dtype or shape.
        UnsupportedError: Another number of bits, or words that are partly filled.
    """
    info = checkpoint.info(key)
    where = checkpoint.location(key)
    expected = tuple(-(-n // words.CODES) if a == packed else n for a, n in enumerate(values))
    if info.dtype is not DType.I32:
        raise bad("quant/bad-dtype", f"codes are {info.dtype.value}, expected i32", where)
    if values[packed] % words.CODES:
        raise unsupported(
            f"{producer} and {values[packed]} values along a packed axis",
            where,
            f"eight 4-bit codes share a word: a multiple of {words.CODES} is read",
        )
    if info.shape == expected:
        return
    same = len(info.shape) == 2 and info.shape[1 - packed] == expected[1 - packed]
    bits = _BITS * info.shape[packed] / values[packed] if same and values[packed] else 0
    if bits in (2, 3, 8):
        raise unsupported(f"{producer} with {bits:.0f} bits", where, "read: 4 bits")
    raise bad(
        "quant/bad-shape",
        f"words {format_shape(info.shape)}, expected {format_shape(expected)}: eight 4-bit codes "
        f"of {producer} a word",
        where,
        "AWQ packs rows of the weight, [K, N/8]; GPTQ columns, [K/8, N]",
    )


def _groups(checkpoint: Checkpoint, key: str, axis: int, rows: int, columns: int) -> int:
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


def _check_declared(
    checkpoint: Checkpoint, key: str, columns: int, groups: int, scheme: Scheme | None
) -> None:
    """Check that the last group is whole: as many scales would fit equal groups of another size.

    Raises:
        UnsupportedError: It has fewer columns.
    """
    size = scheme.group if scheme is not None else None
    if size and 0 < size < columns and groups == -(-columns // size):
        check_whole_blocks(checkpoint, key, columns, size)


def _order(
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


def _middle(checkpoint: Checkpoint, key: str, v1: bool) -> tuple[bool, bool]:
    """The format of zero points, and whether all of them are in the middle.

    The first row of groups tells; that the others are like it is checked where values may be read.

    Raises:
        InputError: They are not.
    """
    first = _unsigned(checkpoint.read(key, 0, 1))
    for format_ in (v1, False):
        if first.size and (first == _SYMMETRIC[format_]).all():
            if not checkpoint.metadata_only:
                _check_uniform(checkpoint, key, _SYMMETRIC[format_])
            return format_, True
    if not v1 and first.size and (first == _SYMMETRIC[True]).all():
        raise InputError(
            "quant/zero-points",
            "all zero points are 7, the middle of GPTQ's first format; the weight is declared "
            "symmetric and of the second, whose middle is 8",
            where=checkpoint.location(key),
            help="set checkpoint_format to gptq if the file has the first format, or fetch the "
            "config of the same revision",
        )
    return v1, False


def _check_uniform(checkpoint: Checkpoint, key: str, word: int) -> None:
    found = _unsigned(checkpoint.read(key))
    if not (found == word).all():
        row, column = (int(i) for i in np.argwhere(found != word)[0])
        raise InputError(
            "quant/zero-points",
            f"the word at [{row}, {column}] is 0x{int(found[row, column]):08x}, and those of the "
            f"first group 0x{word:08x}; the weight is declared symmetric",
            where=checkpoint.location(key),
            help=_FETCH,
        )


def _unsigned(array: NDArray[Any]) -> NDArray[np.uint32]:
    return array.view(np.uint32)


def _is_ordered(checkpoint: Checkpoint, key: str, columns: int, groups: int) -> bool:
    """Whether groups are anything but neighbouring columns.

    Raises:
        InputError: The tensor has another dtype or shape, or names a group that is not there.
    """
    check_tensor(
        checkpoint, key, "groups of columns", (DType.I32, DType.I64), (columns,), "quant/bad-groups"
    )
    found = checkpoint.read(key)
    if columns and not 0 <= int(found.min()) <= int(found.max()) < groups:
        place = int(np.argmax((found < 0) | (found >= groups)))
        raise InputError(
            "quant/bad-groups",
            f"column {place} is of group {int(found[place])}, expected 0 to {groups - 1}",
            where=checkpoint.location(key),
            help=_FETCH,
        )
    neighbours = np.arange(columns) // (columns // groups)
    if (found == neighbours).all():
        return False
    if checkpoint.info(key).dtype is not DType.I32:
        raise bad("quant/bad-groups", "groups are i64, expected i32", checkpoint.location(key))
    return True


def _check_stated_shape(checkpoint: Checkpoint, module: str, shape: tuple[int, ...]) -> None:
    key = f"{module}.weight_shape"
    if key not in checkpoint.tensors:
        return
    check_tensor(checkpoint, key, "sizes", (DType.I64, DType.I32), (2,), "quant/bad-shape")
    if checkpoint.is_remote(key):  # as in `check_scalar`
        return
    stated = tuple(int(size) for size in checkpoint.read(key))
    if stated != shape:
        raise bad(
            "quant/bad-shape",
            f"weight_shape is {format_shape(stated)}, expected {format_shape(shape)}",
            checkpoint.location(key),
        )
