"""Reading every scale and code once, to find damage that would silently become NaN logits."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgecc.errors import InputError
from edgecc.frontends.checkpoint import Checkpoint
from edgecc.frontends.quantization.ranges import E2M1_RANGE, E4M3_RANGE, FP8_SCALES
from edgecc.frontends.quantization.stored import EncodedWeight
from edgecc.ir.encodings import FP8, MXFP4, NVFP4
from edgecc.ir.types import DType

_CHUNK = 4 << 20
"""Bytes looked at together."""

_E8M0_NAN, _E8M0_BIAS = 0xFF, 127

_INT4_LARGEST = 15
"""Difference of a 4-bit code and its zero point."""

_HELP = "the file is damaged: fetch or export the checkpoint again"


def check_scales(checkpoint: Checkpoint, weight: EncodedWeight) -> None:
    """Check all scales of a quantized weight, and all codes that may be no number.

    NVFP4: a block scale must be a number without sign bit, and may be zero only where all values of
    its block are zero; every code is a number, so one ninth of the weight's bytes is read. FP8: a
    scale must be positive and finite, and no element may be NaN. MXFP4: a scale must be a number.
    Values must be float32 numbers for the largest code there is. Other encodings have nothing to
    check. Reads by blocks of rows.

    Raises:
        InputError: A scale or an element is bad; its place is named.
    """
    if isinstance(weight.encoding, NVFP4):
        _check_nvfp4(checkpoint, weight, weight.encoding.block)
    elif isinstance(weight.encoding, MXFP4):
        _check_exponents(checkpoint, weight.parts["weight_scale"], E2M1_RANGE[1])
    elif isinstance(weight.encoding, FP8):
        if weight.encoding.scale_dtype is DType.F8E8M0:
            _check_exponents(checkpoint, weight.parts["weight_scale"], E4M3_RANGE[1])
        else:
            _check_factors(checkpoint, weight.parts["weight_scale"])
        _check_elements(checkpoint, weight.parts["weight"])


def check_group_scales(checkpoint: Checkpoint, key: str) -> None:
    """Check the scales of 4-bit integers: no NaN, none beyond float32, and none zero.

    Producers bound them from below, so that also a group of zeros has one that is not. They may be
    negative: codes count up or down.

    Raises:
        InputError: One is bad; its place is named.
    """
    scales = checkpoint.read(key).astype(np.float32)
    most = np.finfo(np.float32).max / _INT4_LARGEST
    sizes = np.abs(scales)
    bad = ~((sizes > 0) & (sizes <= most))
    if bad.any():
        value = float(scales[bad][0])
        expected = (
            f"expected a number that is not zero, up to {most:.2g}: values are up to "
            f"{_INT4_LARGEST} times as large, in float32"
        )
        raise _bad_scale(checkpoint, key, bad, f"{value:g}, {expected}")


def _check_nvfp4(checkpoint: Checkpoint, weight: EncodedWeight, block: int) -> None:
    key = weight.parts["weight_scale"]
    rows, blocks = checkpoint.info(key).shape
    step = max(1, _CHUNK // max(blocks, 1))
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        scales = checkpoint.read(key, start, stop).view(np.uint8)
        # Maximum and minimum are ten times as fast as comparing: this reads gigabytes.
        if scales.size and scales.max() >= 0x7F:
            bad = (scales >= 0x80) | (scales == 0x7F)
            _fail(checkpoint, weight, block, bad, start, scales)
        if scales.size and scales.min() == 0:
            zero = scales == 0
            packed = checkpoint.read(weight.parts["weight"], start, stop)
            lossy = zero & _filled_blocks(packed, block)
            if lossy.any():
                _fail(checkpoint, weight, block, lossy, start, scales)


def _check_exponents(checkpoint: Checkpoint, key: str, largest: float) -> None:
    """Powers of two: all bytes but the last one are numbers.

    Args:
        checkpoint: Where the scales are.
        key: Their name.
        largest: Magnitude of a code.
    """
    stored = checkpoint.read(key).view(np.uint8)
    most = _E8M0_BIAS + 127 - math.frexp(largest)[1] + 1
    if not stored.size or stored.max() <= most:
        return
    bad = stored > most
    byte = int(stored[bad][0])
    found = "NaN" if byte == _E8M0_NAN else f"2^{byte - _E8M0_BIAS}"
    expected = (
        f"expected a power of two up to 2^{most - _E8M0_BIAS}: values are up to {largest:g} times "
        "as large, in float32"
    )
    raise _bad_scale(checkpoint, key, bad, f"{found} (byte 0x{byte:02x}), {expected}")


def _check_factors(checkpoint: Checkpoint, key: str) -> None:
    factors = np.atleast_1d(checkpoint.read(key).astype(np.float32))
    bad = ~((factors >= FP8_SCALES.least) & (factors <= FP8_SCALES.most))
    if bad.any():
        value = float(factors[bad][0])
        raise _bad_scale(checkpoint, key, bad, f"{value:g}, {FP8_SCALES.refuses(value)}")


def _bad_scale(checkpoint: Checkpoint, key: str, bad: NDArray[np.bool_], found: str) -> InputError:
    """The error for scales of a tensor.

    Args:
        checkpoint: Where it is.
        key: Its name.
        bad: Which of them are bad, at least one.
        found: What the first of those is, and what was expected.
    """
    return InputError(
        "quant/bad-scale",
        f"the scale at {np.argwhere(bad)[0].tolist()} is {found}",
        where=checkpoint.location(key),
        notes=(f"{int(bad.sum())} such scales",),
        help=_HELP,
    )


def _check_elements(checkpoint: Checkpoint, key: str) -> None:
    rows, columns = checkpoint.info(key).shape
    step = max(1, _CHUNK // max(columns, 1))
    for start in range(0, rows, step):
        codes = checkpoint.read(key, start, min(rows, start + step)).view(np.uint8)
        magnitudes = codes & 0x7F
        if magnitudes.size and magnitudes.max() == 0x7F:
            bad = magnitudes == 0x7F
            row, column = (int(i) for i in np.argwhere(bad)[0])
            raise InputError(
                "checkpoint/not-finite",
                f"the value at [{start + row}, {column}] is NaN",
                where=checkpoint.location(key),
                notes=(f"{int(bad.sum())} such values in rows {start}..{start + len(codes) - 1}",),
                help=_HELP,
            )


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
        help=_HELP,
    )
