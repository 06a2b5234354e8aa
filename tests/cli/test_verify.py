"""`edgecc verify`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load, save

from edgecc.backends.bundle import Bundle
from helpers.command_line import Command


def test_a_good_bundle(edgecc: Command, bundle: Path) -> None:
    result = edgecc("verify", bundle, "--prompts", 2, "--max-new-tokens", 6)
    assert (result.code, result.out) == (0, "")
    assert "target logits: ok (error " in result.err
    assert "draft proposals: ok (error " in result.err
    assert "speculation with 1 proposal, prompt of 1 token: ok" in result.err
    assert "speculation with 4 proposals" in result.err
    assert result.last == f"edgecc: ok {bundle}: 8 checks passed"


def test_json(edgecc: Command, bundle: Path) -> None:
    result = edgecc("verify", bundle, "--prompts", 1, "--max-new-tokens", 4, "--json")
    found = json.loads(result.out)
    assert found["passed"] is True
    assert len(found["checks"]) == 6
    for check in found["checks"]:
        assert set(check) == {"name", "error", "tolerance", "passed"}
        assert check["passed"] is True
        assert 0 <= check["error"] <= check["tolerance"]


def test_without_prompts(edgecc: Command, bundle: Path) -> None:
    assert edgecc("verify", bundle, "--prompts", 0).last.endswith("4 checks passed")


@pytest.mark.parametrize(
    "flags",
    [
        ["--prompts", "-1"],
        ["--max-new-tokens", "0"],
        ["--num-threads", "0"],
        ["--prompts", "x"],
    ],
    ids=" ".join,
)
def test_bad_flags(edgecc: Command, bundle: Path, flags: list[str]) -> None:
    result = edgecc("verify", bundle, *flags)
    assert (result.code, result.id, result.out) == (2, "usage", "")


@pytest.mark.parametrize("path", ["", "a\0b"])
def test_no_path(edgecc: Command, path: str) -> None:
    result = edgecc("verify", path)
    assert (result.code, result.id) == (2, "usage/bad-path")


def test_any_flipped_bit_is_found(edgecc: Command, copy: Path) -> None:
    for path in sorted(p for p in copy.rglob("*") if p.is_file() and p.name != "bundle.json"):
        data = path.read_bytes()
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
        result = edgecc("verify", copy, "--prompts", 0)
        assert (result.code, result.id) == (3, "bundle/hash-mismatch"), path.name
        assert path.name in result.err
        path.write_bytes(data)
    assert edgecc("verify", copy, "--prompts", 0).code == 0


@pytest.mark.parametrize(
    ("name", "check"), [("logits", "target logits"), ("proposals", "draft proposals")]
)
def test_numbers_that_differ(
    edgecc: Command, copy: Path, monkeypatch: pytest.MonkeyPatch, name: str, check: str
) -> None:
    """As on a machine whose engine computes something else."""
    golden = load((copy / "golden.safetensors").read_bytes())
    golden[name] = golden[name] + np.ones(1, dtype=golden[name].dtype)
    (copy / "golden.safetensors").write_bytes(save(golden))
    monkeypatch.setattr(Bundle, "verify_hashes", lambda self, progress=None: None)
    monkeypatch.setattr(Bundle, "check_sizes", lambda self: None)
    result = edgecc("verify", copy, "--prompts", 1, "--json")
    assert (result.code, result.id) == (5, "verify/mismatch")
    assert f"{check}: FAILED" in result.err
    assert "1 of 6 checks failed" in result.last
    found = json.loads(result.out)
    assert found["passed"] is False
    assert [c["name"] for c in found["checks"] if not c["passed"]] == [check]


def test_golden_rows_that_are_garbage(
    edgecc: Command, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy / "golden.safetensors").write_bytes(b"nonsense")
    monkeypatch.setattr(Bundle, "verify_hashes", lambda self, progress=None: None)
    monkeypatch.setattr(Bundle, "check_sizes", lambda self: None)
    result = edgecc("verify", copy)
    assert (result.code, result.id) == (3, "bundle/golden")
