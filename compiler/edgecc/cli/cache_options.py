"""Where the cache is and how much it may keep, for commands that build what is worth keeping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from edgecc.errors import Diagnostic, UsageError

if TYPE_CHECKING:
    from edgecc.backends.cache import ArtifactCache

F = TypeVar("F", bound=Callable[..., Any])

cache_dir_option = click.option(
    "--cache-dir",
    metavar="DIR",
    help="Where the cache is.  [default: $EDGECC_CACHE_DIR or ~/.cache/edgecc]",
)


def cache_options(function: F) -> F:
    """Add `--cache-dir`, `--cache-max-size` and `--no-cache` to a command: see `open_cache`."""
    limit = click.option(
        "--cache-max-size",
        metavar="SIZE",
        help="Keep at most this much: 50G, 500MiB.  [default: 50G]",
    )
    switch = click.option("--no-cache", is_flag=True, help="Build anew, and keep nothing.")
    return cache_dir_option(limit(switch(function)))


def open_cache(flags: Mapping[str, Any], report: Callable[[Diagnostic], None]) -> ArtifactCache:
    """The cache that the flags of `cache_options` ask for.

    Args:
        flags: `cache_dir`, `cache_max_size` and `no_cache`.
        report: Called with warnings and notes about the cache.

    Raises:
        UsageError: A value is bad, or flags contradict each other.
    """
    from edgecc.backends.cache import DEFAULT_MAX_BYTES, ArtifactCache, parse_size

    size, directory = flags["cache_max_size"], flags["cache_dir"]
    max_bytes = DEFAULT_MAX_BYTES if size is None else parse_size(size)
    if not flags["no_cache"]:
        return ArtifactCache.open(directory, max_bytes=max_bytes, report=report)
    for name, value in (("--cache-dir", directory), ("--cache-max-size", size)):
        if value is not None:
            raise UsageError("usage/contradiction", f"{name} and --no-cache")
    return ArtifactCache(None)
