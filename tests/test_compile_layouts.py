"""Pairs in other producers' layouts, from compile to run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgecc
from edgecc.backends.bundle import Bundle
from helpers.checkpoints import write_draft, write_target
from helpers.quantized_layouts import LAYOUTS, requantize

SMALL: Mapping[str, Any] = {
    **{"layers": 1, "hidden": 128, "heads": 2, "kv_heads": 1, "head_dim": 64},
    "intermediate": 128,
}
TAPS: Mapping[str, Any] = {"target_layers": 1, "target_layer_ids": (0,)}
FAST: Mapping[str, Any] = {"max_model_len": 48}
IDS = [5, 9, 200, 31]
QUICK = ("compressed-tensors-nvfp4", "awq", "gptq-order", "compressed-tensors-mxfp8")
"""One of each kind of arithmetic; the others run with the slow tests."""
CASES = [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in LAYOUTS]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("q") / "dense", **SMALL, quantized=False)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("q") / "draft", **SMALL, **TAPS)


def texts(path: Path) -> tuple[list[int], list[int]]:
    """Token ids without and with a draft."""
    with edgecc.load(path) as generator:
        plain = generator.generate(token_ids=IDS, max_new_tokens=24, speculation=False)
        fast = generator.generate(token_ids=IDS, max_new_tokens=24)
    return list(plain.token_ids), list(fast.token_ids)


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.safetensors"))


@pytest.mark.parametrize("case", CASES)
def test_a_pair_runs_as_its_values_do(case: str, dense: Path, draft: Path, tmp_path: Path) -> None:
    """Target, head and draft are packed; the draft borrows the packed head.

    The other checkpoint has the values in float32, as the tests computed them: its texts are equal,
    with a draft and without. Codes stay packed in the bundle.
    """
    layout = LAYOUTS[case]
    target, target_values = requantize(dense, tmp_path / "t", layout)
    packed, packed_values = requantize(draft, tmp_path / "d", layout)
    report = edgecc.compile(target, packed, out=tmp_path / "a", verify="full", **FAST)
    assert len(report.checks) == 4
    edgecc.compile(target_values, packed_values, out=tmp_path / "b", **FAST)
    plain, fast = texts(tmp_path / "a")
    assert plain == fast
    assert (plain, fast) == texts(tmp_path / "b")
    manifest = Bundle.open(tmp_path / "a").manifest
    stored_bytes = sum(w["bytes"] for s, w in manifest["weights"].items() if ".rope." not in s)
    assert stored_bytes <= 1.1 * (size(target) + size(packed))
    kinds = {w["encoding"].partition("<")[0] for w in manifest["weights"].values()}
    assert layout.kind in kinds
    if layout.head:
        (head,) = [i for i in manifest["shared"] if i["role"] == "lm_head"]
        assert head["users"] == ["draft", "target"]
        stored = manifest["weights"][head["symbol"]]
        assert stored["encoding"].startswith(layout.kind)
        assert 8 * stored["bytes"] <= layout.bits * np.prod(stored["shape"])


@pytest.mark.parametrize("case", CASES)
def test_standard_onnx_widens_them_inside_the_model(
    case: str, dense: Path, draft: Path, tmp_path: Path
) -> None:
    target, _ = requantize(dense, tmp_path / "t", LAYOUTS[case])
    packed, _ = requantize(draft, tmp_path / "d", LAYOUTS[case])
    options = {"device": "onnx", "verify": "full", **FAST}
    report = edgecc.compile(target, packed, out=tmp_path / "a", **options)
    assert len(report.checks) == 4
    plain, fast = texts(tmp_path / "a")
    assert plain == fast


def test_nvfp4_with_a_divisor_in_eight_bits(dense: Path, draft: Path, tmp_path: Path) -> None:
    layout = LAYOUTS["compressed-tensors-nvfp4"]
    target, _ = requantize(dense, tmp_path / "t", layout)
    options = {"linear_form": "int8-split", "verify": "full", **FAST}
    edgecc.compile(target, draft, out=tmp_path / "a", **options)
    plain, fast = texts(tmp_path / "a")
    assert plain == fast
