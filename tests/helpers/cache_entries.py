"""Keys and artifacts for tests of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgecc.backends.cache import ArtifactCache, CacheKey, Store
from edgecc.errors import Diagnostic


def key(**changes: Any) -> CacheKey:
    """A key; fields can be changed."""
    values: dict[str, Any] = {
        "kind": "engine",
        "name": "target",
        "device": "sm120",
        "ir": "a" * 64,
        "lowering": "b" * 64,
        "builder": "tensorrt_rtx",
        "builder_version": "1.7.1",
        "weights": {"target.head": "c" * 64, "target.norm": "d" * 64},
        "flags": {"weights": "embed"},
    }
    return CacheKey(**values | changes)


class Bench:
    """A cache in a folder, what it reported, and a place to build and to copy to."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.root = root
        self.reported: list[Diagnostic] = []
        self.cache = ArtifactCache(root / "cache", report=self.reported.append, **options)
        self.store = Store(root / "cache")
        self.into = root / "into"
        self.into.mkdir(parents=True, exist_ok=True)

    def put(self, key: CacheKey, content: bytes = b"engine", name: str = "engine.plan") -> bool:
        """Keep an artifact of one file."""
        path = self.root / "built"
        path.write_bytes(content)
        return self.cache.put(key, {name: path})

    def get(self, key: CacheKey, name: str = "engine.plan") -> bytes | None:
        """The content of that file; None if it would have to be built."""
        before = sorted(self.into.iterdir())
        found = self.cache.get(key, self.into)
        if not found:
            assert sorted(self.into.iterdir()) == before
            return None
        assert found.files == (name,)
        content = (self.into / name).read_bytes()
        (self.into / name).unlink()
        assert not list(self.into.iterdir())
        return content

    def ids(self) -> list[str]:
        """Ids of what was reported."""
        return [diagnostic.id for diagnostic in self.reported]

    def names(self) -> set[str]:
        """What lies in the folder of the cache."""
        return {path.name for path in (self.root / "cache").iterdir()}
