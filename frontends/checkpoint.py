"""Safe, lazy access to a checkpoint folder: config, tensors and where each of them comes from.

Opening reads JSON and safetensors headers only. Tensor bytes are mapped read-only when `read` asks
for them. Nothing is ever unpickled and no code from the folder is run.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeAlias

from numpy.typing import NDArray

from edgecc.errors import Diagnostic, InputError, ResourceError, Severity, UnsupportedError
from edgecc.frontends.checkpoint_files import Folder, Place, RemoteFile, no_weights, place_of
from edgecc.frontends.safetensors_file import SafetensorsFile, TensorInfo
from edgecc.frontends.strict_json import JsonObject, kind, parse_object
from edgecc.hub_layout import blob_digest, checkpoint_name

__all__ = ["Checkpoint", "TensorInfo"]

Array: TypeAlias = NDArray[Any]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON = 64 * 2**20

_TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_SIDE_FILES = ("config.json", "generation_config.json", "hf_quant_config.json")
_MISSED = 4
"""Missing tensors that names are suggested for."""

_SHARD_NAME = re.compile(r"[^/\\:]+\.safetensors")


class Checkpoint:
    """An open checkpoint folder. Use `open`, and `close` or a `with` block.

    Attributes:
        path: The folder as the user gave it.
        role: `target` or `draft`; messages start with it.
        config: `config.json`.
        generation_config: `generation_config.json`, empty if there is none.
        tensors: Every tensor of the checkpoint that has an IR element type, by name.
        findings: Oddities that do not stop anybody, for the report.
        metadata_only: Whether nobody may read whole weights: what only their values tell is left to
            a compile. Single scales and maps of ids are read either way.
    """

    def __init__(
        self,
        folder: Folder,
        also: Sequence[str] = (),
        remote: Mapping[str, RemoteFile] = MappingProxyType({}),
    ) -> None:
        """Read config and headers; see `open`."""
        self._folder, self._remote = folder, remote
        self.path, self.role = folder.path, folder.role
        self.findings: list[Diagnostic] = []
        self.metadata_only = False
        self._json: dict[str, JsonObject | None] = {}
        self._digests: dict[str, str] = {}
        self._missed = 0
        self.config = self._config()
        self.generation_config = self.json("generation_config.json") or {}
        self._files, tensors, self._unreadable = self._open_weights()
        for name in also:
            self._open_beside(name, tensors)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: str | Path | Place, *, role: str, also: Sequence[str] = ()) -> Checkpoint:
        """Open a checkpoint folder.

        Args:
            path: Folder with `config.json` and either `model.safetensors` or an index with shards.
            role: `target` or `draft`, used in messages.
            also: Names of weight files that are read as well if they are there, although no index
                lists them.

        Raises:
            InputError: The folder, its config, index or a weight file is missing or damaged.
            UnsupportedError: The weights are in a format edgecc does not read (pickle, GGUF).
            ResourceError: The file system refuses.
        """
        place = place_of(path)
        return cls(Folder(place.path, role), also, place.remote)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the mappings up; arrays that were read stay valid."""
        for file in self._files.values():
            file.close()

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the weight files, sorted."""
        return tuple(self._files)

    @property
    def name(self) -> str:
        """What it is called: its folder, or the repository its snapshot is of."""
        return checkpoint_name(self.path)

    @property
    def headers_only(self) -> bool:
        """Whether weight files are elsewhere, and only their headers are here."""
        return bool(self._remote)

    def is_remote(self, key: str) -> bool:
        """Whether reading a tensor takes a request over the network: many small ones take long.

        Raises:
            InputError: There is no such tensor.
            UnsupportedError: Its dtype has no counterpart in the IR.
        """
        return self.info(key).file in self._remote

    @property
    def has_unreadable(self) -> bool:
        """Whether tensors are stored whose dtype has no counterpart in the IR."""
        return bool(self._unreadable)

    def folder_names(self) -> list[str]:
        """Names of everything in the folder, sorted.

        Raises:
            ResourceError: The folder may not be listed.
        """
        return self._folder.names()

    def info(self, key: str) -> TensorInfo:
        """Dtype, shape and file of a tensor.

        Raises:
            InputError: There is no such tensor; near names are listed.
            UnsupportedError: Its dtype has no counterpart in the IR.
        """
        found = self.tensors.get(key)
        if found is not None:
            return found
        if key in self._unreadable:
            raise UnsupportedError(
                "checkpoint/dtype",
                f"tensors of dtype {self._unreadable[key]} are not supported",
                where=f"{self.role}: {key}",
            )
        near = self._near(key)
        raise InputError(
            "checkpoint/missing-tensor",
            f"the checkpoint has no tensor {key}",
            where=self.role,
            notes=(f"{len(self.tensors)} tensors in {', '.join(self.files[:4])}",),
            help=f"similar names: {', '.join(near)}" if near else "",
        )

    def _near(self, key: str) -> list[str]:
        """Stored names like a missing one, for the first that are missing: it takes a while."""
        self._missed += 1
        if self._missed > _MISSED:
            return []
        leaf = key.rpartition(".")[2]
        alike = [name for name in self.tensors if name.endswith(leaf)] or list(self.tensors)
        return difflib.get_close_matches(key, alike[:2000], n=3)

    def read(self, key: str, start: int | None = None, stop: int | None = None) -> Array:
        """Rows `start:stop` along axis 0 of a tensor, read-only, in the stored dtype.

        The array is a view of the mapped file (a copy where the file's alignment forbids a view),
        so that rows cost memory only when touched.

        Raises:
            InputError: There is no such tensor, or its file changed since it was opened.
            UnsupportedError: Its dtype has no counterpart in the IR.
            ResourceError: The file cannot be mapped.
            ValueError: The rows are out of range.
        """
        return self._files[self.info(key).file].read(key, start, stop)

    def location(self, key: str) -> str:
        """Where a tensor comes from: `target/model.safetensors: lm_head.weight`.

        Raises:
            InputError: There is no such tensor.
            UnsupportedError: Its dtype has no counterpart in the IR.
        """
        return f"{self._folder.where(self.info(key).file)}: {key}"

    def json(self, name: str) -> JsonObject | None:
        """A JSON file of the folder, or None if there is none.

        Raises:
            InputError: The file is damaged, not an object, or leads out of the checkpoint.
            ResourceError: The file cannot be read.
        """
        if name not in self._json:
            data = self._folder.read(name, MAX_JSON)
            where = self._folder.where(name)
            self._json[name] = None if data is None else parse_object(data, where, constants=True)
        return self._json[name]

    def file(self, name: str) -> Path | None:
        """Path of a file directly in the folder, or None if there is none.

        Raises:
            InputError: The entry is a broken link, leads out of the checkpoint, or is not a file.
        """
        return self._folder.find(name)

    def tokenizer_files(self) -> list[Path]:
        """Files that define the tokenizer and chat template, those that exist, sorted by name.

        Raises:
            InputError: One of them is a broken link or leads out of the checkpoint.
        """
        found = (self._folder.find(name) for name in _TOKENIZER_FILES)
        return [path for path in found if path is not None]

    def file_digests(self) -> dict[str, str]:
        """SHA-256 of every file this checkpoint uses, by name, sorted; each file is hashed once.

        Raises:
            InputError: A file is a broken link, leads out of the checkpoint, or is not what the hub
                had: blobs of its cache are named by their SHA-256.
            ResourceError: A file cannot be read.
        """
        names = {*_SIDE_FILES, *_TOKENIZER_FILES, *self._files}
        names |= {name for name, value in self._json.items() if value is not None}
        for name in sorted(names - self._digests.keys()):
            path = self._folder.find(name)
            if path is not None:
                self._digests[name] = self._sha256(path, name)
        return dict(sorted(self._digests.items()))

    def _sha256(self, path: Path, name: str) -> str:
        where = self._folder.where(name)
        try:
            with path.open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise ResourceError(
                "checkpoint/unreadable", f"cannot be read: {error}", where=where
            ) from error
        expected = blob_digest(path)
        if expected not in (None, found):
            raise InputError(
                "checkpoint/damaged-blob",
                f"its bytes are not those of the hub: their SHA-256 is {found}, not {expected}",
                where=where,
                help=f"remove {path.resolve()} and fetch it again",
            )
        return found

    def _config(self) -> JsonObject:
        config = self.json("config.json")
        if config is None:
            snapshots = self._folder.root / "snapshots"
            raise InputError(
                "checkpoint/no-config",
                "the folder has no config.json",
                where=self.role,
                help="this is a hub cache: pass one of the folders in its snapshots folder"
                if snapshots.is_dir()
                else "pass the folder of a checkpoint in Hugging Face layout",
            )
        return config

    def _open_weights(
        self,
    ) -> tuple[dict[str, SafetensorsFile], dict[str, TensorInfo], dict[str, str]]:
        """Open headers: files by name, tensors by name, dtype of tensors we cannot represent."""
        index = self._index()
        single = self._folder.find(SINGLE)
        if index is None:
            if single is None:
                raise no_weights(self.role, self._folder.names())
            file = self._open_file(SINGLE)
            return {SINGLE: file}, dict(file.tensors), dict(file.unreadable)
        names = sorted(set(index.values()))
        if single is not None and names != [SINGLE]:
            raise InputError(
                "checkpoint/ambiguous",
                f"the folder has both {SINGLE} and an index of {len(names)} other files",
                where=self._folder.where(INDEX),
                notes=("loaders disagree about which of the two they read",),
                help="remove the one that is stale",
            )
        if missing := [name for name in names if self._folder.find(name) is None]:
            raise InputError(
                "checkpoint/missing-shard",
                f"{len(missing)} of {len(names)} weight files are missing: {missing[0]}",
                where=self._folder.where(INDEX),
                notes=tuple(missing[1:5]),
                help="the download is incomplete: fetch the missing files",
            )
        files = {name: self._open_file(name) for name in names}
        return files, *self._merge(index, files)

    def _open_beside(self, name: str, tensors: dict[str, TensorInfo]) -> None:
        """Add the tensors of a file that is not part of the weights proper."""
        if name in self._files or self._folder.find(name) is None:
            return
        file = self._open_file(name)
        known = tensors.keys() | self._unreadable.keys()
        if twice := sorted(known & (file.tensors.keys() | file.unreadable.keys())):
            raise InputError(
                "checkpoint/duplicate-tensor",
                f"{twice[0]} is stored in {name} and in another weight file",
                where=self._folder.where(name),
                help="remove the file that is stale",
            )
        self._files[name] = file
        tensors.update(file.tensors)
        self._unreadable.update(file.unreadable)

    def _open_file(self, name: str) -> SafetensorsFile:
        where = self._folder.where(name)
        return SafetensorsFile(self._folder.root / name, name, where, self._remote.get(name))

    def _index(self) -> dict[str, str] | None:
        """The weight map of the index (tensor -> file), or None without an index."""
        content = self.json(INDEX)
        if content is None:
            return None
        weight_map = content.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise self._bad_index(f"weight_map is {kind(weight_map)}, expected a filled object")
        index: dict[str, str] = {}
        for key, name in weight_map.items():
            if not (isinstance(name, str) and name.isprintable() and _SHARD_NAME.fullmatch(name)):
                raise self._bad_index(
                    f"{key[:80]!r} is mapped to {name!r}: expected the name of a .safetensors file"
                    " in this folder"
                )
            index[key] = name
        return index

    def _merge(
        self, index: Mapping[str, str], files: Mapping[str, SafetensorsFile]
    ) -> tuple[dict[str, TensorInfo], dict[str, str]]:
        """Tensors of all shards, checked against the index."""
        owners: dict[str, str] = {}
        extra: list[str] = []
        for name, file in files.items():
            for key in (*file.tensors, *file.unreadable):
                if key in owners:
                    raise InputError(
                        "checkpoint/duplicate-tensor",
                        f"{key} is stored in {owners[key]} and in {name}",
                        where=self._folder.where(INDEX),
                    )
                owners[key] = name
                if key not in index:
                    extra.append(f"{name}: {key}")
        for key, name in index.items():
            if owners.get(key) != name:
                found = f"it is in {owners[key]}" if key in owners else "no weight file has it"
                raise self._bad_index(f"{key[:80]!r} is mapped to {name}, but {found}")
        if extra:
            self.findings.append(self._unindexed(extra))
        return (
            {k: i for f in files.values() for k, i in f.tensors.items() if k in index},
            {k: d for f in files.values() for k, d in f.unreadable.items() if k in index},
        )

    def _unindexed(self, extra: list[str]) -> Diagnostic:
        return Diagnostic(
            "checkpoint/unindexed-tensor",
            f"{len(extra)} stored tensors are not in the index and are ignored",
            where=self._folder.where(INDEX),
            notes=tuple(extra[:5]),
            severity=Severity.WARNING,
        )

    def _bad_index(self, message: str) -> InputError:
        return InputError(
            "checkpoint/bad-index",
            message,
            where=self._folder.where(INDEX),
            help="download or export the index again",
        )
