"""Where the cache is, and how large it may be."""

from __future__ import annotations

import os
import re
from fractions import Fraction
from pathlib import Path

from edgecc.errors import UsageError

DEFAULT_MAX_BYTES = 50 * 10**9
"""The size limit where none is given: 50G."""

_UNITS = "KMGT"
_SIZE = re.compile(
    rf"([0-9]{{1,18}}(?:\.[0-9]{{1,9}})?) ?(?:([{_UNITS}])(iB|B)?|B)?", re.IGNORECASE
)


def cache_directory(flag: str | os.PathLike[str] | None = None) -> Path:
    """The directory of the cache; it need not exist.

    The first of: the argument, `$EDGECC_CACHE_DIR`, `$XDG_CACHE_HOME/edgecc`, `~/.cache/edgecc`.
    Variables that are empty count as unset, and so does an `XDG_CACHE_HOME` that is not absolute:
    the XDG Base Directory Specification asks for that.

    Raises:
        UsageError: The path is empty or no path (`usage/bad-path`), or nothing is given and the
            user has no home (`cache/no-home`).
    """
    if flag is not None:
        return _checked(os.fspath(flag))
    if own := os.environ.get("EDGECC_CACHE_DIR"):
        return _checked(own)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):
        return Path(shared, "edgecc")
    try:
        return Path.home() / ".cache" / "edgecc"
    except RuntimeError as error:
        raise UsageError(
            "cache/no-home",
            "there is no home directory to keep a cache in",
            help="set EDGECC_CACHE_DIR",
        ) from error


def _checked(text: str) -> Path:
    if not text or "\0" in text:
        raise UsageError(
            "usage/bad-path", f"the cache directory is {repr(text) if text else 'empty'}"
        )
    return Path(text).absolute()


def parse_size(text: str) -> int:
    """Bytes of a size such as `50G`, `1.5 GB`, `500MiB` or `0`.

    `K`, `M`, `G` and `T`, alone or with `B`, are powers of 1000; with `iB` they are powers of 1024.
    Case does not matter, fractions of a byte are dropped.

    Raises:
        UsageError: It is no size (`usage/size`).
    """
    found = _SIZE.fullmatch(text.strip(" "))
    if found is None:
        raise UsageError(
            "usage/size",
            f"{text[:40]!r} is no size",
            help="write bytes, or a number with a unit: 50G, 1.5GB, 500MiB",
        )
    number, unit, suffix = found.groups()
    base = 1024 if (suffix or "").lower() == "ib" else 1000
    power = 0 if unit is None else _UNITS.index(unit.upper()) + 1
    return int(Fraction(number) * base**power)


def format_size(nbytes: int) -> str:
    """A size for people, in powers of 1000: `50.0 GB`, `999 B`."""
    value = float(nbytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 999.95:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
