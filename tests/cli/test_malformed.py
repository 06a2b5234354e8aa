"""Checkpoints broken in every way that can be derived: always a diagnostic, never a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from helpers.checkpoints import Array, edit_tensors, read_tensors, write_draft, write_target
from helpers.command_line import TAPS, Command

TINY: dict[str, Any] = {
    "layers": 1,
    "hidden": 16,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 16,
    "intermediate": 16,
}
VALUES: tuple[object, ...] = (
    None,
    "x",
    -1,
    0,
    10**30,
    1.5,
    float("nan"),
    True,
    [],
    {},
    [None],
    "\ud800",
)
RAW = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe{}",
    b'{"a": 1, "a": 2}',
    b"[" * 100_000,
    b"version https://git-lfs.github.com/spec/v1\noid sha256:00",
    b"9" * 5000,
)


class Broken:
    """A pair to break, mended after each check.

    Args:
        folder: Where the originals are.
        work: Where the copies go.
        edgecc: The command.
    """

    def __init__(self, folder: Path, work: Path, edgecc: Command) -> None:
        self._originals, self._work, self._edgecc = folder, work, edgecc
        self.codes: list[int] = []
        for role in ("target", "draft"):
            shutil.copytree(folder / role, work / role)

    def path(self, role: str) -> Path:
        """A checkpoint that may be changed."""
        return self._work / role

    def check(self, what: str, *, dry_run: bool = True) -> None:
        """Compile, look at how it fails, and mend."""
        out = self._work / "out"
        flags = ["--dry-run"] if dry_run else []
        result = self._edgecc(
            "compile", self.path("target"), "--draft", self.path("draft"), "-o", out, *flags
        )
        assert result.code in (0, 2, 3, 4), f"{what}: {result.code}\n{result.err}"
        assert "Traceback" not in result.err, what
        if result.code:
            assert result.last.startswith("edgecc: error["), what
            assert not out.exists(), what
        self.codes.append(result.code)
        shutil.rmtree(out, ignore_errors=True)

    def mend(self, role: str, name: str) -> None:
        """Put a file back."""
        path = self.path(role) / name
        if path.is_dir():
            path.rmdir()
        shutil.copy(self._originals / role / name, path)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("malformed")
    write_target(folder / "target", **TINY)
    write_draft(folder / "draft", **TINY, **TAPS, own_head=True, own_embedding=True)
    return folder


@pytest.fixture
def broken(originals: Path, tmp_path: Path, edgecc: Command) -> Iterator[Broken]:
    pair = Broken(originals, tmp_path, edgecc)
    yield pair
    pair.check("mended again")
    assert pair.codes[-1] == 0


def some(items: Sequence[Any], turn: int, full: bool) -> list[Any]:
    """All items, or three of them: others with each turn."""
    return list(items) if full else [items[(3 * turn + i) % len(items)] for i in range(3)]


full = pytest.mark.parametrize(
    "full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"]
)


@full
@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("target", "config.json"),
        ("draft", "config.json"),
        ("target", "generation_config.json"),
        ("target", "hf_quant_config.json"),
        ("target", "tokenizer.json"),
    ],
)
def test_any_value_of_any_key(broken: Broken, role: str, name: str, full: bool) -> None:
    path = broken.path(role) / name
    config: dict[str, object] = json.loads(path.read_text())
    for turn, key in enumerate(config):
        for value in some(VALUES, turn, full):
            path.write_text(json.dumps({**config, key: value}))
            broken.check(f"{role}/{name}: {key} = {value!r}")
        path.write_text(json.dumps({k: v for k, v in config.items() if k != key}))
        broken.check(f"{role}/{name}: no {key}")
    assert {0, 3} <= set(broken.codes)
    broken.mend(role, name)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_any_file_missing_or_garbage(broken: Broken, role: str) -> None:
    for path in sorted(broken.path(role).iterdir()):
        path.unlink()
        broken.check(f"no {role}/{path.name}")
        path.mkdir()
        broken.check(f"{role}/{path.name} is a folder")
        path.rmdir()
        path.symlink_to("nowhere")
        broken.check(f"{role}/{path.name} is a broken link")
        path.unlink()
        path.symlink_to("/etc/hostname")
        broken.check(f"{role}/{path.name} leads away")
        path.unlink()
        for raw in RAW:
            path.write_bytes(raw)
            broken.check(f"{role}/{path.name}: {raw[:16]!r}")
        broken.mend(role, path.name)


def no_number(a: Array) -> Array:
    """A NaN in the first place."""
    changed = a.copy()
    if changed.dtype.kind not in "ui":
        changed.reshape(-1)[0] = np.nan
    return changed


def huge(a: Array) -> Array:
    """Values at the end of bfloat16."""
    if a.dtype != ml_dtypes.bfloat16:
        return a
    return np.asarray(a.astype(np.float32) * np.float32(1e30)).astype(a.dtype)


CHANGES: dict[str, Callable[[Array], Array]] = {
    "empty": lambda a: a.reshape(-1)[:0],
    "one more row": lambda a: np.concatenate([a, a[-1:]]) if a.ndim else a.reshape(1),
    "transposed": lambda a: np.ascontiguousarray(a.T),
    "float32": lambda a: a.astype(np.float32),
    "int32": lambda a: a.astype(np.float32).astype(np.int32),
    "3-d": lambda a: a[None],
    "NaN": no_number,
    "huge": huge,
}


@full
@pytest.mark.parametrize("role", ["target", "draft"])
def test_any_tensor(broken: Broken, originals: Path, role: str, full: bool) -> None:
    tensors = read_tensors(originals / role)
    repeated = ("mlp.", "v_proj", "o_proj", "k_proj", "layernorm")
    names = [n for n in tensors if full or not any(part in n for part in repeated)]
    for turn, name in enumerate(names):
        edit_tensors(
            broken.path(role), lambda _, name=name: {n: a for n, a in tensors.items() if n != name}
        )
        broken.check(f"{role}: no {name}")
        for what in some(list(CHANGES), turn, full):
            changed = {**tensors, name: CHANGES[what](tensors[name])}
            edit_tensors(broken.path(role), lambda _, changed=changed: changed)
            broken.check(f"{role}: {name} {what}", dry_run=what != "huge")
    assert {0, 3} <= set(broken.codes)
    broken.mend(role, "model.safetensors")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_any_cut_and_any_flipped_bit_of_a_header(broken: Broken, role: str) -> None:
    path = broken.path(role) / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    for size in (0, 1, 7, 8, 9, 100, header - 1, header, len(data) - 1024, len(data) - 1):
        path.write_bytes(data[:size])
        broken.check(f"{role}: cut to {size}")
    assert set(broken.codes) == {3}
    path.write_bytes(data + b"x")
    broken.check(f"{role}: a byte more")
    random = np.random.default_rng(5)
    for place in random.integers(0, header, 40):
        flipped = bytearray(data)
        flipped[place] ^= 1 << int(random.integers(8))
        path.write_bytes(flipped)
        broken.check(f"{role}: byte {place} flipped")
    broken.mend(role, "model.safetensors")
