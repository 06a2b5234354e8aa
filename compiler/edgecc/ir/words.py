"""4-bit codes in 32-bit words, as AutoAWQ, GPTQ and compressed-tensors store them: NumPy only.

Eight codes share a word; they are unpacked to bytes, 0 to 15. Which codes share one is what differs
between producers, and each of the three functions below is one answer. Files are little-endian, and
so are the words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

CODES = 8
"""Codes of a word."""

OFFSET = 8
"""What is added to signed codes and zero points in words."""

V1_ZERO_POINTS = 0x1111_1111
"""What words of zero points lack in GPTQ's first format: one in every code."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight neighbours each code of an AWQ word is: AutoAWQ's `AWQ_ORDER`."""


def unpack(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Codes of each word, the lowest four bits first: i32 `[..., W]` to u8 `[..., W, 8]`."""
    parts = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape, CODES // 2)
    out = np.empty((*words.shape, CODES // 2, 2), np.uint8)
    np.bitwise_and(parts, 15, out=out[..., 0])
    np.right_shift(parts, 4, out=out[..., 1])
    return out.reshape(*words.shape, CODES)


def along_columns(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Words of neighbours in a row: i32 `[A, B]` to u8 `[A, 8 B]`."""
    return unpack(words).reshape(len(words), CODES * words.shape[1])


def along_rows(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Words of neighbours in a column, transposed: i32 `[A, B]` to u8 `[B, 8 A]`."""
    return along_columns(words.T)


def in_awq_order(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Words of neighbours in a row, in AutoAWQ's GEMM order, transposed.

    Args:
        words: i32 `[A, B]`.

    Returns:
        u8 `[8 B, A]`.
    """
    # Whole words are transposed and then taken apart: four times as fast as the other way round.
    turned = np.ascontiguousarray(words.T)
    parts = turned.view(np.uint8).reshape(*turned.shape, CODES // 2)
    out = np.empty((len(turned), CODES, turned.shape[1]), np.uint8)
    for place, neighbour in enumerate(_AWQ_ORDER):
        code, row = parts[..., place // 2], out[:, neighbour]
        if place % 2:
            np.right_shift(code, 4, out=row)
        else:
            np.bitwise_and(code, 15, out=row)
    return out.reshape(CODES * len(turned), turned.shape[1])


def next_zero_points(words: NDArray[np.int32]) -> NDArray[np.int32]:
    """Words of zero points of GPTQ's first format, each code one more.

    Words are added as GPTQModel does: a code of 15 becomes 0 and carries into the next one.
    """
    added: NDArray[Any] = words.view(np.uint32) + np.uint32(V1_ZERO_POINTS)
    return added.view(np.int32)
