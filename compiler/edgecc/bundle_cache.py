"""Bundles compiled on demand, kept by everything that decides what they are.

Where they are kept, and what keeps processes apart, is in `edgecc.backends.cache.bundles`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edgecc.backends.bundle import Bundle
from edgecc.backends.cache import BundleStore, code_digest
from edgecc.backends.storage import storage_errors
from edgecc.errors import BundleError, InputError, ResourceError, UsageError
from edgecc.hub_layout import checkpoint_name, origin_of
from edgecc.paths import refuse_inside

Build = Callable[[Path], object]
"""Compiles into a directory, which appears only when it is complete."""

_SOURCES = ("edgecc", "edgecc.backends", "edgecc.frontends", "edgecc.passes")
_PACKAGES = (
    "ml_dtypes",
    "numpy",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "tensorrt",
    "tensorrt-rtx",
    "tokenizers",
)
_ATTEMPTS = 8
_READ_WHOLE = 2**20
"""Files up to this size count with their content, larger ones with place, size and times."""


@contextmanager
def cached_bundle(
    root: Path,
    target: Path,
    draft: Path | None,
    options: Mapping[str, Any],
    build: Build,
    on_wait: Callable[[], None] = lambda: None,
) -> Iterator[Path]:
    """The bundle of a target, compiled if it is not there; it stays while the block runs.

    Args:
        root: The cache; made if it is missing.
        target: Folder of the target checkpoint.
        draft: Folder of the draft checkpoint.
        options: What else is compiled by, JSON-compatible.
        build: Compiles.
        on_wait: Called before waiting for another process that compiles the same bundle.

    Yields:
        Its directory.

    Raises:
        UsageError: The target or the draft is no folder, or the cache lies in one of them.
        InputError: A checkpoint changed while it was compiled.
        ResourceError: The cache cannot be written, or others remove its bundles all the time.
        EdgeccError: What `build` raises; nothing is kept then.
    """
    for checkpoint in (target, draft):
        if checkpoint is not None:
            refuse_inside(root, checkpoint, "--cache-dir")
    digest = bundle_key(target, draft, options)
    store = BundleStore(root)
    path = store.path(checkpoint_name(target), digest)
    for _ in range(_ATTEMPTS):
        with store.held(path) as there:
            if there and _is_whole(path):
                with suppress(OSError):  # of a process that was killed after it had published
                    store.sweep()
                yield path
                return
        with store.workspace(digest, on_wait) as work:
            # Whoever had the workspace before may have made it.
            if _is_whole(path):
                continue
            made = work / path.name
            build(made)
            if bundle_key(target, draft, options) != digest:
                raise InputError(
                    "cache/changed-checkpoint",
                    "a file of the checkpoints changed while they were compiled",
                    where=str(target),
                    help="start again when nothing writes to them",
                )
            store.publish(made, path)
    raise ResourceError(
        "cache/contended",
        "other processes remove the bundle whenever it is there",
        where=str(path),
        help="choose another directory with --cache-dir or EDGECC_CACHE_DIR",
    )


def bundle_key(target: Path, draft: Path | None, options: Mapping[str, Any]) -> str:
    """16 hex digits that follow from all that decides what a compile gives.

    These are the files of the checkpoints, their commits on the hub, the options, our own code, and
    the versions of the packages that compute or build something.

    Raises:
        UsageError: The target or the draft is no folder.
        ResourceError: It cannot be read.
    """
    parts = {
        "origins": [None if p is None else str(origin_of(p)) for p in (target, draft)],
        "target": _files(target, "target"),
        "draft": None if draft is None else _files(draft, "draft"),
        "options": dict(options),
        "code": code_digest(*_SOURCES),
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _files(folder: Path, what: str) -> list[list[str]]:
    """Each file: its name, where it really is, and what tells it from another version."""
    if not folder.is_dir():
        raise UsageError(
            "usage/not-a-folder",
            f"the {what} {folder} is no folder of a checkpoint",
            help="compile it first, and serve the bundle",
        )
    found = []
    with storage_errors(folder, "read"):
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            facts = path.stat()
            content = ""
            if facts.st_size <= _READ_WHOLE:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            # The time of the last change of the inode cannot be set: it tells a file that was
            # written again and given its old time.
            state = content or f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns}"
            found.append([path.relative_to(folder).as_posix(), os.path.realpath(path), state])
    return found


def _version(package: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def _is_whole(path: Path) -> bool:
    """Whether there is a bundle that nobody has damaged; another one is compiled in its place."""
    try:
        Bundle.open(path)
    except BundleError:
        return False
    return True
