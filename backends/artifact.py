"""Checks the engine's part of a manifest before anything is opened.

A bundle may come from anywhere: whatever it says, opening it works or raises BundleError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgecc.backends.base import Role
from edgecc.backends.interface import CARRIED, slot_name
from edgecc.backends.schema import validator
from edgecc.errors import BundleError

_ROLES = frozenset(Role)
_WITH_STATES = frozenset(
    {Role.CACHE_LENGTH, Role.STATE_LOG, Role.REPLAY_LENGTH, Role.COMMIT_LENGTH}
)
"""Inputs without which states cannot be started, or taken back."""


def check_artifact(artifact: Mapping[str, Any], package: str, parts: str) -> None:
    """Check an artifact against its engine's schema, and its parts against each other.

    Args:
        artifact: `artifacts.<device>` of the manifest.
        package: The engine's package, which has `artifact.schema.json`.
        parts: Where the artifact has what programs run: `models`, `engines`.

    Raises:
        BundleError: It breaks a rule; the first finding is named.
    """
    schema = validator(package, "artifact.schema.json")
    error = next(iter(schema.iter_errors(artifact)), None)
    if error is not None:
        finding = f"{error.json_path}: {error.message}"
    else:
        finding = next(_contradictions(artifact, parts), "")
    if finding:
        raise damaged_artifact(finding)


def damaged_artifact(finding: str) -> BundleError:
    """The error about an artifact that breaks a rule."""
    return BundleError(
        "bundle/artifact",
        f"the engine's part of the manifest is damaged: {finding[:300]}",
        where="bundle.json",
        help="copy the bundle again from where it was made, or compile it again",
    )


def _contradictions(artifact: Mapping[str, Any], parts: str) -> Iterator[str]:
    """What an artifact that follows the schema says about itself that cannot be true."""
    for name, entry in artifact["entries"].items():
        program = artifact["programs"].get(name, ())
        slots = range(artifact.get("max_batch_size", 1))
        made = {i["name"] for i in entry["inputs"]}
        made |= {
            slot_name(i["name"], slot)
            for i in entry["inputs"]
            if i["role"] == Role.KV_CACHE
            for slot in slots
        }
        for step in program:
            if step["graph"] not in artifact[parts]:
                yield f"entry {name} runs a model {step['graph']!r} that does not exist"
            if lost := set(step["inputs"].values()) - made:
                yield f"entry {name}: nothing makes the value {min(lost)!r}"
            made |= set(step["outputs"].values())
        times = Counter(value for step in program for value in {*step["outputs"].values()})
        for value, count in times.items():
            if count > 1:
                yield f"entry {name}: the value {value!r} is made {count} times"
        for finding in _bad_ports(entry["inputs"], entry["outputs"], made):
            yield f"entry {name}: {finding}"
        for finding in _bad_updates(entry["inputs"], entry["outputs"]):
            yield f"entry {name}: {finding}"


def _bad_ports(
    inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]], made: set[str]
) -> Iterator[str]:
    carried = {i["name"] for i in inputs if i["role"] in CARRIED}
    for port in (*inputs, *outputs):
        if port["role"] not in _ROLES:
            yield f"unknown role {port['role']!r}"
        if port["role"] == Role.KV_CACHE and not _is_cache(port["shape"]):
            yield f"cache {port['name']!r} has shape {port['shape']}"
        if port["role"] in (Role.STATE, Role.STATE_LOG) and not _is_carried(port["shape"]):
            yield f"state {port['name']!r} has shape {port['shape']}"
    roles = {i["role"] for i in inputs}
    if Role.STATE in roles and (lost := _WITH_STATES - roles):
        yield f"it has states and no input {min(lost)}"
    for port in outputs:
        if not made & {port["value"], slot_name(port["value"], 0)}:
            yield f"nothing makes the value {port['value']!r}"
        if port["alias"] is not None and port["alias"] not in carried:
            yield f"{port['name']!r} overwrites no cache or state {port['alias']!r}"


def _bad_updates(
    inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """What is carried from call to call without being what the last call made of it."""
    given = {i["name"] for i in inputs}
    updates = [o for o in outputs if o["alias"] is not None]
    aliases = Counter(o["alias"] for o in updates)
    for port in inputs:
        if port["role"] in CARRIED and aliases[port["name"]] != 1:
            yield f"{aliases[port['name']]} outputs overwrite {port['name']!r}, expected one"
    values = Counter(o["value"] for o in updates)
    for port in updates:
        if port["value"] in given - {port["alias"]} or values[port["value"]] > 1:
            yield f"{port['value']!r} is no update of {port['alias']!r}"


def _is_cache(shape: Sequence[int | str]) -> bool:
    """Sequences, KV heads, rows, head dim: all but the first are numbers."""
    return len(shape) == 4 and _is_carried(shape)


def _is_carried(shape: Sequence[int | str]) -> bool:
    """Sequences, then sizes that are numbers."""
    return len(shape) > 1 and all(isinstance(d, int) and d > 0 for d in shape[1:])
