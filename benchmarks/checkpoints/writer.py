"""Writes a checkpoint folder: safetensors files, their index, and the JSON files beside them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.checkpoints.architectures import parameters
from benchmarks.checkpoints.parameters import Config
from benchmarks.checkpoints.quantization import Scheme, Tensor
from benchmarks.checkpoints.values import Values
from edgecc.backends.weight_file import WeightFileWriter

SHARD_BYTES: Final = 10 * 10**9
"""Most bytes of a file, as ModelOpt's exporter splits them."""


def write_checkpoint(
    path: Path,
    config: Config,
    *,
    files: Mapping[str, Any] | None = None,
    beside: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
) -> Path:
    """Write a checkpoint with the tensors its config asks for, and return its folder.

    Values are streamed: memory does not depend on the size. Equal arguments give equal bytes.

    Args:
        path: Folder to make; it holds no weights yet.
        config: `config.json`.
        files: Further JSON files by name, such as `hf_quant_config.json`.
        beside: Files to copy, such as a tokenizer.
        shard_bytes: Most bytes of a file of weights; a larger tensor has a file of its own.
        seed: Seed of the weights.

    Raises:
        UnsupportedError: No such architecture or format is written.
        ResourceError: The disk is full or fails.
    """
    scheme = Scheme(config)
    tensors = [t for parameter in parameters(config) for t in scheme.stored(parameter)]
    shards = _shards(tensors, shard_bytes)
    count = len(shards)
    names = (
        [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        if count > 1
        else ["model.safetensors"]
    )
    path.mkdir(parents=True, exist_ok=True)
    values = Values(seed, max(math.prod(t.spec.shape) for t in tensors))
    for name, shard in zip(names, shards, strict=True):
        with WeightFileWriter(path / name, [t.spec for t in shard]) as file:
            for tensor in shard:
                for block in values.blocks(tensor):
                    file.write(tensor.spec.name, block)
    index = {
        "metadata": {"total_size": sum(t.spec.nbytes for t in tensors)},
        "weight_map": {t.spec.name: n for n, s in zip(names, shards, strict=True) for t in s},
    }
    sharded = {"model.safetensors.index.json": index} if count > 1 else {}
    for name, content in {"config.json": config, **(files or {}), **sharded}.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for source in beside:
        shutil.copyfile(source, path / source.name)
    return path


def _shards(tensors: Sequence[Tensor], most: int) -> list[list[Tensor]]:
    """Tensors in order, a new file where the next would be too much."""
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.spec.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.spec.nbytes
    return shards
