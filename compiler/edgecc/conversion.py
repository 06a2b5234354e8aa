"""Pickled checkpoints as safetensors: a folder that edgecc opens."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from edgecc.errors import InputError, ResourceError, UsageError
from edgecc.frontends.checkpoint import SINGLE
from edgecc.frontends.checkpoint_files import Folder
from edgecc.frontends.safetensors_file import METADATA
from edgecc.frontends.torch_file import TorchTensor, read_torch_file
from edgecc.ir.types import DType
from edgecc.paths import local_path, refuse_inside

PICKLED = "pytorch_model.bin"
"""The one file that is converted: drafts and small models are not split."""

_COPIED = (".json", ".jinja", ".txt", ".model")
"""Ends of the names of files that belong to a checkpoint beside its weights."""

_BLOCK = 16 * 2**20

_NAMES: Mapping[DType, str] = {
    DType.F64: "F64",
    DType.F32: "F32",
    DType.F16: "F16",
    DType.BF16: "BF16",
    DType.I64: "I64",
    DType.I32: "I32",
    DType.I16: "I16",
    DType.I8: "I8",
    DType.U8: "U8",
    DType.BOOL: "BOOL",
}
"""Element types as safetensors calls them."""


def convert(source: str | Path, out: str | Path) -> int:
    """Write a folder with the weights of a pickled checkpoint as safetensors.

    Nothing in the file is run, see `edgecc.frontends.torch_file`. Tokenizer and configs are copied.

    Args:
        source: Folder with `pytorch_model.bin`.
        out: Folder to make; it must not exist, and appears when it is complete.

    Returns:
        How many tensors were written.

    Raises:
        InputError: There is no such file, or it is damaged.
        UnsupportedError: It names something that tensors do not need, or is of another format.
        UsageError: `out` exists, or lies in the checkpoint.
        ResourceError: Something cannot be read or written.
    """
    folder = Folder(local_path(source, "checkpoint"), "checkpoint")
    place = local_path(out, "output")
    refuse_inside(place, folder.path, "-o")
    if os.path.lexists(place):
        raise UsageError("usage/output-exists", f"-o {out} exists", help="choose a new folder")
    pickled = folder.find(PICKLED)
    if pickled is None or folder.find(SINGLE) is not None:
        raise InputError(
            "checkpoint/nothing-to-convert",
            f"there is a {SINGLE} already" if pickled is not None else f"there is no {PICKLED}",
            where=folder.role,
            help="checkpoints with safetensors need no conversion; of those in several files, use "
            "one with safetensors",
        )
    tensors = read_torch_file(pickled, folder.where(PICKLED))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        try:
            _write(pickled, tensors, made / SINGLE)
            for name in folder.names():
                if name.endswith(_COPIED) and (file := folder.find(name)) is not None:
                    shutil.copyfile(file, made / name)
            made.chmod(0o755)
            made.rename(place)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise ResourceError(
            "output/unwritable", f"{place} cannot be written: {error.strerror or error}"
        ) from error
    return len(tensors)


def _write(pickled: Path, tensors: Mapping[str, TorchTensor], path: Path) -> None:
    """Stream the tensors of one file into the other."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with pickled.open("rb") as source, path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            source.seek(tensor.offset)
            for begin in range(0, tensor.nbytes, _BLOCK):
                stream.write(source.read(min(_BLOCK, tensor.nbytes - begin)))
        stream.flush()
        os.fsync(stream.fileno())
