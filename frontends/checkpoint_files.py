"""The folder a checkpoint lives in: which of its files may be opened, and reading the small ones.

A checkpoint names its own files, so every name is checked and every symbolic link is followed to
its end before anything is opened. A link may stay inside the folder, or lead from a snapshot of a
hub cache to that cache's `blobs`; anything else is refused.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgecc.errors import EdgeccError, InputError, ResourceError, UnsupportedError
from edgecc.hub_layout import blob_folders

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """The rest of a weight file of which only the header is here.

    Attributes:
        size: Bytes of the whole file.
        fetch: Its bytes from a first to before a last one.
    """

    size: int
    fetch: Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint is.

    Attributes:
        path: The folder.
        remote: Weight files that are not here as a whole, by name.
        origin: Where it came from, for people; empty if that is the folder.
    """

    path: Path
    remote: Mapping[str, RemoteFile] = field(default_factory=dict)
    origin: str = ""


def place_of(path: str | Path | Place) -> Place:
    """A folder as a place."""
    return path if isinstance(path, Place) else Place(Path(path))


class Folder:
    """A checkpoint folder.

    Attributes:
        path: The folder as the user gave it.
        root: The same without symbolic links.
        role: How messages call the checkpoint: `target` or `draft`.
    """

    def __init__(self, path: Path, role: str) -> None:
        """Check that the folder exists.

        Raises:
            InputError: There is no such folder, or it is a file.
            UnsupportedError: It is a file of a format edgecc does not read.
            ResourceError: It may not be entered.
        """
        self.path, self.role = path, role
        try:
            self.root = path.resolve(strict=True)
            if not self.root.is_dir():
                raise _is_file(path, role)
        except (FileNotFoundError, NotADirectoryError):
            raise _not_found(path, role) from None
        except (RuntimeError, ValueError) as error:  # a loop of links; a NUL in the name
            raise InputError("checkpoint/not-found", f"not a path: {error}", where=role) from error
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise _not_found(path, role) from None
            raise _unreadable(error, role) from error
        self._homes = (self.root, *blob_folders(self.root))

    def where(self, name: str) -> str:
        """How messages call a file: `target/config.json`."""
        return f"{self.role}/{name}"

    def names(self) -> list[str]:
        """Names of everything in the folder, sorted.

        Raises:
            ResourceError: The folder may not be listed.
        """
        try:
            return sorted(entry.name for entry in self.root.iterdir())
        except OSError as error:
            raise _unreadable(error, self.role) from error

    def find(self, name: str) -> Path | None:
        """The path of a regular file of the folder, or None if there is no such entry.

        Raises:
            InputError: The entry is a broken link, leads out of the checkpoint, or is not a file.
            ResourceError: The file system refuses.
        """
        path = self.root / name
        try:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                status = self._follow(path, name).stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise _unreadable(error, self.where(name)) from error
        if not stat.S_ISREG(status.st_mode):
            raise InputError("checkpoint/not-a-file", "not a regular file", where=self.where(name))
        return path

    def read(self, name: str, limit: int) -> bytes | None:
        """The bytes of a small file, or None if there is no such file.

        Raises:
            InputError: As `find`, or the file has more than `limit` bytes.
            ResourceError: The file cannot be read.
        """
        path = self.find(name)
        if path is None:
            return None
        try:
            with path.open("rb") as stream:
                data = stream.read(limit + 1)
        except OSError as error:
            raise _unreadable(error, self.where(name)) from error
        if len(data) > limit:
            raise InputError(
                "checkpoint/too-large",
                f"the file has more than {limit} bytes, which no real one needs",
                where=self.where(name),
            )
        return data

    def _follow(self, path: Path, name: str) -> Path:
        try:
            end = path.resolve(strict=True)
        except (FileNotFoundError, RuntimeError):
            raise InputError(
                "checkpoint/broken-link",
                f"the symbolic link leads nowhere: {path.readlink()}",
                where=self.where(name),
                help="download the checkpoint again: its cache is incomplete",
            ) from None
        if not any(end.is_relative_to(home) for home in self._homes):
            raise InputError(
                "checkpoint/outside-link",
                f"the symbolic link leads out of the checkpoint: {path.readlink()}",
                where=self.where(name),
                notes=(
                    "links may stay inside the folder or lead to the blobs of the same hub cache",
                ),
                help="pass the folder that holds the real file, or copy the file into this one",
            )
        return end


def no_weights(role: str, names: Sequence[str]) -> EdgeccError:
    """The error for a folder or repository without safetensors weights, by what it holds instead.

    Args:
        role: How messages call the checkpoint.
        names: Of all of its files.
    """
    listed = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "nothing"
    if pickles := [n for n in names if n.endswith(_PICKLES)]:
        return UnsupportedError(
            "checkpoint/pickle",
            f"the weights are pickled ({pickles[0]}): loading them would run code from the file",
            where=role,
            help="edgecc convert FOLDER -o DIR rewrites a pytorch_model.bin as safetensors and "
            "runs nothing that is in it",
        )
    if ggufs := [n for n in names if n.endswith(".gguf")]:
        return _gguf(role, ggufs[0])
    if shards := [n for n in names if n.endswith(".safetensors")]:
        return InputError(
            "checkpoint/no-index",
            f"found {shards[0]} but neither model.safetensors nor model.safetensors.index.json",
            where=role,
            help="fetch the index file, or rename a single file to model.safetensors",
        )
    return InputError(
        "checkpoint/no-weights",
        "it holds neither model.safetensors nor model.safetensors.index.json",
        where=role,
        notes=(f"it holds: {listed}",),
    )


def _is_file(path: Path, role: str) -> EdgeccError:
    if path.suffix == ".gguf":
        return _gguf(role, path.name)
    return InputError(
        "checkpoint/not-a-folder",
        f"{path} is a file: a checkpoint is a folder with config.json and safetensors files",
        where=role,
        help=f"pass the folder: {path.parent}",
    )


def _gguf(role: str, name: str) -> UnsupportedError:
    return UnsupportedError(
        "checkpoint/gguf",
        f"{name} is a GGUF file: only safetensors checkpoints are supported",
        where=role,
        help="pass the original checkpoint the GGUF file was made from",
    )


def _not_found(path: Path, role: str) -> InputError:
    return InputError("checkpoint/not-found", f"there is no folder {path}", where=role)


def _unreadable(error: OSError, where: str) -> ResourceError:
    reason = error.strerror or str(error)
    return ResourceError("checkpoint/unreadable", f"cannot be read: {reason}", where=where)
