"""Rules about folders and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from edgecc.contract.rule import Rule


class CheckpointFolder(Rule):
    """A checkpoint is a folder with a config and weights in safetensors files.

    What it checks
        The folder exists, holds `config.json`, and either `model.safetensors` or an index with its
        shards. Everything else is read only if it is there.

    Why it matters
        A path that is almost right (the cache above the snapshot, one file of the folder, the name
        of a repository) would otherwise fail much later, with a message about something else.

    What to do
        Pass the folder that holds config.json; fetch what is missing.
    """

    name = "checkpoint-folder"
    ids: ClassVar[Mapping[str, str]] = {
        "checkpoint/not-found": "there is no such folder",
        "checkpoint/not-a-folder": "the path is a file",
        "checkpoint/no-config": "the folder has no config.json",
        "checkpoint/no-weights": "the folder has no weights",
        "checkpoint/no-index": "there are shards, but no index that lists them",
        "checkpoint/unreadable": "the file system refuses to read a file",
    }


class ModelHub(Rule):
    """A name that is no folder is a model of the hub, at one commit.

    What it checks
        That the model exists, may be read, and has the revision that was asked for. The commit is
        recorded in the bundle. A folder of that name comes first. Without network, or with
        `--offline`, what the hub's cache has is used, if it is whole.

    Why it matters
        Branches move: the same name has been weights in two formats, months apart. A half-fetched
        cache loads in tools that take what they find.

    What to do
        Check the name, log in for models that need it, or pass the folder of a copy.
    """

    name = "model-hub"
    ids: ClassVar[Mapping[str, str]] = {
        "hub/not-installed": "the library of the hub is not installed",
        "hub/not-found": "there is no such model, or it is private",
        "hub/gated": "the model's terms have to be accepted first",
        "hub/no-revision": "the model has no such branch, tag or commit",
        "hub/offline": "the hub may not be asked, and its cache lacks something",
        "hub/unreachable": "nobody answers",
        "hub/refused": "the hub answers with an error",
        "hub/no-ranges": "a server gives whole files only",
        "hub/bad-answer": "an answer cannot be read, or is not what was asked for",
        "hub/bad-id": "a name is neither a folder nor a model of the hub",
        "hub/bad-setting": "a variable of the hub's library, or the token, cannot be used",
        "hub/cache": "the hub's cache cannot be read or written",
        "hub/local-folder": "a folder is used, and not the model of the same name",
        "hub/library": "what the library of the hub warns about",
    }


class FileFormat(Rule):
    """Weights are safetensors: nothing from a file is ever run.

    What it checks
        Folders that hold only pickled weights or GGUF files, and files that carry the name of a
        safetensors file and are something else: archives, web pages, Git LFS pointers.

    Why it matters
        Loading a pickle runs code from the file. A file that was renamed or never fetched must be
        told apart from a damaged one, because the cure is another.

    What to do
        Rewrite pickled weights with `edgecc convert`, fetch the real file behind a pointer, or pass
        the checkpoint a GGUF file was made from. A file that names code cannot be converted.
    """

    name = "file-format"
    ids: ClassVar[Mapping[str, str]] = {
        "checkpoint/pickle": "the weights are pickled",
        "checkpoint/torch-format": "pickled weights are of the format before PyTorch 1.6",
        "checkpoint/torch-damaged": "pickled weights are damaged",
        "checkpoint/torch-code": "pickled weights name code to be run",
        "checkpoint/torch-strides": "a pickled tensor is a view that skips or swaps elements",
        "checkpoint/nothing-to-convert": "there is no pytorch_model.bin to convert",
        "checkpoint/gguf": "the weights are a GGUF file",
        "checkpoint/not-safetensors": "a file is something else than its name says",
        "checkpoint/lfs-pointer": "a Git LFS pointer stands in for the file",
    }


class Links(Rule):
    """Links may stay in the folder or lead to the blobs of the same hub cache.

    What it checks
        Where every symbolic link ends before the file behind it is opened, and that the names an
        index lists are names of files in this folder. A compile, which reads all bytes, also
        compares the weights of a hub cache with the SHA-256 that they are named by.

    Why it matters
        A checkpoint names its own files. One that names files elsewhere could make a server read
        what it should not. A hub cache is full of links, so they cannot simply be refused.

    What to do
        Fetch the checkpoint again if a link is broken; copy the file if it really lies elsewhere.
    """

    name = "links"
    ids: ClassVar[Mapping[str, str]] = {
        "checkpoint/broken-link": "a link leads nowhere",
        "checkpoint/damaged-blob": "a file of a hub cache is not what its name says",
        "checkpoint/outside-link": "a link leads out of the checkpoint",
        "checkpoint/not-a-file": "a folder or device has the name of a file",
    }


class Headers(Rule):
    """The header of every weight file describes exactly its bytes.

    What it checks
        Length and syntax of the header, names, dtypes, shapes and places of all tensors: they cover
        the data without overlap, hole or rest. Sizes are bounded before anything is parsed: 100 MB
        of header, 400 000 tensors, 4 million values, 32 levels of nesting, rank 8; JSON files may
        have 64 MiB. A key may occur once in an object.

    Why it matters
        An interrupted download looks like a model until its last tensor is read. Readers disagree
        about duplicate keys, so that one file can hold two models. A hostile header must not cost
        memory or minutes.

    What to do
        Fetch the file again, or export it again.
    """

    name = "headers"
    ids: ClassVar[Mapping[str, str]] = {
        "checkpoint/bad-header": "the header of a weight file cannot be right",
        "checkpoint/bad-tensor": "name, dtype, shape or place of a tensor cannot be right",
        "checkpoint/truncated": "a file ends before its header says",
        "checkpoint/trailing-bytes": "a file goes on after its last tensor",
        "checkpoint/bad-json": "a file is not usable as JSON",
        "checkpoint/too-large": "a JSON file is larger than any real one",
        "checkpoint/changed": "a file changed while it was in use",
    }


class Shards(Rule):
    """Index and shards list the same tensors, each of them once.

    What it checks
        The index names files of this folder, they are all there, each tensor is in the file the
        index says, and no tensor is stored twice. Tensors that are not in the index are ignored.

    Why it matters
        Where a single file and an index are both present, or a tensor is stored twice, loaders
        disagree about which bytes they read, and nothing fails.

    What to do
        Fetch the missing shards; remove the single file or the index, whichever is stale.
    """

    name = "shards"
    ids: ClassVar[Mapping[str, str]] = {
        "checkpoint/bad-index": "the index does not describe the files",
        "checkpoint/missing-shard": "a file of the index is missing",
        "checkpoint/ambiguous": "a single file and an index of other files are both there",
        "checkpoint/duplicate-tensor": "two files store a tensor of the same name",
        "checkpoint/unindexed-tensor": "stored tensors are not in the index and are ignored",
    }
