"""Checkpoints of real shapes with random weights, for measuring without a download.

Names, shapes, types and encodings are those of published checkpoints: of a preset, or of any config
of a supported architecture. Equal arguments give equal bytes. Memory is constant, about 200 MB for
a large one. Values keep activations near one through any number of layers: matrices have the
deviation 1 / sqrt(fan-in), norms are about one, and block scales are chosen to fit.

    python -m benchmarks.synthetic qwen3.8-27b OUT
    python -m benchmarks.synthetic --config config.json OUT --layers 4
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.architectures import for_target_layers, with_layers, without_layers
from benchmarks.checkpoints.presets import PRESETS, side_files
from benchmarks.checkpoints.writer import SHARD_BYTES, write_checkpoint
from edgecc.errors import EdgeccError, UsageError, did_you_mean

_SIDE_FILES = ("generation_config.json", "hf_quant_config.json")
_TOKENIZER = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")


def write_preset(
    name: str,
    path: Path,
    *,
    quantized: bool = True,
    layers: int | None = None,
    target_layers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
) -> Path:
    """Write a preset and return its folder.

    Args:
        name: A key of `PRESETS`.
        path: Folder to make.
        quantized: As published, else everything unquantized.
        layers: Its first layers only.
        target_layers: Of a draft: layers of its target, with taps to match.
        shard_bytes: Most bytes of a file of weights.
        seed: Seed of the weights.
    """
    config = PRESETS[name]()
    if not quantized:
        config.pop("quantization_config", None)
    config = _reduced(config, layers, target_layers)
    return write_checkpoint(
        path,
        config,
        files=side_files(name, config),
        shard_bytes=shard_bytes,
        seed=_seed(name, seed),
    )


def write_like(
    config: Path,
    path: Path,
    *,
    layers: int | None = None,
    target_layers: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
) -> Path:
    """Write a checkpoint for a config; its quantization metadata and tokenizer come along.

    Args:
        config: A `config.json`; files of the checkpoint beside it are read as well.
        path: Folder to make.
        layers: Its first layers only.
        target_layers: Of a draft: layers of its target, with taps to match.
        shard_bytes: Most bytes of a file of weights.
        seed: Seed of the weights.

    Raises:
        UnsupportedError: No such architecture or format is written.
    """
    made = _reduced(_json(config), layers, target_layers)
    files = {n: _json(config.with_name(n)) for n in _SIDE_FILES if config.with_name(n).exists()}
    if layers is not None:
        files = {name: without_layers(content, layers) for name, content in files.items()}
    beside = [config.with_name(n) for n in _TOKENIZER if config.with_name(n).exists()]
    return write_checkpoint(
        path, made, files=files, beside=beside, shard_bytes=shard_bytes, seed=seed
    )


def _reduced(
    config: dict[str, Any], layers: int | None, target_layers: int | None
) -> dict[str, Any]:
    if layers is not None:
        config = with_layers(config, layers)
    return config if target_layers is None else for_target_layers(config, target_layers)


def _seed(name: str, seed: int) -> int:
    """A draft's values are not its target's."""
    return 2 * seed + ("dspark" in name)


def _json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def main(argv: list[str] | None = None) -> None:
    """Command line: write one checkpoint."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.synthetic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("preset", nargs="?", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--config", type=Path, help="a config.json, in place of a preset")
    parser.add_argument("--layers", type=int, metavar="N", help="its first N layers only")
    parser.add_argument(
        "--target-layers", type=int, metavar="N", help="drafts: for a target written with N layers"
    )
    parser.add_argument("--bf16", action="store_true", help="presets: no quantization")
    parser.add_argument("--shard-size", type=int, default=SHARD_BYTES, metavar="BYTES")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        path = _write(arguments)
    except EdgeccError as error:
        parser.exit(2, f"{error}\n")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    print(f"{path}: {size / 1e6:.1f} MB")


def _write(arguments: argparse.Namespace) -> Path:
    sizes = {
        "layers": arguments.layers,
        "target_layers": arguments.target_layers,
        "shard_bytes": arguments.shard_size,
        "seed": arguments.seed,
    }
    if (arguments.preset is None) == (arguments.config is None):
        raise UsageError("usage/synthetic", "give a preset, or --config with a config.json")
    if arguments.config is not None:
        return write_like(arguments.config, arguments.out, **sizes)
    if arguments.preset not in PRESETS:
        raise UsageError(
            "usage/synthetic",
            f"there is no preset {arguments.preset!r}",
            help=did_you_mean(arguments.preset, PRESETS),
        )
    return write_preset(arguments.preset, arguments.out, quantized=not arguments.bf16, **sizes)


if __name__ == "__main__":
    main()
