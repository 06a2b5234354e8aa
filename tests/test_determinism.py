"""Equal checkpoints and options give equal bundles: every byte of every file, anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgecc
from edgecc.devices import ONNX_DEVICES
from helpers.lowered_pairs import REAL_DRAFT, REAL_TARGET

SCRIPT = """
import sys
import edgecc
edgecc.compile("target", "draft", out=sys.argv[1], device=sys.argv[2], draft_outputs=True)
"""


def compile_elsewhere(folder: Path, device: str, **environment: str) -> dict[str, bytes]:
    """Compile copies of the pair in a process of its own; content of the bundle by path."""
    folder.mkdir(parents=True)
    shutil.copytree(REAL_TARGET, folder / "target")
    shutil.copytree(REAL_DRAFT, folder / "draft")
    for path in folder.rglob("*"):
        os.utime(path, (10**9, 10**9 + len(folder.name)))
    command = [sys.executable, "-c", SCRIPT, f"out-{folder.name}", device]
    source = str(Path(edgecc.__file__).parents[1])
    subprocess.run(
        command, cwd=folder, check=True, env={**os.environ, "PYTHONPATH": source, **environment}
    )
    return contents(folder / f"out-{folder.name}")


def contents(bundle: Path) -> dict[str, bytes]:
    files = (path for path in sorted(bundle.rglob("*")) if path.is_file())
    return {path.relative_to(bundle).as_posix(): path.read_bytes() for path in files}


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_bundles_are_equal_byte_for_byte(device: str, tmp_path: Path) -> None:
    first = compile_elsewhere(tmp_path / "one", device, PYTHONHASHSEED="1", TZ="UTC", LANG="C")
    second = compile_elsewhere(
        tmp_path / "deep" / "and another place",
        device,
        PYTHONHASHSEED="77",
        TZ="Asia/Tokyo",
        LANG="C.UTF-8",
    )
    assert first.keys() == second.keys()
    assert {"bundle.json", "golden.safetensors", f"{device}-lm_head.onnx"} <= first.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_nothing_of_the_machine_is_in_a_bundle(tmp_path: Path) -> None:
    edgecc.compile(REAL_TARGET, REAL_DRAFT, out=tmp_path / "bundle")
    for name, content in contents(tmp_path / "bundle").items():
        for secret in (str(tmp_path), str(REAL_TARGET.parent), os.getcwd()):
            assert secret.encode() not in content, name


def test_options_that_change_nothing_else(tmp_path: Path) -> None:
    """Another thread count of the process, a dump of the IR: no other bytes."""
    edgecc.compile(REAL_TARGET, REAL_DRAFT, out=tmp_path / "plain")
    edgecc.compile(
        REAL_TARGET, REAL_DRAFT, out=tmp_path / "dumped", dump_ir=tmp_path / "ir", progress=print
    )
    assert contents(tmp_path / "plain") == contents(tmp_path / "dumped")
