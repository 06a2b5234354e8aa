"""What the folders of a model hub's cache tell, from their names alone.

```
CACHE/models--ORG--NAME/blobs/<hash>                    the bytes
CACHE/models--ORG--NAME/refs/main                       the commit that a branch was at
CACHE/models--ORG--NAME/snapshots/<commit>/<name>       links to ../../blobs/<hash>
CACHE/blobs/<2 digits>/<hash>                           bytes of several models, linked from theirs
```

The layout is that of `huggingface_hub`; nothing here needs it.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_REPOSITORY = re.compile(r"models--(?P<org>[\w.-]+?)--(?P<name>[\w.-]+)")
COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARED_MARKER = ".huggingface-shared-blobs"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint came from.

    Attributes:
        repository: `org/name`.
        commit: Its version, 40 hex digits: a branch moves, this does not.
    """

    repository: str
    commit: str

    def __str__(self) -> str:
        return f"{self.repository}@{self.commit}"


def origin_of(path: str | os.PathLike[str]) -> Origin | None:
    """The repository and commit a snapshot folder belongs to; None for any other folder."""
    real = Path(os.path.realpath(path))
    if real.parent.name != "snapshots" or not COMMIT.fullmatch(real.name):
        return None
    found = _REPOSITORY.fullmatch(real.parent.parent.name)
    return Origin(f"{found['org']}/{found['name']}", real.name) if found else None


def checkpoint_name(path: str | os.PathLike[str]) -> str:
    """How a checkpoint is called: its repository without the organization, or its folder."""
    origin = origin_of(path)
    if origin is not None:
        return origin.repository.partition("/")[2]
    return Path(os.path.realpath(path)).name


def blob_digest(path: Path) -> str | None:
    """The SHA-256 of the bytes that a file of a snapshot should have.

    Large files alone are named by it; small ones by their hash in git, of 40 digits.

    Returns:
        64 hex digits, or None if the name of the file does not tell.
    """
    real = path.resolve()
    is_blob = any(real.is_relative_to(folder) for folder in blob_folders(path.parent.resolve()))
    return real.name if is_blob and _DIGEST.fullmatch(real.name) else None


def blob_folders(root: Path) -> tuple[Path, ...]:
    """The folders that links of a snapshot may lead to.

    Args:
        root: The snapshot, without symbolic links.
    """
    for parent in root.parents:
        if parent.name == "snapshots":
            repository = parent.parent
            shared = repository.parent / "blobs"
            homes = [repository / "blobs"]
            if _REPOSITORY.fullmatch(repository.name) and (shared / _SHARED_MARKER).is_file():
                homes.append(shared)
            return tuple(home.resolve() for home in homes if home.is_dir())
    return ()
