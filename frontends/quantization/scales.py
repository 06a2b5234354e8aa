"""Reading every block scale once, to find damage that would silently become NaN logits."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.reader import EncodedWeight
from edgecc.ir.encodings import NVFP4

_CHUNK = 4 << 20
"""Bytes of scales looked at together."""


def check_scales(checkpoint: Checkpoint, weight: EncodedWeight) -> None:
    """Check all block scales of an NVFP4 weight; other encodings have none to check.

    A scale must be a number without sign bit, and may be zero only where all values of its block
    are zero. Reads one ninth of the weight's bytes, by blocks of rows.

    Raises:
        InputError: A scale is NaN, negative, or zero over values that are not; row and block are
            named.
    """
    if not isinstance(weight.encoding, NVFP4):
        return
    key = weight.parts["weight_scale"]
    rows, blocks = checkpoint.info(key).shape
    step = max(1, _CHUNK // max(blocks, 1))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        scales = checkpoint.read(key, start, stop).view(np.uint8)
        bad = (scales >= 0x80) | (scales == 0x7F)
        if bad.any():
            _fail(checkpoint, weight, weight.encoding.block, bad, start, scales)
        zero = scales == 0
        if zero.any():
            packed = checkpoint.read(weight.parts["weight"], start, stop)
            lossy = zero & _filled_blocks(packed, weight.encoding.block)
            if lossy.any():
                _fail(checkpoint, weight, weight.encoding.block, lossy, start, scales)


def _filled_blocks(packed: NDArray[np.uint8], block: int) -> NDArray[np.bool_]:
    """Blocks that hold a value other than zero: u8 `[rows, K/2]` to bool `[rows, K/block]`."""
    magnitudes = (packed & 0x77).reshape(len(packed), -1, block // 2)  # without both sign bits
    return np.asarray(magnitudes.any(axis=2))


def _fail(
    checkpoint: Checkpoint,
    weight: EncodedWeight,
    size: int,
    bad: NDArray[np.bool_],
    start: int,
    scales: NDArray[Any],
) -> NoReturn:
    row, block = (int(i) for i in np.argwhere(bad)[0])
    byte = int(scales[row, block])
    what = {0x7F: "NaN", 0xFF: "NaN", 0: "zero over values that are not zero"}.get(byte, "negative")
    raise InputError(
        "quant/bad-scale",
        f"the scale of row {start + row}, block {block} (columns {block * size}.."
        f"{(block + 1) * size - 1}) is {what} (byte 0x{byte:02x})",
        where=checkpoint.location(weight.parts["weight_scale"]),
        notes=(f"{int(bad.sum())} such scales in rows {start}..{start + len(bad) - 1}",),
        help="the file is damaged: fetch or export the checkpoint again",
    )
