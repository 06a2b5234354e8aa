"""Checkpoints of real shapes with random weights, for measuring without a download.

Names, shapes and encodings are those of published checkpoints: a Qwen3 target as ModelOpt exports
it to NVFP4 (with `lm_head` quantized as well), or in bf16, and a DSpark draft in DeepSpec's layout,
without embedding and head. Tensors are made and written a block of rows at a time, so a checkpoint
of any size needs a few megabytes of memory. Equal arguments give equal bytes.

    python -m benchmarks.synthetic qwen3-0.6b OUT
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from edgecc.backends.weight_file import TensorSpec, WeightFileWriter

Array: TypeAlias = NDArray[Any]

BLOCK: Final = 16
"""Weights per NVFP4 block scale."""

MASK_TOKEN: Final = 151669
"""First id after Qwen3's tokenizer: a padding row, which published drafts take as mask token."""

_CODE_RMS: Final = 2.926
"""Root mean square of the E2M1 values when all sixteen codes are equally likely."""

_WRITE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a target or draft.

    Attributes:
        hidden: Width of the residual stream.
        intermediate: MLP width.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Width of a head.
        vocab: Rows of embedding and head.
        taps: Draft only: target layers whose outputs it reads, counted from 0.
        markov_rank: Draft only: rank of the Markov head.
        target_layers: Draft only: layers of its target.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151936
    taps: tuple[int, ...] = ()
    markov_rank: int = 256
    target_layers: int = 0


TARGETS: Mapping[str, Shape] = {
    "qwen3-0.6b": Shape(1024, 3072, 28, 16, 8),
    "qwen3-4b": Shape(2560, 9728, 36, 32, 8),
    "qwen3-8b": Shape(4096, 12288, 36, 32, 8),
    "deep": Shape(256, 768, 64, 4, 2, head_dim=64),
}
"""Qwen3 shapes, and one of many small layers to time the compiler with.

All get a head of their own, so that it can be quantized.
"""

_TAPS: Mapping[str, tuple[int, ...]] = {
    "qwen3-0.6b": (1, 7, 13, 19, 25),
    "qwen3-4b": (1, 9, 17, 25, 33),
    "qwen3-8b": (1, 9, 17, 25, 33),
    "deep": (1, 16, 31, 46, 61),
}
DRAFTS: Mapping[str, Shape] = {
    f"{name}-dspark": replace(shape, layers=5, taps=_TAPS[name], target_layers=shape.layers)
    for name, shape in TARGETS.items()
}
"""Five layers of the target's width, block 7, Markov rank 256, as DeepSpec's drafts for Qwen3."""


def write_target(path: Path, shape: Shape, *, quantized: bool = True, seed: int = 0) -> Path:
    """Write a Qwen3 target and return its folder.

    Args:
        path: Folder to make.
        shape: Dimensions.
        quantized: NVFP4 linear layers and head, else everything in bf16.
        seed: Seed of the weights.
    """
    linears = {**_layers(shape, "model."), "lm_head": (shape.vocab, shape.hidden)}
    specs = [TensorSpec("model.embed_tokens.weight", "BF16", (shape.vocab, shape.hidden))]
    for name, size in linears.items():
        specs += _nvfp4_specs(name, size) if quantized else [_dense_spec(name, size)]
    specs += _norms(shape, "model.")
    config = _config(shape, "Qwen3ForCausalLM")
    if quantized:
        config["quantization_config"] = {"quant_algo": "NVFP4", "quant_method": "modelopt"} | {
            "ignore": ["model.embed_tokens"],
            "config_groups": {"group_0": {"targets": ["Linear"], **_GROUP}},
        }
    return _write(path, config, specs, seed)


def write_draft(path: Path, shape: Shape, *, block_size: int = 7, seed: int = 1) -> Path:
    """Write a DSpark draft in bf16, without embedding and head, and return its folder.

    Args:
        path: Folder to make.
        shape: Dimensions, with `taps` and `target_layers`.
        block_size: Proposals per call.
        seed: Seed of the weights.
    """
    hidden, rank = shape.hidden, shape.markov_rank
    linears = {
        "fc": (hidden, len(shape.taps) * hidden),
        **_layers(shape, ""),
        "markov_head.markov_w1": (shape.vocab, rank),
        "markov_head.markov_w2": (shape.vocab, rank),
        "confidence_head.proj": (1, hidden + rank),
    }
    specs = [_dense_spec(name, size) for name, size in linears.items()]
    specs += [
        TensorSpec("confidence_head.proj.bias", "BF16", (1,)),
        TensorSpec("hidden_norm.weight", "BF16", (hidden,)),
        *_norms(shape, ""),
    ]
    config = _config(shape, "Qwen3DSparkModel") | {
        "block_size": block_size,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": rank,
        "mask_token_id": MASK_TOKEN,
        "num_target_layers": shape.target_layers,
        "target_layer_ids": list(shape.taps),
    }
    return _write(path, config, specs, seed)


def write_preset(name: str, path: Path, *, quantized: bool = True, seed: int = 0) -> Path:
    """Write a preset target or draft.

    Args:
        name: A key of `TARGETS` or `DRAFTS`.
        path: Folder to make.
        quantized: Targets only, see `write_target`.
        seed: Seed of the weights.
    """
    if name in TARGETS:
        return write_target(path, TARGETS[name], quantized=quantized, seed=seed)
    return write_draft(path, DRAFTS[name], seed=seed + 1)


_GROUP: Mapping[str, Any] = {
    part: {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    for part in ("input_activations", "weights")
}


def _layers(shape: Shape, prefix: str) -> dict[str, tuple[int, int]]:
    """Linear layers of all decoder layers: module name to `[N, K]`."""
    width, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "self_attn.q_proj": (width, shape.hidden),
        "self_attn.k_proj": (kv, shape.hidden),
        "self_attn.v_proj": (kv, shape.hidden),
        "self_attn.o_proj": (shape.hidden, width),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    return {
        f"{prefix}layers.{i}.{name}": size
        for i in range(shape.layers)
        for name, size in sizes.items()
    }


def _norms(shape: Shape, prefix: str) -> list[TensorSpec]:
    sizes = {
        "input_layernorm": shape.hidden,
        "post_attention_layernorm": shape.hidden,
        "self_attn.q_norm": shape.head_dim,
        "self_attn.k_norm": shape.head_dim,
    }
    specs = [
        TensorSpec(f"{prefix}layers.{i}.{name}.weight", "BF16", (size,))
        for i in range(shape.layers)
        for name, size in sizes.items()
    ]
    return [*specs, TensorSpec(f"{prefix}norm.weight", "BF16", (shape.hidden,))]


def _dense_spec(name: str, size: tuple[int, int]) -> TensorSpec:
    return TensorSpec(f"{name}.weight", "BF16", size)


def _nvfp4_specs(name: str, size: tuple[int, int]) -> list[TensorSpec]:
    rows, columns = size
    return [
        TensorSpec(f"{name}.input_scale", "F32", ()),
        TensorSpec(f"{name}.weight", "U8", (rows, columns // 2)),
        TensorSpec(f"{name}.weight_scale", "F8_E4M3", (rows, columns // BLOCK)),
        TensorSpec(f"{name}.weight_scale_2", "F32", ()),
    ]


def _config(shape: Shape, architecture: str) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": 40960,
        "max_window_layers": shape.layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": shape.vocab,
    }


def _write(path: Path, config: Mapping[str, Any], specs: list[TensorSpec], seed: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    with WeightFileWriter(path / "model.safetensors", specs) as file:
        for spec in specs:
            for block in _blocks(spec, random):
                file.write(spec.name, block)
    file.finish()
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return path


def _blocks(spec: TensorSpec, random: np.random.Generator) -> Iterator[Array]:
    """Values of a tensor, some rows at a time: such that activations keep their size."""
    if spec.dtype == "F32":  # scales of a whole layer; fused layers need equal ones
        yield np.array(0.02 / _CODE_RMS, dtype=np.float32)
    elif len(spec.shape) < 2:
        values = 1 + 0.1 * random.standard_normal(spec.shape, dtype=np.float32)
        yield values.astype(ml_dtypes.bfloat16)
    else:
        rows, columns = spec.shape
        step = max(1, _WRITE_BYTES // (4 * columns))
        for start in range(0, rows, step):
            yield _matrix(spec.dtype, min(step, rows - start), columns, random)


def _matrix(dtype: str, rows: int, columns: int, random: np.random.Generator) -> Array:
    if dtype == "U8":  # two random codes a byte
        return np.frombuffer(random.bytes(rows * columns), np.uint8).reshape(rows, columns)
    if dtype == "F8_E4M3":  # 0.5 to 1.875
        codes = random.integers(0x30, 0x40, (rows, columns), dtype=np.uint8)
        return codes.view(ml_dtypes.float8_e4m3fn)
    values = random.standard_normal((rows, columns), dtype=np.float32)
    values *= np.float32(0.02)
    return values.astype(ml_dtypes.bfloat16)


def main(argv: list[str] | None = None) -> None:
    """Command line: write one preset."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.synthetic", description=__doc__)
    parser.add_argument("preset", choices=[*TARGETS, *DRAFTS])
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--bf16", action="store_true", help="targets: no quantization")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    path = write_preset(
        arguments.preset, arguments.out, quantized=not arguments.bf16, seed=arguments.seed
    )
    size = (path / "model.safetensors").stat().st_size
    print(f"{path}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
