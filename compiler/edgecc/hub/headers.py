"""A checkpoint of the hub without its weights: small files, and the headers of the large ones.

`huggingface_hub.get_safetensors_metadata` reads headers as well, but gives them parsed: it keeps
the last of two equal keys and drops sizes, so that damage could not be told any more. Here the
bytes of a header come as they are, and go through the same checks as those of a local file.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from edgecc.frontends.checkpoint_files import Folder, Place, RemoteFile
from edgecc.frontends.safetensors_file import MAX_HEADER
from edgecc.hub.client import Repository

_FIRST = 128 * 1024
"""Bytes asked for at once: the headers of nearly all files are shorter."""
_AT_A_TIME = 4
_WEIGHTS = ".safetensors"


def headers_only(
    repository: Repository,
    small: Path,
    names: Sequence[str],
    sizes: Mapping[str, int],
    scratch: Path,
) -> Place:
    """Put a checkpoint together whose weights stay where they are.

    Args:
        repository: Where it is.
        small: Folder of its small files.
        names: Of the weight files that belong to it.
        sizes: Bytes of each file of the repository, by name.
        scratch: An empty folder.

    Raises:
        HubError: The hub refuses, or nobody answers.
        InputError: A link in the cache leads out of it, or nowhere.
        OSError: The folder cannot be written.
    """
    # The layout of a hub cache says what this is, and at which commit.
    owner = "models--" + repository.wanted.repository.replace("/", "--")
    folder = scratch / owner / "snapshots" / repository.commit
    folder.mkdir(parents=True)
    cached = Folder(small, repository.role)
    for name in cached.names():
        if not name.endswith(_WEIGHTS) and (file := cached.find(name)) is not None:
            shutil.copyfile(file, folder / name)
    for name in sizes:
        if name.endswith(_WEIGHTS) and name not in names and "/" not in name:
            (folder / name).touch()  # never opened, but told that it is there
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        made = pool.map(lambda name: _write_header(repository, name, sizes[name], folder), names)
        remote = {name: RemoteFile(sizes[name], partial(repository.read, name)) for name in names}
        list(made)
    return Place(folder, remote)


def _write_header(repository: Repository, name: str, size: int, folder: Path) -> None:
    data = repository.read(name, 0, min(size, _FIRST)) if size else b""
    end = 8 + int.from_bytes(data[:8], "little")
    if len(data) < end <= min(size, 8 + MAX_HEADER):
        data += repository.read(name, len(data), end)
    (folder / name).write_bytes(data[:end])
