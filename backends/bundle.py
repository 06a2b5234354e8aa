"""Compiled bundles: the directory format, and opening one.

```
DIR/bundle.json           the manifest: graph contracts, limits, weights, provenance, every file
DIR/<device>-<graph>.onnx what a backend wrote, with the weights it points to
DIR/weights/              packed weights (safetensors)
DIR/tokenizer/            tokenizer files as the target checkpoint ships them
DIR/golden.safetensors    a few inputs and reference outputs
DIR/golden-<device>.safetensors   the same, rounded where the engines of the device round
```

`bundle.schema.json` is the exact definition of the manifest. `bundle_writer` makes bundles,
`weight_file` writes their weights. This module needs the standard library and `jsonschema` only:
the runtime opens bundles on devices where nothing else of the compiler is loaded.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgecc.backends.bundle_manifest import (
    MANIFEST,
    check_manifest,
    check_version,
    damaged,
    load_manifest,
    raise_findings,
)
from edgecc.backends.storage import read_chunks, storage_error
from edgecc.errors import BundleError, Diagnostic, did_you_mean

if TYPE_CHECKING:
    from edgecc.backends.base import Progress


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle. Its manifest follows the schema and its files have the stated sizes.

    Attributes:
        path: The bundle directory.
        manifest: What `bundle.json` holds: see `bundle.schema.json`.
    """

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Bundle:
        """Read and check the manifest, and look that every file is there. Reads no weights.

        Raises:
            BundleError: `path` is no bundle, is of another version, or is damaged or incomplete.
            ResourceError: A file cannot be read.
        """
        directory = Path(path)
        manifest = load_manifest(directory)
        check_version(manifest, directory / MANIFEST)
        check_manifest(manifest, directory / MANIFEST)
        bundle = cls(directory, manifest)
        bundle.check_sizes()
        return bundle

    @property
    def tokenizer_dir(self) -> Path:
        """The directory with `tokenizer.json` and what comes with it.

        Raises:
            BundleError: The bundle has no tokenizer.
        """
        if not any(name.startswith("tokenizer/") for name in self.manifest["files"]):
            raise BundleError(
                "bundle/no-tokenizer",
                "the bundle has no tokenizer, so it can only take and give token ids",
                where=str(self.path),
                help="compile it again from a target that has a tokenizer.json",
            )
        return self.path / "tokenizer"

    def artifact(self, device: str) -> Mapping[str, Any]:
        """What the backend of `device` wrote into the manifest.

        Raises:
            BundleError: The bundle was not compiled for `device`.
        """
        known = ", ".join(self.manifest["artifacts"])
        return self._part("artifacts", device, "artifact", f"it is compiled for: {known}")

    def entry(self, name: str) -> Mapping[str, Any]:
        """The inputs and outputs of an entry (`target`, `draft`).

        Raises:
            BundleError: The bundle has no such entry.
        """
        return self._part("entries", name, "entry", f"compile it with the {name} model")

    def file(self, relative: str) -> Path:
        """The path of a file that the manifest lists.

        Args:
            relative: Path relative to the bundle, for example `weights/cpu.safetensors`.

        Raises:
            BundleError: The manifest does not list it.
        """
        if relative not in self.manifest["files"]:
            raise BundleError(
                "bundle/unlisted-file",
                f"{relative!r} is used, but not listed in `files`",
                where=str(self.path / MANIFEST),
                help="compile it again: edgecc compile TARGET -o DIR",
            )
        return self.path / relative

    def check_sizes(self) -> None:
        """Check that every listed file exists and has the stated size. Opens none of them.

        Raises:
            BundleError: Files are missing, are no regular files, or have another size.
            ResourceError: A directory of the bundle cannot be searched.
        """
        findings = []
        for name, expected in self.manifest["files"].items():
            finding = _check_size(self.path / name, expected["bytes"])
            if finding is not None:
                findings.append(finding)
        raise_findings(findings)

    def verify_hashes(self, progress: Progress | None = None) -> None:
        """Read every listed file and compare its SHA-256.

        Args:
            progress: Called with the stage `verify`, the bytes read and the bytes to read.

        Raises:
            BundleError: Files differ from what the compiler wrote.
            ResourceError: A file cannot be read.
        """
        self.check_sizes()
        files = self.manifest["files"]
        total = sum(expected["bytes"] for expected in files.values())
        done = 0
        findings = []
        for name, expected in files.items():
            digest = hashlib.sha256()
            for chunk in read_chunks(self.path / name):
                digest.update(chunk)
                done += len(chunk)
                if progress is not None:
                    progress("verify", done, total)
            if digest.hexdigest() != expected["sha256"]:
                message = (
                    f"content differs: sha256 is {digest.hexdigest()}, "
                    f"the manifest says {expected['sha256']}"
                )
                findings.append(damaged("bundle/hash-mismatch", message, self.path / name))
        raise_findings(findings)

    def _part(self, section: str, name: str, what: str, help: str) -> Mapping[str, Any]:
        parts: Mapping[str, Mapping[str, Any]] = self.manifest[section]
        if name in parts:
            return parts[name]
        raise BundleError(
            f"bundle/no-{what}",
            f"the bundle has no {what} {name!r}",
            where=str(self.path / MANIFEST),
            notes=[did_you_mean(name, parts)],
            help=help,
        )


def _check_size(path: Path, expected: int) -> Diagnostic | None:
    """What is wrong with a listed file, if anything, by looking at its directory entry."""
    try:
        found = path.stat()
    except PermissionError as error:
        raise storage_error(error, path, "read") from error
    except OSError as error:
        return damaged("bundle/missing-file", f"cannot be found: {error.strerror}", path)
    if not stat.S_ISREG(found.st_mode):
        return damaged("bundle/missing-file", "is not a regular file", path)
    if found.st_size != expected:
        message = f"has {found.st_size:,} bytes, the manifest says {expected:,}"
        return damaged("bundle/size-mismatch", message, path)
    return None
