"""What readers of stored formats share: their result, and checks of scales."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from edgecc.errors import InputError, UnsupportedError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.names import value_tensor
from edgecc.frontends.quantization.ranges import ANY_SCALE, ScaleRange
from edgecc.ir.encodings import Encoding
from edgecc.ir.types import DType, format_shape
from edgecc.ir.weights import Param

SCALE_DTYPES = (DType.F32, DType.BF16, DType.F16)


@dataclass(frozen=True, slots=True)
class EncodedWeight:
    """How one weight is stored.

    Attributes:
        encoding: Its layout in the IR.
        parts: Component name of the encoding -> tensor in the checkpoint; with a recipe its
            inputs, in order, by the last part of their names.
        module: The module it belongs to (or the tensor's own name).
        shape: Logical shape.
        recipe: What gives the stored tensors the layout of the encoding; empty if they have it.
        params: Of the recipe.
        beside: Tensors that belong to the weight and are not read with it.
    """

    encoding: Encoding
    parts: Mapping[str, str]
    module: str
    shape: tuple[int, ...]
    recipe: str = ""
    params: Mapping[str, Param] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


def check_scalar(
    checkpoint: Checkpoint,
    key: str,
    dtypes: Collection[DType] = (DType.F32,),
    within: ScaleRange = ANY_SCALE,
) -> None:
    """Check that a tensor is one finite positive number, of a range.

    A large model has a thousand of them: where each is a request over the network, its value is
    left to who fetches the file.

    Args:
        checkpoint: Where the tensor is.
        key: Its name.
        dtypes: What it may be stored in.
        within: What it may be.

    Raises:
        InputError: It is something else.
    """
    info = checkpoint.info(key)
    if info.dtype not in dtypes or info.shape not in ((), (1,)):
        raise bad(
            "quant/bad-scale",
            f"the scale is {info.dtype.value} {format_shape(info.shape)}, expected one "
            f"{' or '.join(d.value for d in dtypes)}",
            checkpoint.location(key),
        )
    if checkpoint.is_remote(key):
        return
    value = float(np.asarray(checkpoint.read(key)).reshape(()))
    if expected := within.refuses(value):
        raise bad("quant/bad-scale", f"the scale is {value}, {expected}", checkpoint.location(key))


def check_tensor(
    checkpoint: Checkpoint,
    key: str,
    what: str,
    dtypes: Collection[DType],
    shape: tuple[int, ...],
    id: str = "quant/bad-scale",
) -> None:
    """Check dtype and shape of a sidecar.

    Args:
        checkpoint: Where the tensor is.
        key: Its name.
        what: What it holds, in the plural.
        dtypes: What it may be stored in.
        shape: What it must have.
        id: Of the error.

    Raises:
        InputError: It is something else.
    """
    info = checkpoint.info(key)
    if info.dtype not in dtypes or info.shape != shape:
        raise bad(
            id,
            f"the {what} are {info.dtype.value} {format_shape(info.shape)}, expected "
            f"{' or '.join(d.value for d in dtypes)} {format_shape(shape)}",
            checkpoint.location(key),
        )


def check_whole_blocks(checkpoint: Checkpoint, key: str, columns: int, block: int) -> None:
    """Check that a row is a whole number of blocks.

    Raises:
        UnsupportedError: It is not.
    """
    if columns % block:
        raise UnsupportedError(
            "quant/partial-block",
            f"{columns} columns are not a multiple of the block {block}",
            where=checkpoint.location(key),
            help="use an export that leaves this layer unquantized",
        )


def matrix_shape(checkpoint: Checkpoint, key: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns that a model needs.

    Raises:
        InputError: It needs no matrix.
    """
    if len(shape) != 2:
        dtype = checkpoint.info(key).dtype.value
        raise bad(
            "quant/bad-shape",
            f"stored packed ({dtype}), but this parameter is not a matrix: {format_shape(shape)}",
            checkpoint.location(key),
        )
    return shape[0], shape[1]


def sidecar(checkpoint: Checkpoint, module: str, component: str, format_: str) -> str:
    """Name of a tensor that a quantized weight cannot do without.

    Args:
        checkpoint: Where the tensors are.
        module: Module name.
        component: Last part of the tensor's name.
        format_: Format the weight was taken for, for the message.

    Raises:
        InputError: There is no such tensor.
    """
    key = f"{module}.{component}"
    if key in checkpoint.tensors:
        return key
    elsewhere = [name for name in checkpoint.tensors if name.endswith(f".{key}")][:3]
    weight = value_tensor(checkpoint.tensors, module) or f"{module}.weight"
    raise InputError(
        "quant/missing-scale",
        f"the weight is packed ({checkpoint.info(weight).dtype.value}) but its {component} is "
        "missing",
        where=checkpoint.location(weight),
        notes=(
            f"assumed format: {format_}",
            f"looked for {key} in {checkpoint.role}: {', '.join(checkpoint.files[:4])}",
            *(f"not used, because it is another module's: {name}" for name in elsewhere),
        ),
        help="the export is incomplete: fetch or export the checkpoint again",
    )


def bad(id: str, message: str, where: str, *notes: str) -> InputError:
    """The error for a tensor of a wrong dtype, shape or value."""
    return InputError(
        id,
        message,
        where=where,
        notes=notes,
        help="config and weights may be of different revisions: fetch both again",
    )
