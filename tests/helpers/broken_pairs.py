"""Tools to break a small pair in one place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from helpers.checkpoints import DROP, Tensors, edit_json, edit_tensors, write_draft, write_target
from helpers.command_line import SMALL, TAPS
from helpers.eagle3 import write_eagle3

Break: TypeAlias = Callable[[Path, Path], object]

BAD, UNSUPPORTED, FINE = 3, 4, 0


@dataclass(frozen=True)
class Case:
    """One way to break a pair.

    Attributes:
        id: Of the finding.
        code: Exit code of a check.
        about: What is broken.
        apply: Breaks the folders of target and draft.
        says: A text that the finding holds: file, tensor or key, value found or expected.
        alone: Check the target without the draft.
        components: Parts of the target that are looked at.
    """

    id: str
    code: int
    about: str
    apply: Break
    says: str = ""
    alone: bool = False
    components: str = "text"


def write_pair(folder: Path) -> tuple[Path, Path]:
    """A target and a DSpark draft that borrows from it."""
    target = write_target(folder / "target", **SMALL)
    return target, write_draft(folder / "draft", **SMALL, **TAPS)


def config(role: str, **changes: object) -> Break:
    """Changes keys of a config."""

    def apply(target: Path, draft: Path) -> None:
        edit_json((target if role == "target" else draft) / "config.json", **changes)

    return apply


def stored(role: str, changes: dict[str, Any]) -> Break:
    """Replaces tensors: an array, a function of the old one, or `DROP`."""

    def apply(target: Path, draft: Path) -> None:
        def change(found: Tensors) -> None:
            for name, value in changes.items():
                if value is DROP:
                    del found[name]
                else:
                    found[name] = value(found[name]) if callable(value) else value

        edit_tensors(target if role == "target" else draft, change)

    return apply


def file(role: str, name: str, data: bytes | None) -> Break:
    """Writes a file, or removes it."""

    def apply(target: Path, draft: Path) -> None:
        path = (target if role == "target" else draft) / name
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)

    return apply


def weights(role: str, change: Callable[[Path], object]) -> Break:
    """Does something to the file of weights."""
    return lambda target, draft: change(
        (target if role == "target" else draft) / "model.safetensors"
    )


def index(role: str, change: Callable[[dict[str, Any]], object]) -> Break:
    """Adds an index of the single file, under the name of a shard, and changes it."""

    def apply(target: Path, draft: Path) -> None:
        folder = target if role == "target" else draft
        shard = folder / "model-00001-of-00001.safetensors"
        (folder / "model.safetensors").rename(shard)
        names = header_of(shard)
        content = {"metadata": {}, "weight_map": dict.fromkeys(names, shard.name)}
        change(content)
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))

    return apply


def header_of(path: Path) -> list[str]:
    """Names of the tensors of a file."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def all_of(*parts: Break) -> Break:
    """One after the other."""

    def apply(target: Path, draft: Path) -> None:
        for part in parts:
            part(target, draft)

    return apply


def replaced(write: Callable[[Path], object], role: str = "draft") -> Break:
    """Another checkpoint in the place of the target or draft."""

    def apply(target: Path, draft: Path) -> None:
        path = target if role == "target" else draft
        shutil.rmtree(path)
        write(path)

    return apply


def language_model(change: Callable[[dict[str, int]], dict[str, int]] = dict) -> Break:
    """A language model as a draft, whose tokenizer has a changed vocabulary."""

    def apply(target: Path, draft: Path) -> None:
        shutil.rmtree(draft)
        write_target(draft, **SMALL, **PLAIN, seed=1)
        path = draft / "tokenizer.json"
        content = json.loads(path.read_text("utf-8"))
        content["model"]["vocab"] = change(content["model"]["vocab"])
        path.write_text(json.dumps(content), "utf-8")

    return apply


def eagle3(**options: Any) -> Break:
    """An EAGLE3 draft for the target, which gets enough layers."""

    def apply(target: Path, draft: Path) -> None:
        shutil.rmtree(target)
        shutil.rmtree(draft)
        write_target(target, **{**SMALL, "layers": 8})
        write_eagle3(draft, **options)

    return apply


def header(entries: dict[str, Any], data: int = 0) -> bytes:
    """A safetensors file with this header and so many bytes of zeros."""
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def f32(*shape: int) -> Any:
    """Zeros."""
    return np.zeros(shape, np.float32)


def bf16(*shape: int) -> Any:
    """Ones in BF16."""
    return np.ones(shape, ml_dtypes.bfloat16)


PACKED: Final = ("weight", "weight_scale", "weight_scale_2", "input_scale")
"""Tensors of a packed weight."""

QUANT: Final = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
MIXED: Final = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
PLAIN: Final = {"quantized": False}
Q: Final = "model.layers.0.self_attn.q_proj"


def only(path: Path, found: Tensors) -> None:
    """A checkpoint with a config and these tensors."""
    (path / "config.json").write_text("{}")
    save_file(found, path / "model.safetensors")


def plain_target(**changes: Any) -> Break:
    """An unquantized target."""
    return replaced(lambda path: write_target(path, **SMALL, **PLAIN, **changes), "target")


def bigger(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(b"x")


def rows_less(array: Any) -> Any:
    return array[:-1]


def renamed(role: str, old: str, new: str) -> Break:
    """Another name for the same tensors: `old` and `new` are beginnings."""

    def apply(target: Path, draft: Path) -> None:
        def change(found: Tensors) -> Tensors:
            return {
                new + n.removeprefix(old) if n.startswith(old) else n: a for n, a in found.items()
            }

        edit_tensors(target if role == "target" else draft, change)

    return apply


def tokenizer(change: Callable[[dict[str, Any]], object]) -> Break:
    """Changes tokenizer.json."""

    def apply(target: Path, draft: Path) -> None:
        path = target / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return apply


def added(id: int, content: str) -> Callable[[dict[str, Any]], object]:
    """One more added token."""
    entry = {
        "id": id,
        "content": content,
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    return lambda tokenizer: tokenizer["added_tokens"].append(entry)
