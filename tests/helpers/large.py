"""Checkpoints of any size, written in a stream of random blocks: no time and no memory to quantize.

Every byte pattern written is a proper number: all sixteen E2M1 codes, positive E4M3 scales, small
BF16 values. Config, tokenizer and layout are those of `helpers.checkpoints`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from helpers.checkpoints import edit_json, write_target

Specs: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]

_CHUNK: Final = 4 << 20
_BYTES: Final = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}


def write_large_target(
    path: Path,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    intermediate: int,
    vocab: int,
    head_dim: int = 64,
    seed: int = 0,
) -> Path:
    """A Qwen3 target in NVFP4, head included, with random packed bytes.

    Returns:
        The folder.
    """
    write_target(path, layers=1, hidden=32, head_dim=32, heads=1, kv_heads=1, intermediate=16)
    edit_json(
        path / "config.json",
        hidden_size=hidden,
        num_hidden_layers=layers,
        layer_types=["full_attention"] * layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        head_dim=head_dim,
        vocab_size=vocab,
    )
    specs: Specs = {"model.embed_tokens.weight": ("BF16", (vocab, hidden))}
    for index in range(layers):
        layer = f"model.layers.{index}"
        for name, rows, columns in (
            ("self_attn.q_proj", heads * head_dim, hidden),
            ("self_attn.k_proj", kv_heads * head_dim, hidden),
            ("self_attn.v_proj", kv_heads * head_dim, hidden),
            ("self_attn.o_proj", hidden, heads * head_dim),
            ("mlp.gate_proj", intermediate, hidden),
            ("mlp.up_proj", intermediate, hidden),
            ("mlp.down_proj", hidden, intermediate),
        ):
            specs |= _packed(f"{layer}.{name}", rows, columns)
        for name, size in (
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
            ("self_attn.q_norm", head_dim),
            ("self_attn.k_norm", head_dim),
        ):
            specs[f"{layer}.{name}.weight"] = ("BF16", (size,))
    specs |= _packed("lm_head", vocab, hidden)
    specs["model.norm.weight"] = ("BF16", (hidden,))
    _write(path / "model.safetensors", specs, seed)
    return path


def _packed(module: str, rows: int, columns: int) -> Specs:
    return {
        f"{module}.weight": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_scale_2": ("F32", ()),
    }


def _write(path: Path, specs: Specs, seed: int) -> None:
    """A safetensors file: header length, header, then the tensors in order."""
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, shape) in specs.items():
        begin, end = end, end + _BYTES[dtype] * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype, shape in specs.values():
            for block in _blocks(random, dtype, int(np.prod(shape, dtype=np.int64))):
                file.write(block)


def _blocks(random: np.random.Generator, dtype: str, count: int) -> Iterator[bytes]:
    if dtype == "F32":
        yield np.float32(0.002).tobytes()
        return
    nbytes = count * _BYTES[dtype]
    for start in range(0, nbytes, _CHUNK):
        block = np.frombuffer(random.bytes(min(_CHUNK, nbytes - start)), np.uint8).copy()
        if dtype == "F8_E4M3":
            block = block % 16 + 0x30  # 0.5 to 1.9
        elif dtype == "BF16":
            block[1::2] = block[1::2] & 0x80 | 0x3C  # 2^-7 to 2^-5, either sign
        yield block.tobytes()
