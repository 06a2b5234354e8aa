"""One safetensors file: a strict header parser and read-only mapped tensors.

The file starts with the header length (u64, little-endian), then a JSON header, then the data.
The checks are those of the reference reader (safetensors 0.8) plus the ones a hostile or damaged
file calls for: duplicate keys, odd names, ranks and counts without bound. Nothing is allocated from
a number in the header before that number has been compared with the size of the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgecc.errors import InputError, ResourceError
from edgecc.frontends.checkpoint_files import RemoteFile
from edgecc.frontends.strict_json import LFS_MAGIC, Json, kind, lfs_pointer, parse_object
from edgecc.ir.types import DType

Array: TypeAlias = NDArray[Any]

MAX_HEADER = 100_000_000
MAX_TENSORS = 400_000
METADATA = "__metadata__"
"""Key of a header that is no tensor."""

MAX_RANK = 8
MAX_NAME = 1024

# Format name -> (bits per element, our element type or None where the IR has no counterpart).
_DTYPES: Mapping[str, tuple[int, DType | None]] = {
    "BOOL": (8, DType.BOOL),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, DType.U8),
    "I8": (8, DType.I8),
    "F8_E5M2": (8, DType.F8E5M2),
    "F8_E4M3": (8, DType.F8E4M3),
    "F8_E8M0": (8, DType.F8E8M0),
    "F8_E4M3FNUZ": (8, None),
    "F8_E5M2FNUZ": (8, None),
    "I16": (16, DType.I16),
    "U16": (16, DType.U16),
    "F16": (16, DType.F16),
    "BF16": (16, DType.BF16),
    "I32": (32, DType.I32),
    "U32": (32, DType.U32),
    "F32": (32, DType.F32),
    "C64": (64, None),
    "F64": (64, DType.F64),
    "I64": (64, DType.I64),
    "U64": (64, DType.U64),
}

# First bytes of files that get renamed to .safetensors by mistake.
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"PK\x03\x04", "a zip archive (a pickled PyTorch checkpoint is one)"),
    (b"\x80\x02", "a Python pickle"),
    (b"GGUF", "a GGUF file"),
    (b"<", "a web page or XML document"),
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says about a tensor.

    Attributes:
        dtype: Element type.
        shape: Dimensions as stored; packed formats count bytes.
        file: Name of the file inside the checkpoint.
        nbytes: Bytes of data.
    """

    dtype: DType
    shape: tuple[int, ...]
    file: str
    nbytes: int


class SafetensorsFile:
    """The tensors of one file; the data is mapped when the first tensor is read.

    Attributes:
        tensors: Tensors by name, in the order of the header.
        unreadable: Name -> format dtype of tensors whose dtype has no counterpart in the IR.
    """

    def __init__(self, path: Path, name: str, where: str, remote: RemoteFile | None = None) -> None:
        """Read and check the header.

        Args:
            path: The file.
            name: Its name inside the checkpoint, kept in `TensorInfo.file`.
            where: How messages call it.
            remote: Where its tensors are, if `path` has its header only.

        Raises:
            InputError: The file is damaged, truncated or not a safetensors file.
            ResourceError: The file cannot be read.
        """
        self._path, self._where, self._remote = path, where, remote
        self._map: mmap.mmap | None = None
        try:
            with path.open("rb") as stream:
                self._identity = _identity(stream.fileno())
                self._size = self._identity[0] if remote is None else remote.size
                head = stream.read(64)
                length = self._header_length(head)
                header = head[8 : 8 + length] + stream.read(max(0, length - (len(head) - 8)))
        except OSError as error:
            raise _unreadable(where, error) from error
        if len(header) != length:
            self._fail("checkpoint/truncated", "the file became shorter while it was read")
        self._base = 8 + length
        entries = self._parse(header)
        self._check_layout(entries)
        self._offsets = {key: entry.begin for key, entry in entries.items()}
        self.tensors: dict[str, TensorInfo] = {
            key: TensorInfo(entry.dtype, entry.shape, name, entry.end - entry.begin)
            for key, entry in entries.items()
            if entry.dtype is not None
        }
        self.unreadable: dict[str, str] = {
            key: entry.spelling for key, entry in entries.items() if entry.dtype is None
        }

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> Array:
        """Rows `start:stop` along axis 0 as a read-only array in the stored dtype.

        A view of the mapping, or a copy where the data is not aligned for the dtype.

        Raises:
            KeyError: No such tensor.
            ValueError: The rows are out of range, or rows of a scalar were asked for.
            InputError: The file changed since it was opened.
            ResourceError: The file cannot be mapped.
        """
        info = self.tensors[key]
        first, shape = _rows(info, start, stop)
        dtype = info.dtype.numpy
        count = prod(shape)
        if count == 0:
            empty = np.empty(shape, dtype)
            empty.flags.writeable = False
            return empty
        offset = self._base + self._offsets[key] + first * dtype.itemsize
        flat = self._bytes(offset, count * dtype.itemsize)
        if self._remote is None and offset % dtype.itemsize:
            flat = flat.copy()
            flat.flags.writeable = False
        return flat.view(dtype).reshape(shape)

    def _bytes(self, offset: int, count: int) -> Array:
        if self._remote is None:
            return np.frombuffer(self._mapped(), dtype=np.uint8, count=count, offset=offset)
        found = self._remote.fetch(offset, offset + count)
        if len(found) != count:
            self._fail("checkpoint/truncated", f"{len(found)} of {count} bytes at {offset} came")
        return np.frombuffer(found, dtype=np.uint8)

    def close(self) -> None:
        """Give the mapping up; arrays that were read stay valid."""
        mapping, self._map = self._map, None
        if mapping is not None:
            try:
                mapping.close()
            except BufferError:  # arrays still point into it: it goes with the last of them
                return

    def _mapped(self) -> mmap.mmap:
        try:
            if self._map is None:
                with self._path.open("rb") as stream:
                    if _identity(stream.fileno()) != self._identity:
                        self._fail("checkpoint/changed", "the file changed after it was opened")
                    self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            size = self._map.size()
        except (OSError, ValueError) as error:
            raise _unreadable(self._where, error) from error
        if size != self._size:
            # Reading pages beyond the end of a mapped file kills the process.
            self._fail(
                "checkpoint/changed", f"the file had {self._size} bytes when opened, now {size}"
            )
        return self._map

    def _header_length(self, head: bytes) -> int:
        if head.startswith(LFS_MAGIC):
            raise lfs_pointer(self._where)
        if len(head) < 8:
            self._fail(
                "checkpoint/truncated", f"the file has {len(head)} bytes, its header alone needs 8"
            )
        length = int.from_bytes(head[:8], "little")
        if 0 < length <= min(MAX_HEADER, self._size - 8):
            return length
        for magic, what in _FOREIGN:
            if head.startswith(magic):
                self._fail("checkpoint/not-safetensors", f"this is {what}, not a safetensors file")
        if 0 < length <= MAX_HEADER:
            self._fail(
                "checkpoint/truncated",
                f"the file has {self._size} bytes, its header alone {8 + length}",
            )
        self._fail(
            "checkpoint/bad-header", f"the header length {length} is not within 1..{MAX_HEADER}"
        )

    def _parse(self, header: bytes) -> dict[str, _Entry]:
        if header.count(b'"data_offsets"') > MAX_TENSORS:  # before they take memory
            self._too_many(f"more than {MAX_TENSORS}")
        if not header.startswith(b"{"):
            self._fail("checkpoint/bad-header", "the header does not start with '{'")
        fields = parse_object(header, self._where)
        metadata = fields.pop(METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            self._fail("checkpoint/bad-header", f"{METADATA} must map strings to strings")
        if len(fields) > MAX_TENSORS:
            self._too_many(str(len(fields)))
        return {key: self._entry(key, value) for key, value in fields.items()}

    def _too_many(self, count: str) -> NoReturn:
        self._fail("checkpoint/bad-header", f"{count} tensors, at most {MAX_TENSORS} are accepted")

    def _entry(self, key: str, value: Json) -> _Entry:
        if fault := name_fault(key):
            self._fail("checkpoint/bad-tensor", f"the tensor name {key[:80]!r} {fault}")
        if not isinstance(value, dict):
            self._tensor(key, f"its entry is {kind(value)}, not an object")
        spelling = value.get("dtype")
        if not isinstance(spelling, str) or spelling not in _DTYPES:
            self._tensor(key, f"unknown dtype {spelling!r}; known: {', '.join(_DTYPES)}")
        bits, dtype = _DTYPES[spelling]
        shape = _naturals(value.get("shape"))
        if shape is None or len(shape) > MAX_RANK:
            self._tensor(
                key, f"shape must list at most {MAX_RANK} sizes, found {value.get('shape')!r}"
            )
        offsets = _naturals(value.get("data_offsets"))
        if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
            self._tensor(
                key, f"data_offsets must be [begin, end], found {value.get('data_offsets')!r}"
            )
        # Overflow is judged without zero factors: [0, 2^40, 2^40] must not reach an allocator.
        if prod(d for d in shape if d) * bits >= 2**63 or prod(shape) * bits % 8:
            self._tensor(key, f"{spelling} {list(shape)} is not a whole number of bytes below 2^60")
        nbytes = prod(shape) * bits // 8
        if nbytes != offsets[1] - offsets[0]:
            self._tensor(
                key,
                f"{spelling} {list(shape)} takes {nbytes} bytes,"
                f" data_offsets {list(offsets)} hold {offsets[1] - offsets[0]}",
            )
        return _Entry(spelling, dtype, shape, offsets[0], offsets[1])

    def _check_layout(self, entries: Mapping[str, _Entry]) -> None:
        """The tensors cover the data exactly: no overlap, no hole, nothing missing or left over."""
        end = 0
        for key, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != end:
                what = "overlaps the tensor before it" if entry.begin < end else "leaves a hole"
                self._tensor(key, f"begins at {entry.begin}, expected {end}: it {what}")
            end = entry.end
        described = self._base + end
        if self._size < described:
            self._fail(
                "checkpoint/truncated",
                f"the file has {self._size} bytes, its header describes {described}",
                help="the download is incomplete: fetch the file again",
            )
        if self._size > described:
            self._fail(
                "checkpoint/trailing-bytes",
                f"the file has {self._size} bytes, its header describes only {described}",
            )

    def _tensor(self, key: str, message: str) -> NoReturn:
        raise InputError("checkpoint/bad-tensor", message, where=f"{self._where}: {key}")

    def _fail(self, id: str, message: str, help: str = "") -> NoReturn:
        raise InputError(
            id,
            message,
            where=self._where,
            help=help or "download or export the file again",
        )


@dataclass(frozen=True, slots=True)
class _Entry:
    spelling: str
    dtype: DType | None
    shape: tuple[int, ...]
    begin: int
    end: int


def _identity(descriptor: int) -> tuple[int, int, int]:
    """Size, inode and time of change of an open file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_ino, status.st_mtime_ns


def name_fault(name: str) -> str:
    """What is wrong with a tensor name, or an empty string."""
    if not name:
        return "is empty"
    if not name.isprintable():  # also refuses lone surrogates, which cannot be written as UTF-8
        return "holds control or unprintable characters"
    if len(name.encode("utf-8")) > MAX_NAME:
        return f"is longer than {MAX_NAME} bytes"
    return ""


def _naturals(value: Json) -> tuple[int, ...] | None:
    """A list of integers within 0..2^63-1, or None. JSON true is no integer."""
    if not isinstance(value, list):
        return None
    found = [v for v in value if type(v) is int and 0 <= v < 2**63]
    return tuple(found) if len(found) == len(value) else None


def _rows(info: TensorInfo, start: int | None, stop: int | None) -> tuple[int, tuple[int, ...]]:
    """First element and shape of rows `start:stop`."""
    if start is None and stop is None:
        return 0, info.shape
    if not info.shape:
        raise ValueError("a scalar has no rows")
    rows = info.shape[0]
    low, high = start or 0, rows if stop is None else stop
    if not 0 <= low <= high <= rows:
        raise ValueError(f"rows {low}:{high} of a tensor with {rows} rows")
    return low * prod(info.shape[1:]), (high - low, *info.shape[1:])


def _unreadable(where: str, error: Exception) -> ResourceError:
    return ResourceError("checkpoint/unreadable", f"the file cannot be read: {error}", where=where)
