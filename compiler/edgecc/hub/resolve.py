"""A folder for what a user calls a checkpoint: a path, or an id of the hub.

What exists as a path is one; only what does not can be an id.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from edgecc.errors import Diagnostic, InputError, Severity, UsageError
from edgecc.frontends.checkpoint import INDEX, MAX_JSON
from edgecc.frontends.checkpoint_files import Folder, Place, no_weights
from edgecc.frontends.strict_json import JsonObject, parse_object
from edgecc.hub.client import Repository
from edgecc.hub.errors import Tell
from edgecc.hub.files import missing_weights, small_files, weight_files
from edgecc.hub.headers import headers_only
from edgecc.hub.ids import HubId, parse_id
from edgecc.hub.progress import Progress
from edgecc.paths import local_path

StrPath = str | os.PathLike[str]


_MEANT = re.compile(r"[a-z]+://|(?!\.{1,2}/)[\w.-]+/[\w.-]+[@:]")
"""How texts begin that are meant for the hub."""


def _silent(diagnostic: Diagnostic) -> None:
    """Tell nobody."""


def hub_id(value: StrPath, role: str, tell: Tell = _silent) -> HubId | None:
    """The model of the hub that is meant, or None for a path.

    Args:
        value: What the user gave.
        role: `target` or `draft`.
        tell: Told which of the two is used, where it could be either.

    Raises:
        UsageError: It is empty, has a NUL, or is neither a path nor an id.
    """
    path = local_path(value, role)
    text = os.fspath(value)
    wanted = parse_id(text)
    if not os.path.lexists(path):
        if wanted is None and _MEANT.match(text):
            raise UsageError(
                "hub/bad-id",
                f"{text!r} is no folder, and no name of a model on the hub",
                where=role,
                help="write org/name, or org/name@revision with a branch, a tag or a commit",
            )
        return wanted
    if wanted is None:
        return None
    tell(
        Diagnostic(
            "hub/local-folder",
            f"{wanted} is a folder here: it is used, and not the model of that name on the hub",
            where=role,
            help=f"./{wanted} says the same without doubt; for the hub, add @main",
            severity=Severity.NOTE,
        )
    )
    return None


def checkpoint_folder(
    value: StrPath,
    role: str,
    *,
    offline: bool = False,
    tell: Tell = _silent,
    progress: Progress | None = None,
) -> Path:
    """The folder of a checkpoint; a model of the hub is fetched into the hub's cache.

    Only files that a checkpoint needs are fetched, and none that is there.

    Args:
        value: Path or id.
        role: `target` or `draft`.
        offline: Do not ask the hub: take what its cache has.
        tell: Told what there is to say about it.
        progress: Told the bytes that have come.

    Raises:
        UsageError: It is empty, or has a NUL.
        UnsupportedError: An id, and `huggingface_hub` is not installed.
        InputError: The repository is no checkpoint.
        HubError: There is no such model, access is refused, or it is not in the cache and nobody
            answers.
    """
    wanted = hub_id(value, role, tell)
    if wanted is None:
        return local_path(value, role)
    repository = Repository(wanted, role, offline=offline, tell=tell)
    sizes = repository.files()
    if sizes is None:
        return _cached(repository)
    _, index = _small(repository, sizes)
    _check_whole(sizes, index, role)
    names = weight_files(sizes, index)
    return repository.fetch([*small_names(sizes), *names], progress)


@contextmanager
def metadata_place(
    value: StrPath, role: str, *, offline: bool = False, tell: Tell = _silent
) -> Iterator[Place]:
    """The place of a checkpoint whose weights nobody reads: of the hub only headers are fetched.

    Args:
        value: Path or id.
        role: `target` or `draft`.
        offline: Do not ask the hub: take what its cache has.
        tell: Told what there is to say about it.

    Raises:
        UsageError: It is empty, or has a NUL.
        UnsupportedError: An id, and `huggingface_hub` is not installed.
        InputError: The repository is no checkpoint.
        HubError: There is no such model, access is refused, or it is not in the cache and nobody
            answers.
    """
    wanted = hub_id(value, role, tell)
    if wanted is None:
        yield Place(local_path(value, role))
        return
    repository = Repository(wanted, role, offline=offline, tell=tell)
    sizes = repository.files()
    if sizes is None:
        yield Place(_cached(repository))
        return
    small, index = _small(repository, sizes)
    _check_stored(sizes, role)
    names = weight_files(sizes, index)
    if not missing_weights(sizes, index) and all((small / name).exists() for name in names):
        yield Place(small)
        return
    with tempfile.TemporaryDirectory(prefix="edgecc-hub-") as scratch:
        yield headers_only(repository, small, names, sizes, Path(scratch))


def small_names(sizes: Mapping[str, int]) -> list[str]:
    """Small files that are as small as any real one."""
    return [name for name in small_files(sizes) if sizes[name] <= MAX_JSON]


def _small(repository: Repository, sizes: Mapping[str, int]) -> tuple[Path, JsonObject | None]:
    """The folder with the small files, and the index if there is one."""
    folder = repository.fetch(small_names(sizes))
    return folder, _index(folder, repository.role)


def _index(folder: Path, role: str) -> JsonObject | None:
    data = Folder(folder, role).read(INDEX, MAX_JSON)
    return None if data is None else parse_object(data, f"{role}/{INDEX}", constants=True)


def _check_stored(sizes: Mapping[str, int], role: str) -> None:
    if not any(name.endswith(".safetensors") for name in sizes):
        raise no_weights(role, sorted(sizes))


def _check_whole(sizes: Mapping[str, int], index: JsonObject | None, role: str) -> None:
    """Say what a repository lacks before gigabytes of the rest are fetched."""
    _check_stored(sizes, role)
    missing = missing_weights(sizes, index)
    if missing and index is not None:
        raise InputError(
            "checkpoint/missing-shard",
            f"the repository lacks {len(missing)} weight files of its index: {missing[0]}",
            where=f"{role}/{INDEX}",
            notes=tuple(missing[1:5]),
            help="use another revision, or another copy of the model",
        )


def _cached(repository: Repository) -> Path:
    """What the cache has of a commit, if that is a whole checkpoint.

    Raises:
        HubError: It is not.
    """
    folder = repository.snapshot()
    names = sorted(entry.name for entry in folder.iterdir() if entry.exists())
    missing = [] if "config.json" in names else ["config.json"]
    missing += missing_weights(names, _index(folder, repository.role))
    missing += [n for n in small_names(repository.listed() or {}) if n not in (*names, *missing)]
    if missing:
        raise repository.lacking(*missing)
    return folder
