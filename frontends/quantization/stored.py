"""Checks of stored scales that every quantized format needs."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.ir.types import DType, format_shape


def check_scalar(
    checkpoint: Checkpoint, key: str, dtypes: Collection[DType] = (DType.F32,)
) -> None:
    """Check that a tensor is one finite positive number.

    A large model has a thousand of them: where each is a request over the network, its value is
    left to who fetches the file.

    Args:
        checkpoint: Where the tensor is.
        key: Its name.
        dtypes: What it may be stored in.

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
    if not (math.isfinite(value) and value > 0):
        raise bad(
            "quant/bad-scale",
            f"the scale is {value}, expected a finite positive number",
            checkpoint.location(key),
        )


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
    weight = f"{module}.weight"
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
