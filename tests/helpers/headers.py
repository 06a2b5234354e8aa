"""Checkpoints of full size without their bytes: a header, and a file with holes behind it.

Lifting reads headers and single scales only, so these cost no disk and no memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TypeAlias

import numpy as np

Specs: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
"""Tensor name to dtype (as safetensors spells it) and shape."""

_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}


def write_headers(path: Path, config: Mapping[str, object], specs: Specs) -> Path:
    """Write a checkpoint of zeros, but for scalars, which are 0.01.

    Args:
        path: Folder to create.
        config: Its config.json.
        specs: Its tensors.
    """
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config), "utf-8")
    header: dict[str, object] = {}
    end = 0
    scalars = []
    for name, (dtype, shape) in specs.items():
        begin, end = end, end + _BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        if not shape:
            scalars.append(begin)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for begin in scalars:
            file.seek(8 + len(text) + begin)
            file.write(np.float32(0.01).tobytes())
        file.truncate(8 + len(text) + end)
    return path


def bf16(name: str, *shape: int) -> Specs:
    """An unquantized tensor."""
    return {name: ("BF16", shape)}


def fp8(module: str, rows: int, columns: int) -> Specs:
    """A ModelOpt FP8 linear layer."""
    return {
        f"{module}.weight": ("F8_E4M3", (rows, columns)),
        f"{module}.weight_scale": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }


def nvfp4(module: str, rows: int, columns: int) -> Specs:
    """A ModelOpt NVFP4 linear layer."""
    return {
        f"{module}.weight": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_scale_2": ("F32", ()),
        f"{module}.input_scale": ("F32", ()),
    }
