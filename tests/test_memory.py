"""Compiling takes memory for one block of rows, not for the checkpoint.

Measured is anonymous memory of a compiling process beyond what its imports take: checkpoints are
mapped, and pages of a mapped file are the page cache's, which gives them up when memory is short.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import edgecc.device_artifact
import edgecc.driver
from edgecc.backends.bundle import Bundle
from helpers.checkpoints import write_draft
from helpers.large import write_large_target

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 1 << 20
ALLOWED = 64 * MIB
"""Of anonymous memory beyond the imports: a few blocks of `WeightTable.row_blocks`."""
GROWTH = 12 * MIB
"""Allowed between a checkpoint and one of four times the layers: graphs are objects as well."""

CHILD = """
import json, resource, sys
import edgecc.driver
options = json.loads(sys.argv[1])
limit = options.pop("limit", None)
if limit is not None:
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    size = 1024 * int(fields["VmData"].split()[0]) + limit
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))
print("ready", flush=True)
sys.stdin.readline()
edgecc.driver.compile(**options)
"""


@dataclass(frozen=True)
class Usage:
    """Anonymous memory of a compile in bytes: after the imports, and at most."""

    imports: int
    peak: int

    @property
    def beyond_imports(self) -> int:
        return self.peak - self.imports


def compile_measured(**options: object) -> Usage:
    """Compile in a process of its own and watch it."""
    text = json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in options.items()})
    command = [sys.executable, "-c", CHILD, text]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as child:  # type: ignore[call-overload]
        assert child.stdout.readline() == "ready\n", child.communicate()[1]
        imports = peak = anonymous(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        while child.poll() is None:
            peak = max(peak, anonymous(child.pid))
            time.sleep(0.002)
        assert child.returncode == 0, child.communicate()[1]
    return Usage(imports, peak)


def anonymous(pid: int) -> int:
    """RssAnon of a process in bytes; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def write(folder: Path, layers: int) -> Path:
    """14 million weights a layer, 8 MB packed, 56 MB as the CPU computes with them."""
    return write_large_target(
        folder,
        hidden=1024,
        layers=layers,
        heads=8,
        kv_heads=4,
        intermediate=4096,
        vocab=4096,
    )


def checkpoint_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    small, large = write(tmp_path / "small", 3), write(tmp_path / "large", 12)
    grown = checkpoint_bytes(large) - checkpoint_bytes(small)
    assert grown > 5 * GROWTH
    usages = {
        target.name: compile_measured(target=target, out=tmp_path / f"{target.name}-bundle")
        for target in (small, large)
    }
    assert usages["small"].beyond_imports < ALLOWED
    assert usages["large"].peak - usages["small"].peak < GROWTH
    for target in (small, large):
        decisions = Bundle.open(tmp_path / f"{target.name}-bundle").manifest["decisions"]
        assert any("the engine was not opened" in line for line in decisions)


def test_the_measure_sees_an_engine(tmp_path: Path) -> None:
    """`verify="full"` opens the engine: what the test above allows is far exceeded."""
    usage = compile_measured(target=write(tmp_path / "t", 3), out=tmp_path / "b", verify="full")
    assert usage.beyond_imports > 3 * 56 * MIB > 2 * ALLOWED


def test_fast_verification_opens_small_engines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound counts what the engine computes with, not what is stored."""
    checked = []

    def check(*_: object) -> tuple[()]:
        checked.append(1)
        return ()

    monkeypatch.setattr(edgecc.device_artifact, "check_engine", check)
    target = write_large_target(
        tmp_path / "target",
        hidden=256,
        layers=1,
        heads=2,
        kv_heads=1,
        intermediate=256,
        vocab=1024,
    )
    for bound, times in ((3 * MIB, 1), (MIB, 1)):
        monkeypatch.setattr(edgecc.device_artifact, "ENGINE_CHECK_BYTES", bound)
        edgecc.driver.compile(target, out=tmp_path / "bundle", max_model_len=64)
        assert len(checked) == times
    # 0.5 million weights: 0.8 MB stored with the embedding, 2.6 MB computed with.
    stored = Bundle.open(tmp_path / "bundle").file("weights/weights.safetensors").stat().st_size
    assert stored < MIB
    edgecc.driver.compile(target, out=tmp_path / "bundle", max_model_len=64, verify="full")
    assert len(checked) == 2


@pytest.fixture
def large_pair(tmp_path: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Folders of a target of 2 GiB, a draft, and a place for the bundle; removed at the end."""
    folder = tmp_path / "large"
    target = write_large_target(
        folder / "target",
        hidden=2048,
        layers=40,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=8192,
        vocab=151936,
    )
    draft = write_draft(
        folder / "draft",
        hidden=2048,
        layers=1,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=2048,
        vocab=151936,
        mask_token_id=151935,
        target_layer_ids=(1, 18, 36),
        target_layers=40,
    )
    yield target, draft, folder / "bundle"
    shutil.rmtree(folder)


@pytest.mark.slow
def test_two_gigabytes_under_a_hard_limit(large_pair: tuple[Path, Path, Path]) -> None:
    """The kernel refuses every allocation beyond the limit: less than half the largest tensor.

    RLIMIT_DATA counts private writable memory, reserved or used; mapped files do not count.
    """
    target, draft, out = large_pair
    assert checkpoint_bytes(target) > 2 << 30
    limit = 256 * MIB
    assert limit < 2 * 151936 * 2048 / 2
    usage = compile_measured(target=target, draft=draft, out=out, limit=limit)
    assert usage.beyond_imports < limit
    assert Bundle.open(out).manifest["shared"]


@pytest.mark.slow
def test_the_hard_limit_stops_an_engine(tmp_path: Path) -> None:
    target = write(tmp_path / "target", 6)
    with pytest.raises(AssertionError, match=r"(?i)alloc|memory"):
        compile_measured(target=target, out=tmp_path / "bundle", verify="full", limit=256 * MIB)
