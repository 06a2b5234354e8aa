"""`edgecc cache`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgecc.cli.cache_options import cache_dir_option
from edgecc.cli.options import Command, common
from edgecc.cli.output import Console, counted, print_json, print_text
from edgecc.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from edgecc.backends.cache.pruning import Found, Shelf

_MAX_DAYS = 100_000

json_option = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output."
)


@click.group(name="cache", short_help="Show or prune the cache of built artifacts.")
def command() -> None:
    """Show or prune the cache of what takes long to build.

    `edgecc cache COMMAND --help` has the options.
    """


@command.command(cls=Command, name="ls", short_help="List what is in it.")
@cache_dir_option
@json_option
@common
def ls(console: Console, cache_dir: str | None, as_json: bool) -> int:
    """List engines and bundles of the cache, the one used last at the end."""
    from edgecc.backends.cache import format_size

    directory, shelves = _open(cache_dir)
    with _readable(directory):
        found = [item for shelf in shelves for item in shelf.scan()]
    found.sort(key=lambda item: (item.used_ns, item.path.name))
    total = sum(item.bytes for item in found)
    if as_json:
        entries = [_facts(item) for item in found]
        print_json({"directory": str(directory), "bytes": total, "entries": entries})
    else:
        for item in found:
            print_text(_row(item) + "\n")
    return console.ok(f"{counted(len(found), 'entry')}, {format_size(total)}")


@command.command(cls=Command, name="prune", short_help="Remove what is old, damaged or too much.")
@cache_dir_option
@click.option(
    "--max-size", metavar="SIZE", help="Keep at most this much: 50G, 500MiB.  [default: 50G]"
)
@click.option(
    "--older-than", type=float, metavar="DAYS", help="Remove what was not used for so many days."
)
@click.option("--all", "everything", is_flag=True, help="Remove everything.")
@json_option
@common
def prune(
    console: Console,
    cache_dir: str | None,
    max_size: str | None,
    older_than: float | None,
    everything: bool,
    as_json: bool,
) -> int:
    """Remove damaged entries, leftovers of killed processes, and what is old or too much.

    What was not used for longest goes first. Bundles that are served stay, and so do files that
    are not the cache's own.
    """
    from edgecc.backends.cache import DEFAULT_MAX_BYTES, format_size, parse_size
    from edgecc.backends.cache import prune as prune_shelves

    if everything and (max_size is not None or older_than is not None):
        raise UsageError("usage/contradiction", "--all leaves nothing to choose from")
    if older_than is not None and not 0 <= older_than <= _MAX_DAYS:
        raise UsageError(
            "usage/older-than", f"--older-than {older_than:g} is not between 0 and {_MAX_DAYS} days"
        )
    directory, shelves = _open(cache_dir)
    limit = DEFAULT_MAX_BYTES if max_size is None else parse_size(max_size)
    seconds = None if older_than is None else older_than * 86400
    with _readable(directory):
        done = prune_shelves(shelves, max_bytes=limit, older_than_s=seconds, everything=everything)
    for entry in done.removed:
        console.detail(f"  removed {entry.title}")
    if as_json:
        print_json(
            {
                "directory": str(directory),
                "removed": [entry.path.name for entry in done.removed],
                "damaged": done.damaged,
                "leftovers": done.leftovers,
                "freed_bytes": done.freed_bytes,
                "kept": done.kept,
                "kept_bytes": done.kept_bytes,
            }
        )
    others = [
        counted(number, noun)
        for number, noun in ((done.damaged, "damaged entry"), (done.leftovers, "leftover"))
        if number
    ]
    gone = ", ".join([counted(len(done.removed), "entry"), *others])
    left = f"{counted(done.kept, 'entry')}, {format_size(done.kept_bytes)}"
    return console.ok(f"removed {gone}: {format_size(done.freed_bytes)}; left {left}")


@command.command(cls=Command, name="path", short_help="Say where it is.")
@cache_dir_option
@common
def path(console: Console, cache_dir: str | None) -> int:
    """Print the directory of the cache, whether it exists or not."""
    print_text(f"{_open(cache_dir)[0]}\n")
    return console.ok("cache directory")


def _open(cache_dir: str | None) -> tuple[Path, Sequence[Shelf]]:
    """The cache of the user: where it is, and what it has.

    Raises:
        UsageError: There is no such path.
    """
    from edgecc.backends.cache import BundleStore, Store, cache_directory

    directory = cache_directory(cache_dir)
    return directory, (Store(directory), BundleStore(directory))


@contextmanager
def _readable(directory: Path) -> Iterator[None]:
    """Say which cache it is that cannot be read or changed.

    Raises:
        UsageError: It is no directory.
        ResourceError: The system refuses.
    """
    try:
        yield
    except NotADirectoryError as error:
        raise UsageError("cache/not-a-folder", f"{directory} is no directory") from error
    except OSError as error:
        where = str(error.filename or directory)
        raise ResourceError(
            "cache/unusable", f"the cache cannot be used: {error.strerror}", where=where
        ) from error


def _facts(item: Found) -> dict[str, Any]:
    from edgecc.backends.cache.entry import Entry

    facts: dict[str, Any] = {"entry": item.path.name, "bytes": item.bytes, "damage": item.damage}
    facts["in_use"] = item.in_use
    entry = item.entry
    if entry is None:
        return facts
    if isinstance(entry, Entry):
        facts["key"] = entry.key.to_json()
        facts["files"] = {name: file.bytes for name, file in entry.files.items()}
    else:
        facts["bundle"] = str(entry.path)
    facts["last_used"] = _date(entry.used_ns).isoformat(timespec="seconds")
    return facts


def _row(item: Found) -> str:
    from edgecc.backends.cache import format_size
    from edgecc.backends.cache.entry import Entry
    from edgecc.backends.cache.key import shown

    # Of a bundle, the end of the name tells it from others.
    name = item.path.name.rpartition("-")[2][:12]
    head = f"{name}  {format_size(item.bytes):>9}"
    entry = item.entry
    if entry is None:
        return f"{head}  damaged: {shown(item.damage)}"
    row = f"{head}  {_age(entry.used_ns):>12}  {entry.title}"
    if isinstance(entry, Entry):
        row += f", {shown(entry.key.builder)} {shown(entry.key.builder_version)}"
    return row + (", in use" if item.in_use else "")


def _date(time_ns: int) -> datetime:
    """A time of the file system; years that a calendar does not have become 1970."""
    try:
        return datetime.fromtimestamp(time_ns // 10**9, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


def _age(time_ns: int) -> str:
    seconds = max(0, time.time_ns() - time_ns) // 10**9
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(seconds // length, unit)} ago"
    return "just now"
