"""The manifest of a bundle: reading `bundle.json` and checking it.

`bundle.schema.json` is the exact definition. Whatever the file holds, these functions return or
raise BundleError: a bundle may come from anywhere.
"""

from __future__ import annotations

import itertools
import json
import re
import reprlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from edgecc.backends.schema import validator
from edgecc.backends.storage import storage_errors
from edgecc.errors import BundleError, Diagnostic
from edgecc.prompt_lookup import NGRAM

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError

FORMAT = "edgecc-bundle"
VERSION = 1
MANIFEST = "bundle.json"

_IMAGE_ROLE = "image_features"
_MAX_MANIFEST_BYTES = 64 << 20
_MAX_FINDINGS = 8
_COMPILE_AGAIN = "compile it again: edgecc compile TARGET -o DIR"
_COPY_AGAIN = "copy the bundle again from where it was made, or compile it again"


def load_manifest(directory: Path) -> dict[str, Any]:
    """Read `bundle.json` of a directory and make sure that it is one of ours, of any version.

    Raises:
        BundleError: The directory is no bundle, or `bundle.json` is not proper JSON.
        ResourceError: `bundle.json` cannot be read.
    """
    path = directory / MANIFEST
    with storage_errors(path, "read"):
        if not path.is_file():
            raise BundleError(_not_a_bundle(directory))
        with path.open("rb") as file:
            data = file.read(_MAX_MANIFEST_BYTES + 1)
    try:
        if len(data) > _MAX_MANIFEST_BYTES:
            raise ValueError(f"it is larger than {_MAX_MANIFEST_BYTES} bytes")
        found = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as error:
        raise BundleError(
            "bundle/bad-json",
            f"the manifest cannot be read: {error}",
            where=str(path),
            help=_COPY_AGAIN,
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        value = found.get("format") if isinstance(found, dict) else found
        raise BundleError(
            "bundle/not-a-bundle",
            f"not an edgecc bundle: `format` is {reprlib.repr(value)}, expected {FORMAT!r}",
            where=str(path),
            help="make one with: edgecc compile TARGET -o DIR",
        )
    return found


def check_version(manifest: Mapping[str, Any], path: Path) -> None:
    """Check that this edgecc reads the version of a manifest.

    Args:
        manifest: The manifest, of any version.
        path: Where it comes from, for messages.

    Raises:
        BundleError: It is of another version.
    """
    version = manifest.get("version")
    if type(version) is not int:
        raise BundleError(
            "bundle/invalid-manifest",
            f"`version` is {reprlib.repr(version)}, expected an integer",
            where=str(path),
            help=_COPY_AGAIN,
        )
    if version == VERSION:
        return
    reads = f"this edgecc reads version {VERSION}"
    if version < VERSION:
        raise BundleError(
            "bundle/unknown-version",
            f"bundle version {version} is not known; {reads}",
            where=str(path),
            help=_COMPILE_AGAIN,
        )
    producer = manifest.get("producer")
    match = re.fullmatch(r"edgecc (\d[\w.+]{0,40})", producer if isinstance(producer, str) else "")
    needed = f"edgecc {match[1]}" if match else "a newer edgecc"
    install = f"pip install 'edgecc>={match[1]}'" if match else "pip install --upgrade edgecc"
    raise BundleError(
        "bundle/newer-version",
        f"bundle version {version} needs {needed}; {reads}",
        where=str(path),
        help=f"upgrade with: {install}",
    )


def check_manifest(manifest: Mapping[str, Any], path: Path) -> None:
    """Check a manifest of this version against the schema, and its parts against each other.

    Args:
        manifest: The manifest as `json.loads` gives it.
        path: Where it comes from, for messages.

    Raises:
        BundleError: It breaks a rule; the first few findings are listed.
    """
    schema = validator("edgecc.backends", "bundle.schema.json")
    try:
        errors = itertools.islice(schema.iter_errors(manifest), _MAX_FINDINGS)
        messages = [_schema_message(error) for error in errors]
    except RecursionError:
        messages = ["values are nested too deeply"]
    if not messages:
        for name in manifest["files"]:
            check_relative_path(name, path)
        messages = list(itertools.islice(_contradictions(manifest), _MAX_FINDINGS))
    raise_findings([damaged("bundle/invalid-manifest", m, path) for m in sorted(messages)])


def check_relative_path(relative: str, where: Path) -> None:
    """Check that a path of the manifest stays below the bundle, on every operating system.

    Args:
        relative: The path, with `/` as separator.
        where: The file that holds it, for messages.

    Raises:
        BundleError: It is empty or absolute, leaves the bundle, names the manifest, or holds
            characters that no file of a bundle has.
    """
    parts = relative.split("/")
    safe = (
        relative != MANIFEST
        and not {"", ".", ".."}.intersection(parts)
        and relative.isprintable()
        and not {"\\", ":"}.intersection(relative)
    )
    if not safe:
        raise BundleError(
            "bundle/unsafe-path",
            f"file path {reprlib.repr(relative)} does not name a file below the bundle",
            where=str(where),
            notes=["paths are relative, use /, and have no '..', '.', ':', '\\' or control code"],
            help="do not use this bundle unless you know where it comes from",
        )


def damaged(id: str, message: str, path: Path) -> Diagnostic:
    """A finding about a file that is not as the compiler wrote it."""
    return Diagnostic(id, message, str(path), help=_COPY_AGAIN)


def raise_findings(findings: list[Diagnostic]) -> None:
    """Raise the findings as one error, the first few in full."""
    if not findings:
        return
    first, *more = findings[:_MAX_FINDINGS]
    if len(findings) > _MAX_FINDINGS:
        first = first.with_note(f"and {len(findings) - _MAX_FINDINGS} more findings")
    raise BundleError(first, *more)


def _not_a_bundle(path: Path) -> Diagnostic:
    """Why a path without a readable `bundle.json` is no bundle."""
    make = "make a bundle with: edgecc compile TARGET -o DIR"
    if not path.exists():
        found = "no such file or directory"
    elif not path.is_dir():
        found = "not an edgecc bundle: it is a file, and a bundle is a directory"
        make = f"use {path.parent}" if path.name == MANIFEST else make
    elif (path.parent / MANIFEST).exists():
        found = "not an edgecc bundle, but a folder inside of one"
        make = f"use {path.parent}"
    elif (path / "weights").is_dir() and next(path.glob("*.onnx"), None) is not None:
        found = f"the bundle is incomplete: it has no {MANIFEST}"
        make = _COPY_AGAIN
    elif (path / "config.json").exists() or next(path.glob("*.safetensors"), None) is not None:
        return Diagnostic(
            "bundle/is-a-checkpoint",
            "not an edgecc bundle: this is a model checkpoint, which has to be compiled first",
            str(path),
            help=f"edgecc compile {path} -o DIR",
        )
    else:
        found = f"not an edgecc bundle: it has no {MANIFEST}"
    return Diagnostic("bundle/not-a-bundle", found, str(path), help=make)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; two values under one key would let readers see different manifests."""
    found = dict(pairs)
    if len(found) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {reprlib.repr(key)} appears twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _schema_message(error: ValidationError) -> str:
    """A finding of the schema as `a.b[0]: what was found, what is expected`."""
    place = "".join(_step(step) for step in error.absolute_path).removeprefix(".")
    place = place or "the manifest"
    rule: Any = error.validator_value
    value: Any = error.instance
    if error.validator == "required":
        missing = [key for key in rule if key not in value]
        return f"{place}: missing {', '.join(repr(key) for key in missing)}"
    if error.validator == "type":
        expected = " or ".join([rule] if isinstance(rule, str) else rule)
    elif error.validator == "oneOf":
        expected = "null or a complete description"
    elif error.validator == "not":
        expected = "text without control codes"
    else:
        expected = f"{error.validator} {rule!r}"
    return f"{place}: found {reprlib.repr(value)}, expected {expected}"


def _step(step: str | int) -> str:
    if isinstance(step, int):
        return f"[{step}]"
    return f".{step}" if step.isprintable() else f".{reprlib.repr(step)}"


def _contradictions(manifest: Mapping[str, Any]) -> Iterator[str]:
    """What a manifest that follows the schema says about itself that cannot be true."""
    for symbol, weight in manifest["weights"].items():
        if weight["file"] is not None and weight["file"] not in manifest["files"]:
            yield f"weights.{symbol}.file: {weight['file']!r} is not listed in `files`"
    for name, entry in manifest["entries"].items():
        inputs = {port["name"] for port in entry["inputs"]}
        for port in entry["outputs"]:
            if port["alias"] is not None and port["alias"] not in inputs:
                yield f"entries.{name}: output {port['name']!r} aliases no input {port['alias']!r}"
    yield from _bad_vision(manifest)
    yield from _bad_draft(manifest)
    if manifest["target"]["num_tokens"] > manifest["target"]["vocab_size"]:
        yield "target.num_tokens: larger than target.vocab_size"


def _bad_draft(manifest: Mapping[str, Any]) -> Iterator[str]:
    draft = manifest["draft"]
    if draft is None:
        return
    if draft["method"] == NGRAM:
        if draft["prompt_lookup_min"] > draft["prompt_lookup_max"]:
            yield "draft.prompt_lookup_min: larger than draft.prompt_lookup_max"
        if "draft" in manifest["entries"]:
            yield f"entries: 'draft' is there, but the method {NGRAM} has none"
    elif "draft" not in manifest["entries"]:
        yield "entries: 'draft' is missing, but `draft` describes one"


def _bad_vision(manifest: Mapping[str, Any]) -> Iterator[str]:
    vision, entries = manifest.get("vision"), manifest["entries"]
    if vision is None:
        if "vision" in entries:
            yield "vision: missing, but `entries` has a vision tower"
        return
    if "vision" not in entries:
        yield "entries: 'vision' is missing, but `vision` describes one"
    if _IMAGE_ROLE not in {port["role"] for port in entries["target"]["inputs"]}:
        yield f"entries.target: no input {_IMAGE_ROLE}, but `vision` describes images"
    if vision["feature_size"] != manifest["target"]["hidden_size"]:
        yield "vision.feature_size: not the target.hidden_size"
    if vision["min_pixels"] > vision["max_pixels"]:
        yield "vision.min_pixels: larger than vision.max_pixels"
    for key in ("image_token_id", "vision_start_token_id", "vision_end_token_id"):
        if vision.get(key, 0) >= manifest["target"]["vocab_size"]:
            yield f"vision.{key}: not below target.vocab_size"
