"""Files made to cost memory or time: a check ends soon, with a finding, in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from edgecc.contract.report import check
from helpers.broken_pairs import header, write_pair
from helpers.checkpoints import DROP, edit_json
from helpers.command_line import environment
from helpers.hybrid import LINEAR, HybridSizes, write_hybrid_target

HUGE: Final = 99_000_000
"""Bytes: a header may have a hundred million."""

_MEASURE = """
import resource, sys
from edgecc.contract.report import check
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = check(*sys.argv[1:])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(report.exit_code, report.findings[0].diagnostic.id, (after - before) // 1024)
"""


def framed(text: bytes) -> bytes:
    """A file of nothing but a header."""
    return len(text).to_bytes(8, "little") + text


def many_tensors() -> bytes:
    entry = b'"t%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    return b"{" + b",".join(entry % i for i in range(1_500_000)) + b"}"


FILES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "spaces": ("model.safetensors", lambda: framed(b"{}" + b" " * HUGE), "bad-value"),
    "metadata": (
        "model.safetensors",
        lambda: framed(b'{"__metadata__":{"a":"' + b"x" * HUGE + b'"}}'),
        "bad-value",
    ),
    "numbers": (
        "model.safetensors",
        lambda: framed(b'{"a":[' + b"1," * (HUGE // 2) + b"1]}"),
        "bad-json",
    ),
    "tensors": ("model.safetensors", lambda: framed(many_tensors()), "bad-header"),
    "lists": ("model.safetensors", lambda: framed(b'{"a":' + b"[" * HUGE), "bad-json"),
    "objects": ("model.safetensors", lambda: framed(b'{"a":' * (HUGE // 5)), "bad-json"),
    "a length without a file": (
        "model.safetensors",
        lambda: (2**62).to_bytes(8, "little") + b"{}",
        "bad-header",
    ),
    "a config of numbers": (
        "config.json",
        lambda: b'{"a":[' + b"1," * 33_000_000 + b"1]}",
        "bad-json",
    ),
    "a config of a gigabyte": ("config.json", lambda: b" " * (65 << 20), "too-large"),
    "a deep config": ("config.json", lambda: b'{"a":' * 1_000_000, "bad-json"),
}
SOON = ("numbers", "a length without a file", "a deep config")


@pytest.mark.parametrize(
    "name", [n if n in SOON else pytest.param(n, marks=pytest.mark.slow) for n in FILES]
)
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    """Four bytes for each of a file of a hundred megabytes, and a minute, are plenty."""
    target, draft = write_pair(tmp_path)
    file, make, expected = FILES[name]
    (target / file).write_bytes(make())
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(target), str(draft)],
        capture_output=True,
        env=environment(),
        timeout=300,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    code, id, megabytes = done.stdout.split()
    assert code == "3"
    assert expected in id
    assert int(megabytes) < 450


def test_a_layer_count_without_layers_costs_nothing(tmp_path: Path) -> None:
    """A count is compared with what is stored before anything is made of it."""
    target, draft = write_pair(tmp_path)
    config = json.loads((target / "config.json").read_text())
    for count in (10**9, 2**31 - 1):
        config["num_hidden_layers"] = count
        (target / "config.json").write_text(json.dumps(config))
        report = check(target, draft)
        assert report.findings[0].diagnostic.id == "config/bad-value"
        assert str(count) in report.findings[0].diagnostic.message


@pytest.mark.parametrize(
    ("role", "key", "value", "id"),
    [
        ("draft", "vocab_size", 2**31 - 1, "bind/vocab-mismatch"),
        ("draft", "block_size", 513, "config/bad-value"),
        ("draft", "block_size", 2**31 - 1, "config/bad-value"),
        ("target", "max_position_embeddings", 1, "config/bad-value"),
    ],
)
def test_numbers_of_a_config_that_no_model_has(
    tmp_path: Path, role: str, key: str, value: int, id: str
) -> None:
    """They are told as such, and nothing is made as large as they say."""
    target, draft = write_pair(tmp_path)
    edit_json((target if role == "target" else draft) / "config.json", **{key: value})
    tracemalloc.start()
    try:
        report = check(target, draft)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()
    assert report.exit_code == 3
    found = {f.diagnostic.id: f.diagnostic for f in report.findings}
    assert str(value) in found[id].message


def test_a_cycle_of_layers_longer_than_the_model(tmp_path: Path) -> None:
    """Two billion layers from one to the next that attends: none of the two here does."""
    sizes = HybridSizes(layer_types=(LINEAR, LINEAR))
    target = write_hybrid_target(tmp_path / "t", sizes)
    changes = {"layer_types": DROP, "full_attention_interval": 2**31 - 1}
    edit_json(target / "config.json", **changes)
    tracemalloc.start()
    try:
        check(target)
        assert tracemalloc.get_traced_memory()[1] < 100 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("entries", "size", "found"),
    [
        ({"../x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, 1, "missing-tensor"),
        ({"x\x00": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, 1, "bad-tensor"),
        ({"x": {"dtype": "U8", "shape": [2**62, 4], "data_offsets": [0, 1]}}, 1, "bad-tensor"),
        ({"x": {"dtype": "U8", "shape": [1] * 9, "data_offsets": [0, 1]}}, 1, "bad-tensor"),
        ({"x": {"dtype": "U8", "shape": [0, 2**40], "data_offsets": [0, 0]}}, 0, "missing"),
        ({"x": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, 2, "bad-tensor"),
        ({"x": 7}, 0, "bad-tensor"),
        ({"__metadata__": {"a": 1}}, 0, "bad-header"),
    ],
)
def test_entries(tmp_path: Path, entries: dict[str, object], size: int, found: str) -> None:
    target, draft = write_pair(tmp_path)
    (draft / "model.safetensors").write_bytes(header(entries, size))
    report = check(target, draft)
    assert report.exit_code == 3
    told = [f.diagnostic.id for f in report.findings if f.diagnostic.severity == "error"]
    assert any(found in id or id == "draft/unknown" for id in told), told
