"""Keys: everything that decides what a build gives, and what tells two keys apart."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from edgecc.errors import InternalError

VERSION = 1
"""Part of every digest: a change of what keys or entries mean makes old entries unreachable."""

_TABLES = ("weights", "flags")
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Everything that decides what a build gives. Keys with equal fields have equal digests.

    Attributes:
        kind: What is built, as a word: `engine`.
        name: Which one of a bundle: `target`, `draft`, `head`.
        device: What it is built for: `sm120`.
        ir: Digest of the lowered graph, such as `edgecc.ir.compare.fingerprint`.
        lowering: Digest of what turns the graph into the builder's input: see `code_digest`.
        builder: Name of the builder: `tensorrt_rtx`.
        builder_version: Its full version.
        weights: Digest of the bytes of every weight that becomes part of the artifact, by symbol.
            Weights that are bound at load time are not in it.
        flags: Everything else the builder is told, by name.

    Raises:
        InternalError: A field is no text, or cannot be written as UTF-8 (`cache/bad-key`).
    """

    kind: str
    name: str
    device: str
    ir: str
    lowering: str
    builder: str
    builder_version: str
    weights: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _TABLES:  # copies: a key never changes
            object.__setattr__(self, name, dict(getattr(self, name)))
        for name, value in self.to_json().items():
            texts = [*value, *value.values()] if name in _TABLES else [value]
            if not all(_is_text(text) for text in texts):
                raise InternalError("cache/bad-key", f"{name} of a cache key is no text: {value!r}")

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def digest(self) -> str:
        """SHA-256 of all fields in a canonical form, in hex: the name of the entry."""
        text = json.dumps([VERSION, self.to_json()], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The fields by name, for `json.dumps`."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_json(cls, value: object) -> CacheKey:
        """The key that `to_json` gave.

        Raises:
            ValueError: `value` is nothing that `to_json` gives.
        """
        expected = {f.name for f in fields(cls)}
        if not isinstance(value, dict) or set(value) != expected:
            raise ValueError(f"the key needs exactly the fields {', '.join(sorted(expected))}")
        if not all(isinstance(value[name], dict) for name in _TABLES):
            raise ValueError("weights and flags of the key must be objects")
        try:
            return cls(**value)
        except InternalError as error:
            raise ValueError(str(error)) from error

    @property
    def title(self) -> str:
        """What the key is for, in words: `engine target for sm120`."""
        return f"{self.kind} {self.name} for {self.device}"


def _is_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def differences(old: CacheKey, new: CacheKey) -> list[str]:
    """What changed from one key to another, one phrase each; empty if they are equal.

    Digests are not shown: that they differ is all they say.
    """
    found = []
    for name in ("kind", "name", "device", "builder", "builder_version"):
        a, b = getattr(old, name), getattr(new, name)
        if a != b:
            found.append(f"{name.replace('_', ' ')} {shown(a)} -> {shown(b)}")
    for flag in sorted(old.flags.keys() | new.flags.keys()):
        a, b = old.flags.get(flag), new.flags.get(flag)
        if a != b:
            found.append(f"flag {shown(flag)} {shown(a)} -> {shown(b)}")
    if old.ir != new.ir:
        found.append("the graph changed")
    if old.lowering != new.lowering:
        found.append("edgecc's lowering changed")
    symbols = sorted(old.weights.keys() | new.weights.keys())
    changed = [s for s in symbols if old.weights.get(s) != new.weights.get(s)]
    if changed:
        names = ", ".join(shown(symbol) for symbol in changed[:_MAX_NAMED])
        more = ", ..." if len(changed) > _MAX_NAMED else ""
        found.append(f"{len(changed)} of {len(symbols)} weights changed ({names}{more})")
    return found


def shown(text: str | None) -> str:
    """A value in a message: short, on one line, with nothing a terminal would obey."""
    if text is None:
        return "unset"
    short = text if len(text) <= 60 else text[:57] + "..."
    return short if short.isprintable() and short else repr(short)


def code_digest(*names: str) -> str:
    """SHA-256 of the Python sources of packages or modules, in hex.

    What a compiler builds depends on its own code, and a version number does not change while
    somebody works on it.

    Args:
        names: Packages, which count with everything below them, or modules: `edgecc.backends.onnx`.

    Raises:
        InternalError: There are no sources under a name (`cache/no-source`).
    """
    total = hashlib.sha256()
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None or not Path(spec.origin).is_file():
            raise InternalError("cache/no-source", f"{name} has no Python source")
        origin = Path(spec.origin)
        is_package = spec.submodule_search_locations is not None
        files = sorted(origin.parent.rglob("*.py")) if is_package else [origin]
        for path in files:
            content = path.read_bytes()
            place = f"{name} {path.relative_to(origin.parent).as_posix()} {len(content)}\n"
            total.update(place.encode())
            total.update(content)
    return total.hexdigest()
