"""Small synthetic Qwen3.5 targets with a vision tower, in the layout real ones use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from helpers.byte_tokenizer import NUM_TOKENS, VISION_SPECIAL
from helpers.checkpoints import Tensors, edit_tensors
from helpers.hybrid import VISION, HybridSizes, write_hybrid_target

START, END, IMAGE = (NUM_TOKENS + i for i in range(len(VISION_SPECIAL)))
"""Ids of the tokens around an image, and of its placeholder."""


@dataclass(frozen=True, kw_only=True)
class VisionSizes:
    """Sizes of a tower; all widths differ, so that no mix-up goes unnoticed.

    Attributes:
        depth: Blocks.
        hidden: Width.
        heads: Attention heads.
        intermediate: Width inside the MLPs.
        patch: Pixels along either side of a patch.
        frames: Frames of a patch.
        merge: Patches along either side of a block.
        grid: Learned position embeddings along either side.
    """

    depth: int = 2
    hidden: int = 24
    heads: int = 2
    intermediate: int = 40
    patch: int = 4
    frames: int = 2
    merge: int = 2
    grid: int = 5


def write_vision_target(
    path: Path,
    sizes: VisionSizes | None = None,
    text: HybridSizes | None = None,
    *,
    seed: int = 0,
    prefix: str = "model.visual.",
    vision: Mapping[str, object] | None = None,
    processor: Mapping[str, object] | None = None,
    mixed: bool = False,
    mtp: int = 0,
    **config: object,
) -> Path:
    """Write a multimodal target and return its folder.

    Args:
        path: Folder to create.
        sizes: Of the tower.
        text: Of the language model.
        seed: Of the weights.
        prefix: What the tensors of the tower are called with.
        vision: Keys of `vision_config` to set; None values remove them.
        processor: Likewise of `preprocessor_config.json`.
        mixed: Store the language model in the mixed precision of published checkpoints.
        mtp: Layers of a complete multi-token-prediction block; 0 stores some of its tensors.
        config: Keys at the top of the config to set or remove.
    """
    sizes, text = sizes or VisionSizes(), text or HybridSizes()
    write_hybrid_target(path, text, multimodal=True, mixed=mixed, mtp=mtp, seed=seed)
    made = tower(sizes, text.hidden, prefix, np.random.default_rng(seed + 1))

    def replace(tensors: Tensors) -> Tensors:
        return {k: v for k, v in tensors.items() if k not in VISION} | made

    edit_tensors(path, replace)
    top = json.loads((path / "config.json").read_text("utf-8"))
    top |= {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END}
    top["vision_config"] = _set(_vision_config(sizes, text.hidden), vision or {})
    _write(path / "config.json", _set(top, config))
    _write(path / "preprocessor_config.json", _set(_processor(sizes), processor or {}))
    return path


def tower(sizes: VisionSizes, out: int, prefix: str, random: np.random.Generator) -> Tensors:
    """Random tensors of a tower, bf16."""
    made: Tensors = {}

    def normal(name: str, *shape: int, scale: float, around: float = 0.0) -> None:
        values = around + random.standard_normal(shape) * scale
        made[prefix + name] = values.astype(ml_dtypes.bfloat16)

    def linear(name: str, rows: int, *columns: int) -> None:
        normal(f"{name}.weight", rows, *columns, scale=float(np.prod(columns)) ** -0.5)
        normal(f"{name}.bias", rows, scale=0.2)

    def norm(name: str, width: int) -> None:
        normal(f"{name}.weight", width, scale=0.2, around=1)
        normal(f"{name}.bias", width, scale=0.2)

    width, merged = sizes.hidden, sizes.hidden * sizes.merge**2
    linear("patch_embed.proj", width, 3, sizes.frames, sizes.patch, sizes.patch)
    normal("pos_embed.weight", sizes.grid**2, width, scale=0.5)
    for i in range(sizes.depth):
        norm(f"blocks.{i}.norm1", width)
        linear(f"blocks.{i}.attn.qkv", 3 * width, width)
        linear(f"blocks.{i}.attn.proj", width, width)
        norm(f"blocks.{i}.norm2", width)
        linear(f"blocks.{i}.mlp.linear_fc1", sizes.intermediate, width)
        linear(f"blocks.{i}.mlp.linear_fc2", width, sizes.intermediate)
    norm("merger.norm", width)
    linear("merger.linear_fc1", merged, merged)
    linear("merger.linear_fc2", out, merged)
    return made


def _vision_config(sizes: VisionSizes, out: int) -> dict[str, object]:
    return {
        "deepstack_visual_indexes": [],
        "depth": sizes.depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": sizes.hidden,
        "in_channels": 3,
        "intermediate_size": sizes.intermediate,
        "model_type": "qwen3_5_vision",
        "num_heads": sizes.heads,
        "num_position_embeddings": sizes.grid**2,
        "out_hidden_size": out,
        "patch_size": sizes.patch,
        "spatial_merge_size": sizes.merge,
        "temporal_patch_size": sizes.frames,
    }


def _processor(sizes: VisionSizes) -> dict[str, object]:
    return {
        "image_mean": [0.5, 0.45, 0.4],
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": [0.5, 0.25, 0.3],
        "merge_size": sizes.merge,
        "patch_size": sizes.patch,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": 64 * 64, "shortest_edge": 16 * 16},
        "temporal_patch_size": sizes.frames,
    }


def _set(values: dict[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    return {k: v for k, v in {**values, **changes}.items() if v is not None}


def _write(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2), "utf-8")
