"""Small synthetic checkpoints in the layouts real ones use, and ways to break them.

`write_target` writes a Qwen3-like target (NVFP4 as ModelOpt exports it, or unquantized),
`write_draft` a DSpark draft that borrows embedding and head. Weights are random but seeded; equal
arguments give equal bytes. `edit_tensors` and `edit_json` rewrite what was written.

The quantizer here follows the public description of ModelOpt's; it shares no code with edgecc.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save_file

from helpers.byte_tokenizer import NUM_TOKENS, write_tokenizer

Array: TypeAlias = NDArray[Any]
Tensors: TypeAlias = dict[str, Array]

VOCAB: Final = 288
"""Rows of the default embedding table; ids from `NUM_TOKENS` on are padding rows."""

MASK_ID: Final = VOCAB - 1
"""Default mask token of the draft: a padding row, as in published checkpoints."""

DROP: Final = object()
"""Value of a config override that removes the key."""

_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=np.float32)
_TIES_UP = np.array([False, True, False, True, False, True, False])
_DTYPES: Mapping[str, type[Any]] = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "I8": np.int8,
    "I32": np.int32,
    "U32": np.uint32,
    "I64": np.int64,
    "BOOL": np.bool_,
}


def nvfp4(module: str, weight: Array, *, amax: float | None = None) -> Tensors:
    """The three tensors ModelOpt stores for an NVFP4 linear layer, and a plausible input scale.

    Args:
        module: Module name, prefix of the tensor names.
        weight: Values `[N, K]`, K a multiple of 16.
        amax: Largest magnitude the global scale is made for; default that of `weight`.
    """
    values = weight.astype(np.float32)
    rows, columns = values.shape
    blocks = values.reshape(rows, columns // 16, 16)
    largest = np.float32(np.abs(values).max() if amax is None else amax)
    scale_2 = largest / np.float32(6 * 448)
    block_max = np.abs(blocks).max(axis=2)
    wanted = np.where(block_max == 0, np.float32(1), block_max / (np.float32(6) * scale_2))
    scale = np.clip(wanted, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn)
    units = blocks / (scale.astype(np.float32) * scale_2)[:, :, None]
    magnitude = np.abs(units)[..., None]
    above = (magnitude > _MIDPOINTS) | ((magnitude == _MIDPOINTS) & _TIES_UP)
    codes = above.sum(axis=3).astype(np.uint8)
    codes |= np.where(units < 0, 8, 0).astype(np.uint8)  # a rounded-away value keeps its sign
    codes = codes.reshape(rows, columns)
    return {
        f"{module}.weight": codes[:, 0::2] | codes[:, 1::2] << 4,
        f"{module}.weight_scale": scale,
        f"{module}.weight_scale_2": np.array(scale_2, dtype=np.float32),
        f"{module}.input_scale": np.array(0.001, dtype=np.float32),
    }


def write_target(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 128,
    vocab: int = VOCAB,
    quantized: bool = True,
    quantized_head: bool = True,
    tied: bool = False,
    shards: int = 1,
    tokenizer: bool = True,
    seed: int = 0,
    **config_overrides: object,
) -> Path:
    """Write a Qwen3-like target and return its folder.

    Args:
        path: Folder to create.
        hidden: Width of the residual stream.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Width of a head; not `hidden / heads` by default.
        intermediate: MLP width.
        vocab: Rows of embedding and head; at least `NUM_TOKENS` if there is a tokenizer.
        quantized: Store linear layers as ModelOpt NVFP4, else everything as BF16.
        quantized_head: Whether `lm_head` is quantized as well (only with `quantized`).
        tied: Leave `lm_head` out and set `tie_word_embeddings`.
        shards: Weight files; more than one adds an index.
        tokenizer: Write tokenizer, chat template and generation config.
        seed: Seed of the weights.
        config_overrides: Keys of config.json to set, or to remove with `DROP`.
    """
    random = np.random.default_rng(seed)
    linear = _Quantizer(quantized)
    tensors: Tensors = {"model.embed_tokens.weight": _matrix(random, vocab, hidden, scale=1.0)}
    for index in range(layers):
        prefix = f"model.layers.{index}."
        tensors |= _decoder_layer(
            random, prefix, hidden, (heads, kv_heads, head_dim), intermediate, linear
        )
    tensors["model.norm.weight"] = _norm(random, hidden)
    if not tied:
        head = _matrix(random, vocab, hidden)
        tensors |= _Quantizer(quantized and quantized_head)({"lm_head": head})
    eos = NUM_TOKENS - 1
    config: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": eos - 2,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": 512,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    path.mkdir(parents=True, exist_ok=True)
    if quantized:
        excluded = ["model.embed_tokens"] + ([] if quantized_head else ["lm_head"])
        config["quantization_config"] = quantization_config(excluded)
        _write_json(path / "hf_quant_config.json", hf_quant_config(excluded))
    _write_json(path / "config.json", _override(config, config_overrides))
    _write_weights(path, tensors, shards)
    if tokenizer:
        write_tokenizer(path)
        generation = {"bos_token_id": eos - 2, "eos_token_id": [eos, eos - 2]}
        _write_json(path / "generation_config.json", generation)
    return path


def write_draft(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 128,
    vocab: int = VOCAB,
    block_size: int = 4,
    markov_rank: int = 8,
    target_layer_ids: Sequence[int] = (1, 3),
    target_layers: int = 4,
    target_hidden: int | None = None,
    mask_token_id: int = MASK_ID,
    confidence_head: bool = True,
    own_head: bool = False,
    own_embedding: bool = False,
    seed: int = 1,
    **config_overrides: object,
) -> Path:
    """Write a DSpark draft in BF16 and return its folder.

    Args:
        path: Folder to create.
        hidden: Width of the draft.
        layers: Draft layers.
        heads: Query heads.
        kv_heads: Key/value heads.
        head_dim: Width of a head.
        intermediate: MLP width.
        vocab: Rows of the target's head.
        block_size: Trained block.
        markov_rank: Rank of the Markov head; 0 leaves it out.
        target_layer_ids: Tapped target layers (their outputs).
        target_layers: Layers of the target.
        target_hidden: Width of the target; default `hidden`.
        mask_token_id: Id embedded in the unknown slots of a block.
        confidence_head: Store the confidence head, with Markov input if there is a Markov head.
        own_head: Ship an `lm_head`.
        own_embedding: Ship `embed_tokens`.
        seed: Seed of the weights.
        config_overrides: Keys of config.json to set, or to remove with `DROP`.
    """
    random = np.random.default_rng(seed)
    taps = len(target_layer_ids) * (hidden if target_hidden is None else target_hidden)
    tensors: Tensors = {"fc.weight": _matrix(random, hidden, taps)}
    tensors["hidden_norm.weight"] = _norm(random, hidden)
    for index in range(layers):
        sizes = (heads, kv_heads, head_dim)
        plain = _Quantizer(False)
        tensors |= _decoder_layer(random, f"layers.{index}.", hidden, sizes, intermediate, plain)
    tensors["norm.weight"] = _norm(random, hidden)
    if markov_rank:
        for name in ("markov_w1", "markov_w2"):
            tensors[f"markov_head.{name}.weight"] = _matrix(random, vocab, markov_rank)
    if confidence_head:
        tensors["confidence_head.proj.weight"] = _matrix(random, 1, hidden + markov_rank)
        tensors["confidence_head.proj.bias"] = np.zeros(1, dtype=ml_dtypes.bfloat16)
    if own_embedding:
        tensors["embed_tokens.weight"] = _matrix(random, vocab, hidden, scale=1.0)
    if own_head:
        tensors["lm_head.weight"] = _matrix(random, vocab, hidden)
    config: dict[str, object] = {
        "architectures": ["Qwen3DSparkModel"],
        "attention_bias": False,
        "block_size": block_size,
        "bos_token_id": NUM_TOKENS - 3,
        "dtype": "bfloat16",
        "enable_confidence_head": confidence_head,
        "eos_token_id": NUM_TOKENS - 1,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "layer_types": ["full_attention"] * layers,
        "markov_rank": markov_rank,
        "mask_token_id": mask_token_id,
        "max_position_embeddings": 512,
        "model_type": "qwen3",
        "num_anchors": 96,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": target_layers,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "sliding_window": None,
        "target_layer_ids": list(target_layer_ids),
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": vocab,
    }
    if markov_rank:
        config["markov_head_type"] = "vanilla"
    if confidence_head:
        config["confidence_head_with_markov"] = markov_rank > 0
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "config.json", _override(config, config_overrides))
    _write_weights(path, tensors, shards=1)
    return path


def quantization_config(excluded: Sequence[str]) -> dict[str, object]:
    """The `quantization_config` ModelOpt 0.47 writes for NVFP4."""
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "config_groups": {
            "group_0": {"input_activations": group, "weights": group, "targets": ["Linear"]}
        },
        "ignore": list(excluded),
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quant_method": "modelopt",
    }


def hf_quant_config(excluded: Sequence[str]) -> dict[str, object]:
    """The `hf_quant_config.json` ModelOpt 0.47 writes for NVFP4."""
    return {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": 16,
            "exclude_modules": list(excluded),
        },
    }


def read_tensors(path: Path) -> Tensors:
    """All tensors of a checkpoint's weight files, read with the reference library."""
    tensors: Tensors = {}
    for file in sorted(path.glob("*.safetensors")):
        stored = safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
        for name, entry in stored:
            flat = np.frombuffer(entry["data"], dtype=_DTYPES[entry["dtype"]])
            tensors[name] = flat.reshape(entry["shape"]).copy()
    return tensors


def edit_tensors(path: Path, change: Callable[[Tensors], Tensors | None]) -> Path:
    """Rewrite the weights of a checkpoint as one file.

    Args:
        path: Checkpoint folder.
        change: Gets all tensors; returns new ones, or None after changing them in place.
    """
    tensors = read_tensors(path)
    changed = change(tensors)
    for stale in (*path.glob("*.safetensors"), *path.glob("*.safetensors.index.json")):
        stale.unlink()
    _write_weights(path, tensors if changed is None else changed, shards=1)
    return path


def dense_copy(source: Path, path: Path) -> Path:
    """Write an NVFP4 checkpoint again with bf16 weights, rounded to nearest; returns its folder."""
    from helpers.reference import dequantize_nvfp4  # it reads checkpoints with this module

    def widen(tensors: Tensors) -> Tensors:
        packed = [n.removesuffix(".weight_scale_2") for n in tensors if n.endswith("scale_2")]
        dense = {
            f"{module}.weight": dequantize_nvfp4(tensors, module).astype(ml_dtypes.bfloat16)
            for module in packed
        }
        sidecars = ("weight_scale", "weight_scale_2", "input_scale")
        kept = {n: a for n, a in tensors.items() if not n.endswith(sidecars)}
        return kept | dense

    shutil.copytree(source, path)
    for file in path.iterdir():  # checkpoints may be read-only
        file.chmod(0o644)
    edit_tensors(path, widen)
    (path / "hf_quant_config.json").unlink()
    edit_json(path / "config.json", quantization_config=DROP)
    return path


def edit_json(path: Path, **changes: object) -> Path:
    """Set keys of a JSON file, or remove them with `DROP`."""
    _write_json(path, _override(json.loads(path.read_text("utf-8")), changes))
    return path


def hub_layout(source: Path, cache: Path) -> Path:
    """Copy a checkpoint into the layout of a hub cache and return its snapshot folder.

    Files become `blobs/<n>`, and `snapshots/<revision>/<name>` links to them.
    """
    snapshot = cache / "snapshots" / "0123abcd"
    blobs = cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


class _Quantizer:
    """Stores modules that share a global scale: NVFP4 if on, BF16 if not."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __call__(self, modules: Mapping[str, Array]) -> Tensors:
        if not self.enabled:
            return {f"{module}.weight": weight for module, weight in modules.items()}
        amax = max(float(np.abs(weight.astype(np.float32)).max()) for weight in modules.values())
        stored: Tensors = {}
        for module, weight in modules.items():
            stored |= nvfp4(module, weight, amax=amax)
        return stored


def _decoder_layer(
    random: np.random.Generator,
    prefix: str,
    hidden: int,
    sizes: tuple[int, int, int],
    intermediate: int,
    linear: _Quantizer,
) -> Tensors:
    heads, kv_heads, head_dim = sizes
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    tensors: Tensors = {
        f"{prefix}input_layernorm.weight": _norm(random, hidden),
        f"{prefix}post_attention_layernorm.weight": _norm(random, hidden),
        f"{attention}q_norm.weight": _norm(random, head_dim),
        f"{attention}k_norm.weight": _norm(random, head_dim),
    }
    tensors |= linear(
        {
            f"{attention}q_proj": _matrix(random, heads * head_dim, hidden),
            f"{attention}k_proj": _matrix(random, kv_heads * head_dim, hidden),
            f"{attention}v_proj": _matrix(random, kv_heads * head_dim, hidden),
        }
    )
    tensors |= linear({f"{attention}o_proj": _matrix(random, hidden, heads * head_dim)})
    tensors |= linear(
        {f"{mlp}{name}_proj": _matrix(random, intermediate, hidden) for name in ("gate", "up")}
    )
    tensors |= linear({f"{mlp}down_proj": _matrix(random, hidden, intermediate)})
    return tensors


def _matrix(random: np.random.Generator, rows: int, columns: int, scale: float = 0.0) -> Array:
    """Random BF16 `[rows, columns]`; the default scale keeps the size of activations."""
    deviation = scale or 1.0 / np.sqrt(columns)
    return (random.standard_normal((rows, columns)) * deviation).astype(ml_dtypes.bfloat16)


def _norm(random: np.random.Generator, size: int) -> Array:
    """Random BF16 norm weights around 1."""
    return (1 + 0.1 * random.standard_normal(size)).astype(ml_dtypes.bfloat16)


def _override(config: dict[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    merged = {**config, **changes}
    return {key: value for key, value in merged.items() if value is not DROP}


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", "utf-8")


def _write_weights(path: Path, tensors: Tensors, shards: int) -> None:
    ordered = {name: tensors[name].copy(order="C") for name in sorted(tensors)}
    if shards == 1:
        save_file(ordered, path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {
            n: a for i, (n, a) in enumerate(ordered.items()) if i * shards // len(ordered) == index
        }
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in ordered.values())
    index_file = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(path / "model.safetensors.index.json", index_file)
