"""Zero points of weights that are declared symmetric: all in the middle."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.stored import bad

_SYMMETRIC = {True: 0x7777_7777, False: 0x8888_8888}
"""Words of zero points in the middle, for GPTQ's first format and for the second."""


def middle(checkpoint: Checkpoint, key: str, v1: bool) -> bool:
    """Check the zero points of a symmetric weight of GPTQ: i32 words, at least one.

    The first row of groups tells; that the others are like it is checked where values may be read.

    Args:
        checkpoint: Where they are.
        key: Their tensor.
        v1: Whether the first format is declared.

    Returns:
        Whether they have the first format: files that say so may have the second.

    Raises:
        InputError: They are not all in the middle.
    """
    first = _unsigned(checkpoint.read(key, 0, 1))[0]
    for format_ in (v1, False):
        if (first == _SYMMETRIC[format_]).all():
            if not checkpoint.metadata_only:
                _check_uniform(checkpoint, key, _SYMMETRIC[format_])
            return format_
    if (first == _SYMMETRIC[True]).all():
        raise InputError(
            "quant/zero-points",
            "all zero points are 7, the middle of GPTQ's first format; the weight is declared "
            "symmetric and of the second, whose middle is 8",
            where=checkpoint.location(key),
            help="set checkpoint_format to gptq if the file has the first format, or fetch the "
            "config of the same revision",
        )
    column = int(np.argmax(first != _SYMMETRIC[v1]))
    raise InputError(
        "quant/zero-points",
        f"the word at [0, {column}] is 0x{int(first[column]):08x}, expected "
        f"0x{_SYMMETRIC[v1]:08x}: the weight is declared symmetric, and some kernels for those do "
        "not read zero points",
        where=checkpoint.location(key),
        help="set sym to false if the zero points are meant, or fetch the config of the same "
        "revision",
    )


def _check_uniform(checkpoint: Checkpoint, key: str, word: int) -> None:
    found = _unsigned(checkpoint.read(key))
    if not (found == word).all():
        row, column = (int(i) for i in np.argwhere(found != word)[0])
        raise bad(
            "quant/zero-points",
            f"the word at [{row}, {column}] is 0x{int(found[row, column]):08x}, and those of the "
            f"first group 0x{word:08x}; the weight is declared symmetric",
            checkpoint.location(key),
        )


def _unsigned(array: NDArray[Any]) -> NDArray[np.uint32]:
    return array.view(np.uint32)
