"""Bundles compiled on demand, kept by everything that decides what they are.

```
ROOT/bundles/<target>-<16 hex digits>/     a bundle
ROOT/bundles/.<16 hex digits>.lock/        locked (flock) by the process that compiles it
```

A bundle appears by renaming, so one that is there is whole; of several processes that want the same
one, the first compiles and the others wait for it. The system releases the lock of a process that
is killed, and what that has left is removed by the next one that compiles: see `staging`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from edgecc.backends.bundle import Bundle
from edgecc.backends.cache import code_digest
from edgecc.backends.staging import lock_directory
from edgecc.backends.storage import storage_errors
from edgecc.errors import BundleError, InputError, UsageError
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
_READ_WHOLE = 2**20
"""Files up to this size count with their content, larger ones with place, size and time."""


def cached_bundle(
    root: Path,
    target: Path,
    draft: Path | None,
    options: Mapping[str, Any],
    build: Build,
) -> Path:
    """The bundle of a target, compiled if it is not there.

    Args:
        root: The cache; made if it is missing.
        target: Folder of the target checkpoint.
        draft: Folder of the draft checkpoint.
        options: What else is compiled by, JSON-compatible.
        build: Compiles.

    Returns:
        Its directory.

    Raises:
        UsageError: The target or the draft is no folder, or the cache lies in one of them.
        InputError: A checkpoint changed while it was compiled.
        ResourceError: The cache cannot be written.
        EdgeccError: What `build` raises; nothing is kept then.
    """
    for checkpoint in (target, draft):
        if checkpoint is not None:
            refuse_inside(root, checkpoint, "--cache-dir")
    digest = bundle_key(target, draft, options)
    folder = root / "bundles"
    path = folder / f"{checkpoint_name(target)}-{digest}"
    guard = folder / f".{digest}.lock"
    with storage_errors(folder):
        guard.mkdir(parents=True, exist_ok=True)
    lock = lock_directory(guard, wait=True)
    try:
        if _is_whole(path):
            return path
        with storage_errors(path):
            _clear(path)
        build(path)
        if bundle_key(target, draft, options) != digest:
            _clear(path)
            raise InputError(
                "cache/changed-checkpoint",
                "a file of the checkpoints changed while they were compiled",
                where=str(target),
                help="start again when nothing writes to them",
            )
    finally:
        if lock is not None:
            os.close(lock)
    return path


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
            state = content or f"{facts.st_size} {facts.st_mtime_ns}"
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


def _clear(path: Path) -> None:
    """Remove what is damaged or wrong: whatever has a name of this cache is the cache's."""
    if os.path.lexists(path):
        shutil.rmtree(path)
