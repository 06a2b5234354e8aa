"""Checks what a manifest says about engines, before anything is opened or shown.

A bundle may come from anywhere: whatever it says, opening it works or raises BundleError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from edgecc.backends.artifact import check_artifact, damaged_artifact
from edgecc.backends.base import Role
from edgecc.backends.interface import CARRIED
from edgecc.backends.schema import validator


def check_engines(artifact: Mapping[str, Any]) -> None:
    """Check an artifact against the schema, and its parts against each other.

    Args:
        artifact: `artifacts.<device>` of the manifest.

    Raises:
        BundleError: It breaks a rule; the first finding is named.
    """
    check_artifact(artifact, __package__, "engines")
    finding = next(_contradictions(artifact), None)
    if finding is not None:
        raise damaged_artifact(finding)


def engine_damage(facts: Any) -> str:
    """What is wrong with `engines.<graph>` as the cache keeps it; empty if nothing is."""
    schema = validator(__package__, "artifact.schema.json")
    assert isinstance(schema.schema, Mapping)
    engine = {"$ref": "#/$defs/engine", "$defs": schema.schema["$defs"]}
    error = next(iter(schema.evolve(schema=engine).iter_errors(facts)), None)
    return f"{error.json_path}: {error.message}"[:300] if error else ""


def _contradictions(artifact: Mapping[str, Any]) -> Iterator[str]:
    engines = artifact["engines"]
    for name, engine in engines.items():
        for finding in _bad_profiles(engine):
            yield f"engine {name}: {finding}"
    for entry, ports in artifact["entries"].items():
        taken = {v for step in artifact["programs"].get(entry, ()) for v in step["inputs"].values()}
        for finding in _bad_inputs(ports, taken, artifact["min_rows"]):
            yield f"entry {entry}: {finding}"
    for entry, program in artifact["programs"].items():
        for step in program:
            for finding in _bad_step(step, engines[step["graph"]]):
                yield f"entry {entry}: {finding}"


def _bad_inputs(
    ports: Mapping[str, Sequence[Mapping[str, Any]]], taken: set[str], rows: int
) -> Iterator[str]:
    """An engine takes each input, what stays is updated, and a log holds the rows of a round."""
    updated = {o["alias"] for o in ports["outputs"]}
    for port in ports["inputs"]:
        name, role = port["name"], port["role"]
        if name not in taken:
            yield f"no engine takes the input {name!r}"
        if role in CARRIED and name not in updated:
            yield f"nothing updates {name!r}"
        if role == Role.STATE_LOG and port["shape"][1] < rows:
            yield f"log {name!r} has {port['shape'][1]} rows, a round has {rows}"


def _bad_profiles(engine: Mapping[str, Any]) -> Iterator[str]:
    """A profile has a range for each input with a size that calls choose, and for no other."""
    inputs = {i["name"]: i["shape"] for i in engine["inputs"]}
    chosen = {name for name, shape in inputs.items() if -1 in shape}
    profiles = engine["profiles"]
    if chosen and not profiles:
        yield f"no profile has shapes of {min(chosen)!r}"
    for profile in profiles:
        shapes = profile["shapes"]
        if shapes.keys() != chosen:
            yield f"profile {profile['name']!r} has shapes of other inputs than {sorted(chosen)}"
            return
        for name, ranges in shapes.items():
            if not all(_is_of(shape, inputs[name]) for shape in ranges):
                yield f"profile {profile['name']!r} has no shapes of {name!r}: {ranges}"


def _is_of(shape: Sequence[int], open_shape: Sequence[int]) -> bool:
    """Whether a shape is an open one with its open sizes chosen."""
    return len(shape) == len(open_shape) and all(
        size >= 0 and want in (size, -1) for size, want in zip(shape, open_shape, strict=True)
    )


def _bad_step(step: Mapping[str, Any], engine: Mapping[str, Any]) -> Iterator[str]:
    """A step passes each input of its engine, and takes nothing but outputs."""
    inputs = {i["name"] for i in engine["inputs"]}
    outputs = {o["name"] for o in engine["outputs"]}
    if differing := step["inputs"].keys() ^ inputs:
        yield f"engine {step['graph']} and its step differ in the input {min(differing)!r}"
    if unknown := step["outputs"].keys() - outputs:
        yield f"engine {step['graph']} has no output {min(unknown)!r}"
