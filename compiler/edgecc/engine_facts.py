"""What a bundle says about built engines, for `edgecc inspect`: as data, and as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from edgecc.backends.base import Role
from edgecc.backends.cache import cache_directory
from edgecc.backends.interface import DTYPES
from edgecc.backends.tensorrt.artifact import check_engines
from edgecc.backends.tensorrt.library import NAMES
from edgecc.devices import DEVICES
from edgecc.errors import UsageError


def engine_facts(artifacts: Mapping[str, Any]) -> dict[str, Any]:
    """Engines by `device/graph`, and what they run on; nothing for backends that build none.

    Args:
        artifacts: Of the manifest.

    Raises:
        BundleError: The part of a device is damaged.
    """
    built = {name: a for name, a in artifacts.items() if a["backend"] == "tensorrt"}
    for artifact in built.values():
        check_engines(artifact)
    if not built:
        return {}
    return {
        "runs_on": {device: _runs_on(artifact) for device, artifact in built.items()},
        "engines": {
            f"{device}/{name}": {**engine, "in_cache": _in_cache(engine.get("key"))}
            for device, artifact in built.items()
            for name, engine in artifact["engines"].items()
        },
    }


def _runs_on(artifact: Mapping[str, Any]) -> dict[str, Any]:
    """GPUs that an artifact is for, and who built it."""
    numbers = artifact["compute_capabilities"]
    return {
        "gpus": {f"{n // 10}.{n % 10}": _gpus(n) for n in numbers},
        "builder": artifact["library"],
        "builder_version": artifact["library_version"],
        "computes_in": artifact["compute_type"],
        "weights": artifact["weights"],
        "state_bytes": _state_bytes(artifact),
    }


def _state_bytes(artifact: Mapping[str, Any]) -> int:
    """Memory of a sequence for states and logs: each has two places, see `TrtExecutable`."""
    ports = (p for entry in artifact["entries"].values() for p in entry["inputs"])
    held = (p for p in ports if p["role"] in (Role.STATE, Role.STATE_LOG))
    sizes = (int(prod(p["shape"][1:])) * DTYPES[p["dtype"]].itemsize for p in held)
    return 2 * sum(sizes)


def _gpus(number: int) -> str:
    """Names of the GPUs with one compute capability."""
    found = (d.description for d in DEVICES.values() if d.compute_capabilities == (number,))
    return next(found, "unknown to this edgecc")


def _in_cache(key: str | None) -> bool:
    """Whether this machine's cache has an engine, so that compiling again takes it from there."""
    try:
        return key is not None and (cache_directory() / key).is_dir()
    except (UsageError, OSError):
        return False


def engine_lines(facts: Mapping[str, Any], *, weights: bool) -> Iterator[str]:
    """The facts as text.

    Args:
        facts: Of `engine_facts`.
        weights: List every weight, not only how many there are of each precision.
    """
    yield "runs on"
    for device, found in facts["runs_on"].items():
        for number, gpus in found["gpus"].items():
            yield f"  {device}: compute capability {number}, {gpus}"
        product = NAMES.get(found["builder"], (found["builder"], ""))[0]
        yield (
            f"  {device}: built by {product} {found['builder_version']}, computes in "
            f"{found['computes_in']}, weights: {found['weights']}"
        )
        if found["state_bytes"]:
            held = f"{found['state_bytes']:,} bytes a sequence"
            yield f"  {device}: states and their logs, twice: {held}"
    for name, engine in facts["engines"].items():
        yield f"engine {name}"
        yield from (f"  {line}" for line in _lines(engine, weights))


def _lines(engine: Mapping[str, Any], weights: bool) -> Iterator[str]:
    held = f"{engine['bytes']:,} bytes, {engine['weight_bytes']:,} of them weights"
    kept = "in the cache of this machine" if engine["in_cache"] else "not in this machine's cache"
    yield f"{engine['file']}: {held}; {kept}"
    for kind in ("inputs", "outputs"):
        yield from (f"{kind.removesuffix('s'):<7} {_port(port)}" for port in engine[kind])
    for profile in engine["profiles"]:
        for name, (low, best, high) in profile["shapes"].items():
            span = f"{_shape(low)} to {_shape(high)}, best {_shape(best)}"
            yield f"profile {profile['name']}: {name} {span}"
    if engine["bound"]:
        yield f"bound at load: {len(engine['bound'])} arrays, {engine['bound_bytes']:,} bytes"
    if weights:
        yield from (f"weight  {_weight(name, use)}" for name, use in engine["weights"].items())
    else:
        yield from _summary(engine["weights"])


def _summary(weights: Mapping[str, Any]) -> Iterator[str]:
    counts = Counter(use["precision"] for use in weights.values())
    for precision, count in sorted(counts.items()):
        size = sum(_size(use) for use in weights.values() if use["precision"] == precision)
        yield f"weights {count} x {precision}, {size:,} bytes"


def _weight(name: str, use: Mapping[str, Any]) -> str:
    where = "bound at load, " if use["bound_bytes"] else ""
    return f"{name}: {use['precision']}, {where}{_size(use):,} bytes, from {use['origin']}"


def _size(use: Mapping[str, Any]) -> int:
    return int(use["bytes"]) + int(use["bound_bytes"])


def _port(port: Mapping[str, Any]) -> str:
    alias = f", overwrites {port['alias']}" if port.get("alias") else ""
    return f"{port['name']}: {port['dtype']}{_shape(port['shape'])}{alias}"


def _shape(sizes: Sequence[int]) -> str:
    """`[1, ?, 256]`; a size that calls choose is a question mark."""
    return "[" + ", ".join("?" if size < 0 else str(size) for size in sizes) + "]"
