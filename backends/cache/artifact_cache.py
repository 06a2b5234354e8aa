"""The cache as backends use it: it may help, and never makes a compile fail."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgecc.backends.cache.entry import (
    DamagedEntryError,
    Entry,
    check_names,
    copy_out,
    read_entry,
    touch,
)
from edgecc.backends.cache.key import CacheKey, differences
from edgecc.backends.cache.location import DEFAULT_MAX_BYTES, cache_directory, format_size
from edgecc.backends.cache.store import Store
from edgecc.backends.storage import is_disk_full
from edgecc.errors import Diagnostic, EdgeccError, ResourceError, Severity, UsageError

_ANOTHER_PLACE = "choose another directory with --cache-dir or EDGECC_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class Lookup:
    """The answer of `ArtifactCache.get`; true if the artifact was there.

    Attributes:
        files: Names of the files that were copied; empty if the artifact has to be built.
        reason: One line for the user: `engine target for sm120 built anew: builder version 1.7.1 ->
            1.7.2`.
    """

    files: tuple[str, ...]
    reason: str

    def __bool__(self) -> bool:
        return bool(self.files)


class ArtifactCache:
    """Artifacts by key.

    Args:
        directory: Where they are kept, see `cache_directory`; need not exist. None keeps nothing.
        max_bytes: After each `put`, what was not used for longest goes until this much is left.
        report: Called with a warning or a note when the cache cannot do what it should.
    """

    def __init__(
        self,
        directory: Path | None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        report: Callable[[Diagnostic], None] = lambda diagnostic: None,
    ) -> None:
        self.max_bytes = max_bytes
        self._store = None if directory is None else Store(directory)
        self._report = report

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        report: Callable[[Diagnostic], None] = lambda diagnostic: None,
    ) -> ArtifactCache:
        """The user's cache; none, with a warning, for a user without a home directory.

        Args:
            directory: Instead of the place that `cache_directory` finds.
            max_bytes: As in the constructor.
            report: As in the constructor.

        Raises:
            UsageError: `directory`, or the environment variable, is no path.
        """
        try:
            place = cache_directory(directory)
        except UsageError as error:
            if error.id != "cache/no-home":
                raise
            report(_warning(error.id, error.diagnostics[0].message, help=_ANOTHER_PLACE))
            return cls(None, max_bytes=max_bytes, report=report)
        return cls(place, max_bytes=max_bytes, report=report)

    @property
    def directory(self) -> Path | None:
        """Where artifacts are kept; None if none are."""
        return None if self._store is None else self._store.directory

    def get(
        self, key: CacheKey, into: Path, *, damage_of: Callable[[Path], str] = lambda folder: ""
    ) -> Lookup:
        """Copy an artifact's files, all or none, after their hashes were checked.

        Args:
            key: What would be built.
            into: An existing folder outside of the cache. Files of the same names are replaced.
            damage_of: What is wrong with the files in that folder, which hashes do not tell; empty
                if nothing is.

        Returns:
            The names of the files, or why the artifact has to be built.

        Raises:
            ResourceError: `into` cannot be written.
        """
        if self._store is None:
            return _miss(key, "no cache is used")
        path = self._store.path(key)
        damage = ""
        for _ in range(2):  # another process may replace the entry while it is read: look again
            try:
                entry = read_entry(path)
                copy_out(entry, into)
                if finding := damage_of(into):
                    raise DamagedEntryError(finding)
            except FileNotFoundError:
                return _miss(key, self._explain(self._store, key))
            except DamagedEntryError as error:
                damage = str(error)
            except OSError as error:
                self._unusable(error, "read")
                return _miss(key, "the cache cannot be read")
            else:
                touch(path)
                return Lookup(tuple(entry.files), f"{key.title} taken from the cache")
        self._discard(self._store, path, damage)
        return _miss(key, f"the cached one is damaged ({damage})")

    def put(self, key: CacheKey, files: Mapping[str, Path]) -> bool:
        """Keep copies of an artifact's files.

        Args:
            key: What they were built for.
            files: Where they are, by the names that `get` gives them.

        Returns:
            Whether they are kept now; if not, the reason was reported.

        Raises:
            InternalError: A name is no plain file name.
        """
        check_names(files)
        if self._store is None:
            return False
        try:
            nbytes = sum(path.stat().st_size for path in files.values())
            if nbytes > self.max_bytes:
                limit = f"its size {format_size(nbytes)} is over the limit"
                text = f"{key.title} is not kept: {limit} {format_size(self.max_bytes)}"
                self._report(Diagnostic("cache/too-large", text, severity=Severity.NOTE))
                return False
            self._store.add(key, files)
        except (OSError, ResourceError) as error:
            self._unusable(error, "written")
            return False
        try:
            self._store.prune(max_bytes=self.max_bytes)
        except OSError as error:
            self._unusable(error, "pruned")
        return True

    def _explain(self, store: Store, key: CacheKey) -> str:
        """Why nothing is there for a key: how the most similar entry differs."""
        try:
            found = [f.entry for f in store.scan() if isinstance(f.entry, Entry)]
        except OSError as error:
            self._unusable(error, "read")
            return "the cache cannot be read"
        nearest = _nearest(key, found)
        if nearest is None:
            return "none is in the cache yet"
        return "; ".join(differences(nearest.key, key))

    def _discard(self, store: Store, path: Path, damage: str) -> None:
        outcome = "it was removed"
        try:
            store.remove(path)
        except OSError as error:
            outcome = f"it cannot be removed: {error.strerror}"
        text = f"an entry of the cache is damaged: {damage}; {outcome}"
        self._report(Diagnostic("cache/damaged", text, where=str(path), severity=Severity.NOTE))

    def _unusable(self, error: OSError | EdgeccError, action: str) -> None:
        """Say that the cache cannot be read, written or pruned."""
        cause = error.__cause__ if isinstance(error, EdgeccError) else error
        reason = (isinstance(cause, OSError) and cause.strerror) or str(cause or error)
        id, help = "cache/unusable", _ANOTHER_PLACE
        if is_disk_full(cause):
            id, help = "cache/disk-full", f"make room with edgecc cache prune, or {_ANOTHER_PLACE}"
        text = f"the cache cannot be {action}: {reason}"
        self._report(_warning(id, text, where=str(self.directory), help=help))


def _warning(id: str, message: str, where: str = "", help: str = "") -> Diagnostic:
    return Diagnostic(id, message, where, help=help, severity=Severity.WARNING)


def _miss(key: CacheKey, why: str) -> Lookup:
    return Lookup((), f"{key.title} built anew: {why}")


def _nearest(key: CacheKey, entries: list[Entry]) -> Entry | None:
    """The entry of the same kind and name with the fewest differences; of several, the newest."""
    wanted = key.kind, key.name
    similar = [e for e in entries if (e.key.kind, e.key.name) == wanted and e.key != key]
    return min(similar, key=lambda e: (len(differences(e.key, key)), -e.used_ns), default=None)
