"""What took long to build, kept on disk: a store of artifacts, content-addressed by their keys.

It knows no engine. A backend describes in a `CacheKey` everything that decides what it would build,
asks `ArtifactCache.get` before building, and calls `ArtifactCache.put` after. Neither ever makes a
compile fail: a cache that cannot be used is a warning and no cache.

`key` has the keys and what tells two of them apart, `entry` the folder of one artifact, `store` the
directory with all of them, `artifact_cache` what backends use, `location` where the directory is
and how sizes are written. `bundles` keeps whole bundles beside them, `pruning` says what goes.
"""

from edgecc.backends.cache.artifact_cache import ArtifactCache, Lookup
from edgecc.backends.cache.bundles import BundleStore
from edgecc.backends.cache.key import CacheKey, code_digest
from edgecc.backends.cache.location import (
    DEFAULT_MAX_BYTES,
    cache_directory,
    format_size,
    parse_size,
)
from edgecc.backends.cache.pruning import Pruned, prune
from edgecc.backends.cache.store import Store

__all__ = [
    "DEFAULT_MAX_BYTES",
    "ArtifactCache",
    "BundleStore",
    "CacheKey",
    "Lookup",
    "Pruned",
    "Store",
    "cache_directory",
    "code_digest",
    "format_size",
    "parse_size",
    "prune",
]
