"""Writing safetensors files as a stream.

The header holds every name, type and offset, so it is written first, from shapes alone. Then the
tensors follow in the same order, a block of rows at a time: memory use does not depend on the size
of a tensor or of the file. Nothing in the file depends on anything but the specs and the bytes.

Format: https://huggingface.co/docs/safetensors/index#format.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.backends.storage import storage_error, storage_errors
from edgecc.errors import InternalError, ResourceError

Block: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""Consecutive elements of a tensor in C order: raw little-endian bytes, or an array."""

DATA_ALIGNMENT = 64
"""The first tensor begins at a multiple of this many bytes, so that mapped rows stay aligned."""

# Bits of one element, and the NumPy type that holds it (none: packed, only raw bytes will do).
_DTYPES: Mapping[str, tuple[int, str | None]] = {
    "F64": (64, "float64"),
    "F32": (32, "float32"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F4": (4, None),
    "I64": (64, "int64"),
    "I32": (32, "int32"),
    "I16": (16, "int16"),
    "I8": (8, "int8"),
    "U64": (64, "uint64"),
    "U32": (32, "uint32"),
    "U16": (16, "uint16"),
    "U8": (8, "uint8"),
    "BOOL": (8, "bool"),
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file that is going to be written.

    Attributes:
        name: Its key in the file.
        dtype: Element type as safetensors spells it, for example `BF16`, `F8_E4M3`, `U8`.
        shape: Its dimensions; for `F4` those of the elements, two of which share a byte.

    Raises:
        InternalError: safetensors cannot store such a tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise _bug("bad-tensor", f"{self.name!r} has unknown dtype {self.dtype!r}")
        if any(dim < 0 for dim in self.shape):
            raise _bug("bad-tensor", f"{self.name!r} has a negative dimension: {self.shape}")
        if self._bits % 8:
            raise _bug("bad-tensor", f"{self.name!r} {self.dtype} {self.shape} ends inside a byte")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self._bits // 8

    @property
    def _bits(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype][0]


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A finished file.

    Attributes:
        path: Where it is.
        bytes: Its size.
        sha256: Hex digest of the whole file.
        offsets: For each tensor, its first byte counted from the start of the file, and its bytes.
    """

    path: Path
    bytes: int
    sha256: str
    offsets: Mapping[str, tuple[int, int]]


class WeightFileWriter:
    """Writes one safetensors file, tensor after tensor.

    ```
    with WeightFileWriter(path, specs) as file:
        for spec in specs:
            for rows in blocks(spec):
                file.write(spec.name, rows)
    written = file.finish()
    ```

    Leaving the block because of an exception removes the file.

    Args:
        path: The file to make. It must not exist; its directory must.
        tensors: What it will hold, in the order in which it will be written.

    Attributes:
        path: The file.
        offsets: As in `WrittenFile`, known before anything is written.

    Raises:
        InternalError: Two tensors have the same name.
        ResourceError: The file cannot be made, or the disk has too little space for it.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorSpec]) -> None:
        self.path = path
        self._specs = {spec.name: spec for spec in tensors}
        if len(self._specs) != len(tensors) or "__metadata__" in self._specs:
            raise _bug("bad-tensor", f"{path.name}: a tensor name is reserved or used twice")
        header = _header(tensors)
        self.offsets: Mapping[str, tuple[int, int]] = _offsets(tensors, len(header))
        self._total = file_size(tensors)
        self._missing = {spec.name: spec.nbytes for spec in tensors if spec.nbytes}
        self._digest = hashlib.sha256()
        self._written: WrittenFile | None = None
        self._removed = False
        self._file = self._create()
        try:
            self._append(header)
        except BaseException:
            self._remove()
            raise

    def __enter__(self) -> WeightFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        elif self._written is None:
            self._remove()

    def write(self, name: str, block: Block) -> None:
        """Append the next elements of a tensor.

        Args:
            name: The tensor: the one written last, or the next one in order. Tensors without
                elements may be left out.
            block: Its next elements, whole rows or not. Arrays have the tensor's dtype, or hold
                raw bytes as uint8. Arrays that are not contiguous are copied.

        Raises:
            InternalError: Another tensor is due, or the block is of another dtype or too long.
            ResourceError: The disk is full or fails.
        """
        spec = self._specs.get(name)
        if spec is None:
            raise _bug("unknown-tensor", f"{self.path.name} has no tensor {name!r}")
        data = _raw(spec, block)
        due = next(iter(self._missing), None)
        left = self._missing.get(name, 0)
        if len(data) > left:
            raise _bug("excess-bytes", f"{name!r}: {len(data)} bytes given, {left} are left")
        if not data:
            return
        if due != name:
            missing = self._missing[due] if due is not None else 0
            raise _bug("wrong-order", f"{name!r} given while {due!r} still lacks {missing} bytes")
        self._append(data)
        self._missing[name] -= len(data)
        if not self._missing[name]:
            del self._missing[name]

    def finish(self) -> WrittenFile:
        """Close the file. Calling it again gives the same answer.

        Raises:
            InternalError: Tensors are incomplete.
            ResourceError: The disk is full or fails.
        """
        if self._removed:
            raise _bug("removed-file", f"{self.path.name} was removed after an error")
        if self._written is None:
            if self._missing:
                self._remove()
                name, left = next(iter(self._missing.items()))
                raise _bug("missing-bytes", f"{name!r} still lacks {left} bytes at the end")
            try:
                self._file.close()
            except OSError as error:
                self._remove()
                raise storage_error(error, self.path) from error
            self._written = WrittenFile(
                self.path, self._total, self._digest.hexdigest(), self.offsets
            )
        return self._written

    def _create(self) -> BinaryIO:
        with storage_errors(self.path):
            free = shutil.disk_usage(self.path.parent).free
            if free < self._total:
                raise ResourceError(
                    "bundle/disk-full",
                    f"{self.path.name} needs {self._total:,} bytes, only {free:,} are free",
                    where=str(self.path),
                    help="free some space, or write to another disk with -o",
                )
            return self.path.open("xb")

    def _append(self, data: bytes | memoryview) -> None:
        with storage_errors(self.path):
            self._file.write(data)
        self._digest.update(data)

    def _remove(self) -> None:
        self._removed = True
        # Closing writes what is buffered, which fails again when the disk is full.
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            os.unlink(self.path)


def file_size(tensors: Sequence[TensorSpec]) -> int:
    """Bytes of the file that `WeightFileWriter` makes of these tensors."""
    return len(_header(tensors)) + sum(spec.nbytes for spec in tensors)


def _header(tensors: Sequence[TensorSpec]) -> bytes:
    """The length field and the JSON header, padded so that the data begins aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "edgecc"}}
    begin = 0
    for spec in tensors:
        end = begin + spec.nbytes
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(8 + len(text)) % DATA_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _offsets(tensors: Sequence[TensorSpec], first: int) -> dict[str, tuple[int, int]]:
    found = {}
    for spec in tensors:
        found[spec.name] = (first, spec.nbytes)
        first += spec.nbytes
    return found


def _raw(spec: TensorSpec, block: Block) -> memoryview:
    """The bytes of a block as they go into the file, without a copy where that is possible."""
    if not isinstance(block, np.ndarray):
        view = memoryview(block)
        return view.cast("B") if view.nbytes else memoryview(b"")
    if block.dtype.name not in ("uint8", _DTYPES[spec.dtype][1]):
        raise _bug("wrong-dtype", f"{spec.name!r} is {spec.dtype}, got {block.dtype} elements")
    little = np.ascontiguousarray(block, block.dtype.newbyteorder("<"))
    return little.reshape(-1).view(np.uint8).data


def _bug(what: str, message: str) -> InternalError:
    return InternalError(f"bundle/{what}", message, help="please report this message")
