"""Reads the tensors of a `pytorch_model.bin` without running anything that is in it.

Such a file (`torch.save` since 1.6) is a zip archive: a pickle that describes the tensors, and the
bytes of each storage, uncompressed. A pickle names functions and calls them. Here it gets a fixed
set of names, none of which is looked up by import: the functions behind them only take notes. What
else a file names is refused, and what the notes say is checked against the archive afterwards.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from edgecc.errors import InputError, ResourceError, UnsupportedError
from edgecc.frontends.pickle_bounds import check_bounds
from edgecc.frontends.safetensors_file import MAX_RANK, MAX_TENSORS, METADATA, name_fault
from edgecc.ir.types import DType

MAX_PICKLE = 4 * 2**20
"""More than the description of any model in one file takes: some 30 000 tensors."""

MAX_SHARING = 4
"""Times the bytes of a file that its tensors may have: two of them may be views of one storage."""

STORAGES: Mapping[str, DType] = {
    "DoubleStorage": DType.F64,
    "FloatStorage": DType.F32,
    "HalfStorage": DType.F16,
    "BFloat16Storage": DType.BF16,
    "LongStorage": DType.I64,
    "IntStorage": DType.I32,
    "ShortStorage": DType.I16,
    "CharStorage": DType.I8,
    "ByteStorage": DType.U8,
    "BoolStorage": DType.BOOL,
}
"""Classes of storages and what they hold."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of a file in a zip archive: its mark, and the lengths of its name and of what follows that."""


@dataclass(frozen=True, slots=True)
class TorchTensor:
    """A tensor in the file.

    Attributes:
        dtype: Element type.
        shape: Dimensions.
        offset: Of its first byte in the file; its elements follow each other in order of rows.
        nbytes: Its bytes.
    """

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Noted:
    """What the pickle says about a tensor, not checked yet."""

    parts: tuple[Any, ...]


def read_torch_file(path: Path, where: str) -> dict[str, TorchTensor]:
    """The tensors of a file by name, in its order.

    Args:
        path: The file.
        where: How messages call it.

    Raises:
        InputError: It is damaged, or describes something else than named tensors.
        UnsupportedError: It is of the old format without an archive, or names something that a
            checkpoint does not need.
        ResourceError: It cannot be read.
    """
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            return _Reader(archive, stream, where).tensors()
    except zipfile.BadZipFile as error:
        raise UnsupportedError(
            "checkpoint/torch-format",
            f"no archive as torch.save writes it: {error}",
            where=where,
            help="files from before PyTorch 1.6 are bare pickles: save it again with a newer one",
        ) from error
    except OSError as error:
        raise ResourceError(
            "checkpoint/unreadable", f"the file cannot be read: {error}", where=where
        ) from error


class _Reader:
    """One archive, while it is open."""

    def __init__(self, archive: zipfile.ZipFile, stream: io.BufferedReader, where: str) -> None:
        self._archive, self._stream, self._where = archive, stream, where
        self._entries = {info.filename: info for info in archive.infolist()}
        names = self._entries
        found = [n for n in names if n.count("/") == 1 and n.endswith("/data.pkl")]
        if len(found) != 1 or len(self._entries) != len(archive.infolist()):
            self._fail(f"the archive has {len(found)} descriptions (data.pkl), expected one")
        self._prefix = found[0].removesuffix("data.pkl")

    def tensors(self) -> dict[str, TorchTensor]:
        """All of them, checked."""
        order = self._entries.get(f"{self._prefix}byteorder")
        if order is not None and self._bytes(order, 16) != b"little":
            self._fail("its numbers are not in little-endian order")
        described = self._bytes(self._entries[f"{self._prefix}data.pkl"], MAX_PICKLE)
        found = self._described(described)
        if not isinstance(found, dict) or not dict.__len__(found):
            held = f"it describes {'an empty ' if found == {} else ''}{type(found).__name__}"
            self._fail(f"{held}, expected tensors by name")
        if len(found) > MAX_TENSORS:
            self._fail(f"{len(found)} tensors, at most {MAX_TENSORS} are accepted")
        tensors = {self._name(name): self._tensor(name, noted) for name, noted in dict.items(found)}
        size = self._stream.seek(0, io.SEEK_END)
        total = sum(tensor.nbytes for tensor in tensors.values())
        if total > MAX_SHARING * size:
            self._fail(
                f"its tensors take {total} bytes, the file has {size}: at most {MAX_SHARING} times "
                "as many are accepted"
            )
        return tensors

    def _described(self, data: bytes) -> object:
        try:
            check_bounds(data)
            return _Notes(data, self._where).load()
        except UnsupportedError:
            raise
        except Exception as error:  # whatever a damaged or hostile pickle makes the machine do
            raise InputError(
                "checkpoint/torch-damaged",
                f"the description of the tensors cannot be read: {error!s:.200}",
                where=self._where,
                help="download the file again",
            ) from error

    def _name(self, name: object) -> str:
        if type(name) is not str:
            self._fail(f"a tensor is called by a {type(name).__name__}, not by a text")
        fault = "means something else in safetensors" if name == METADATA else name_fault(name)
        if fault:
            self._fail(f"the tensor name {name[:80]!r} {fault}")
        return name

    def _tensor(self, name: str, noted: object) -> TorchTensor:
        parts = noted.parts if isinstance(noted, _Noted) else ()
        if type(parts) is not tuple or len(parts) < 4 or type(parts[0]) is not tuple:
            self._fail(f"{name} is no tensor but {type(noted).__name__}")
        storage, offset, shape, strides = parts[:4]
        dtype, key = self._storage(name, storage)
        for sizes in (shape, strides, (offset,)):
            if type(sizes) is not tuple or any(
                type(s) is not int or not 0 <= s < 2**63 for s in sizes
            ):
                self._fail(f"{name} has sizes that are none")
        if len(shape) > MAX_RANK or len(strides) != len(shape):
            self._fail(f"{name} has {len(shape)} dimensions and {len(strides)} strides")
        if not _by_rows(shape, strides):
            raise UnsupportedError(
                "checkpoint/torch-strides",
                f"{name} is a view that skips or swaps elements of another tensor",
                where=self._where,
                help="save the checkpoint as safetensors, which holds no views",
            )
        size = dtype.numpy.itemsize
        entry = self._entries.get(f"{self._prefix}data/{key}")
        held = 0 if entry is None else entry.file_size
        if (offset + prod(shape)) * size > held:
            self._fail(f"{name} takes {(offset + prod(shape)) * size} bytes, {held} are stored")
        begin = self._begin(entry) if entry is not None else 0
        return TorchTensor(dtype, shape, begin + offset * size, prod(shape) * size)

    def _storage(self, name: str, storage: tuple[Any, ...]) -> tuple[DType, str]:
        """Element type and key of a tensor's storage."""
        kind, held, key = (*storage, None, None, None)[:3]
        if type(kind) is not str or type(held) is not str or type(key) is not str:
            self._fail(f"{name} lies in no storage")
        if kind != "storage" or held not in STORAGES:
            self._fail(f"{name} lies in no storage")
        return STORAGES[held], key

    def _begin(self, entry: zipfile.ZipInfo) -> int:
        """Where the bytes of an uncompressed file of the archive begin."""
        self._check_plain(entry)
        self._stream.seek(entry.header_offset)
        header = self._stream.read(_LOCAL_HEADER.size)
        if len(header) == _LOCAL_HEADER.size:
            mark, name, extra = _LOCAL_HEADER.unpack(header)
            begin = entry.header_offset + _LOCAL_HEADER.size + name + extra
            end = self._stream.seek(0, io.SEEK_END)
            if mark == b"PK\x03\x04" and begin + entry.file_size <= end:
                return int(begin)
        self._fail(f"the archive is truncated at {entry.filename[:80]}")

    def _bytes(self, entry: zipfile.ZipInfo, most: int) -> bytes:
        """A small file of the archive."""
        self._check_plain(entry)
        if entry.file_size > most:
            self._fail(f"{entry.filename[:80]} has {entry.file_size} bytes, at most {most}")
        begin = self._begin(entry)
        self._stream.seek(begin)
        return self._stream.read(entry.file_size)

    def _check_plain(self, entry: zipfile.ZipInfo) -> None:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            self._fail(f"{entry.filename[:80]} is compressed or encrypted: torch.save does neither")

    def _fail(self, message: str) -> NoReturn:
        raise InputError(
            "checkpoint/torch-damaged", message, where=self._where, help="download the file again"
        )


class _Notes(pickle.Unpickler):
    """Runs a pickle whose names all mean functions of this module.

    Args:
        data: The pickle.
        where: How messages call its file.
    """

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        """What a name means; nothing is imported, and nothing that others use can be changed."""
        if module == "torch" and name in STORAGES:
            return name
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *parts: _Noted(parts)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return lambda data, *_: data
        raise UnsupportedError(
            "checkpoint/torch-code",
            f"the file wants {module[:80]}.{name[:80]} to be run, which tensors do not need",
            where=self._where,
            help="ask its author for safetensors; do not load it with other tools",
        )

    def persistent_load(self, pid: Any) -> Any:
        """A storage: a tuple `("storage", element type, key, ...)`, checked later."""
        return pid if type(pid) is tuple else ()


def _by_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements follow each other, the last axis fastest."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step and 0 not in shape:
            return False
        step *= size
    return True
