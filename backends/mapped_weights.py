"""Read-only mapped tensors of a bundle's weight file: what every engine's loader starts from.

NumPy and ml_dtypes only. Pages are read when they are used and belong to the page cache: mapping a
file of any size takes no memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from edgecc.backends.base import Array
from edgecc.errors import BundleError, ResourceError

_NUMPY: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
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
