"""Expands packed weights when a session is loaded.

The bundle holds weights as the checkpoint did. A session gets the expanded tensor through
`SessionOptions.add_initializer` over the placeholder of the model, and packs it for its kernels;
the expanded array is dropped afterwards, so one copy stays. Expansion goes by blocks of rows: the
packed bytes stay in the page cache.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from edgecc import fp8, integers, nvfp4
from edgecc.backends.base import Array
from edgecc.errors import BundleError, ResourceError

BLOCK_ROWS_BYTES = 4 << 20

_NUMPY: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I64": np.int64,
    "I32": np.int32,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


class WeightFile:
    """Read-only mapped tensors of a bundle's weight file.

    Args:
        path: The safetensors file.
        tensors: `dtype`, `shape` and absolute `offset` by name, from the manifest.

    Raises:
        BundleError: The file is missing or empty.
        ResourceError: The file cannot be mapped.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Mapping[str, Any]]) -> None:
        self.path = path
        self._tensors = tensors
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, ValueError) as error:  # an empty file cannot be mapped
            raise BundleError(
                "bundle/weight-file",
                f"the weight file is missing or empty: {error}",
                where=str(path),
            ) from error
        except OSError as error:
            raise ResourceError(
                "bundle/unreadable", f"cannot map the weight file: {error}", where=str(path)
            ) from error

    def tensor(self, name: str) -> Array:
        """A view of one tensor.

        Raises:
            BundleError: The manifest does not know it, or it lies outside the file.
        """
        entry = self._tensors.get(name)
        if entry is None:
            raise BundleError("bundle/unknown-tensor", f"no tensor {name}", where=str(self.path))
        shape = tuple(entry["shape"])
        dtype = np.dtype(_NUMPY[entry["dtype"]])
        try:
            flat = np.frombuffer(self._map, dtype, prod(shape), entry["offset"])
        except (ValueError, OverflowError) as error:
            raise BundleError(
                "bundle/tensor-range", f"tensor {name} lies outside the file", where=str(self.path)
            ) from error
        return flat.reshape(shape)


Parts: TypeAlias = Mapping[str, Array]
Item: TypeAlias = Mapping[str, Any]
"""One `expand` entry of the manifest."""


def _packed(parts: Parts) -> tuple[Array, int, int]:
    """The packed codes and the logical shape; raises ValueError unless the scales fit to them."""
    packed, scale = parts["weight"], parts["weight_scale"]
    rows, half = packed.shape
    if scale.shape != (rows, half // 8) or half % 8 or parts["weight_scale_2"].shape:
        raise ValueError(f"codes {packed.shape}, scales {scale.shape}")
    return packed, rows, 2 * half


def _nvfp4_f32(parts: Parts, item: Item) -> list[Array]:
    packed, rows, columns = _packed(parts)
    scale, scale_2 = parts["weight_scale"], parts["weight_scale_2"]
    return _dequantized(
        (rows, columns), lambda block: nvfp4.dequantize(packed[block], scale[block], scale_2)
    )


def _fp8_f32(parts: Parts, item: Item) -> list[Array]:
    stored, scale = parts["weight"], parts["weight_scale"]
    if scale.shape not in ((), stored.shape[:1]):
        raise ValueError(f"elements {stored.shape}, scales {scale.shape}")
    return _dequantized(
        stored.shape,
        lambda rows: fp8.dequantize(stored[rows], scale[rows] if scale.ndim else scale),
    )


def _fp8_block_f32(parts: Parts, item: Item) -> list[Array]:
    stored, scale = parts["weight"], parts["weight_scale"]
    high, wide = (int(size) for size in item["block"])
    rows, columns = stored.shape
    if min(high, wide) < 1 or scale.shape != (-(-rows // high), -(-columns // wide)):
        raise ValueError(f"elements {stored.shape}, blocks {item['block']}, scales {scale.shape}")

    def values(block: slice) -> Array:
        scales = scale[block.start // high : -(-block.stop // high)]
        return fp8.dequantize(stored[block], scales, (high, wide))

    return _dequantized(stored.shape, values, high)


def _int8_f32(parts: Parts, item: Item) -> list[Array]:
    stored, scale = parts["weight"], parts["weight_scale"]
    if scale.shape != stored.shape[:1]:
        raise ValueError(f"elements {stored.shape}, scales {scale.shape}")
    return _dequantized(
        stored.shape, lambda rows: integers.dequantize_int8(stored[rows], scale[rows])
    )


def _int4_f32(parts: Parts, item: Item) -> list[Array]:
    packed, scale = parts["weight"], parts["weight_scale"]
    rows, columns = 2 * packed.shape[0], packed.shape[1]
    if scale.shape[0] != rows or columns % max(1, scale.shape[1]):
        raise ValueError(f"packed {packed.shape}, scales {scale.shape}")

    def values(block: slice) -> Array:
        half = slice(block.start // 2, block.stop // 2)
        return integers.dequantize_int4(packed[half], scale[block])

    return _dequantized((rows, columns), values, 2)


def _dequantized(
    shape: tuple[int, ...], values: Callable[[slice], Array], group: int = 1
) -> list[Array]:
    """A float32 matrix filled block by block; blocks start at multiples of `group`."""
    rows, columns = shape
    out = np.empty(shape, dtype=np.float32)

    def fill(block: slice) -> None:
        out[block] = values(block)

    _by_rows(rows, columns, fill, group)
    return [out]


def _widen_f32(parts: Parts, item: Item) -> list[Array]:
    stored = parts["weight"]
    out = np.empty(stored.shape, dtype=np.float32)

    def fill(rows: slice) -> None:
        out[rows] = stored[rows]

    _by_rows(stored.shape[0], stored[0].size if len(stored) else 1, fill)
    return [out]


def _nvfp4_int8(parts: Parts, item: Item) -> list[Array]:
    packed, rows, columns = _packed(parts)
    codes = np.empty((rows, columns // 16, 16), dtype=np.uint8)
    scales = np.empty((rows, columns // 16), dtype=np.float32)

    def fill(block: slice) -> None:
        made, factors = nvfp4.int8_codes(
            packed[block], parts["weight_scale"][block], parts["weight_scale_2"]
        )
        codes[block] = made.reshape(-1, columns // 16, 16)
        scales[block] = factors

    _by_rows(rows, columns, fill)
    return [codes, scales]


def _by_rows(rows: int, columns: int, fill: Callable[[slice], None], group: int = 1) -> None:
    step = max(1, BLOCK_ROWS_BYTES // (4 * max(1, columns)) // group) * group
    for start in range(0, rows, step):
        fill(slice(start, min(start + step, rows)))


FORMS: Mapping[str, Callable[[Parts, Item], list[Array]]] = {
    "fp8-block-f32": _fp8_block_f32,
    "fp8-f32": _fp8_f32,
    "int4-f32": _int4_f32,
    "int8-f32": _int8_f32,
    "nvfp4-f32": _nvfp4_f32,
    "widen-f32": _widen_f32,
    "nvfp4-int8": _nvfp4_int8,
}
"""Expansion forms of the manifest: component arrays to initializers."""


def expand(item: Item, file: WeightFile) -> dict[str, Array]:
    """Initializers of one `expand` entry of the manifest, by name.

    Raises:
        BundleError: Unknown form or tensor, or parts that do not belong together.
    """
    form = FORMS.get(item["form"])
    if form is None:
        raise BundleError(
            "bundle/unknown-form",
            f"unknown expansion {item['form']!r}",
            where=str(file.path),
            help="the bundle was made by a newer edgecc: update, or compile again",
        )
    parts = {name: file.tensor(tensor) for name, tensor in item["parts"].items()}
    try:
        return dict(zip(item["initializers"], form(parts, item), strict=True))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise BundleError(
            "bundle/expansion",
            f"{', '.join(item['initializers'])} cannot be made from {item['parts']}: {error}",
            where=str(file.path),
            help="compile the bundle again",
        ) from error
