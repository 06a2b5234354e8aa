"""Hybrids whose drafts and precisions are those of published pairs, small and of random weights.

Two revisions of one published draft have the same name, and other widths, heads and tapped layers:
the first taps recurrent layers only. Both rotate whole heads with YaRN, the target a part of each
without.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgecc
from edgecc.backends.runtime.verify import verify_bundle
from edgecc.driver import CompileReport
from helpers.checkpoints import write_draft
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target

SIZES = HybridSizes(
    layer_types=(LINEAR, LINEAR, LINEAR, FULL, LINEAR), rotary=0.25, head_dim=32, value_heads=6
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e7,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "truncate": True,
}
REVISIONS: dict[str, dict[str, Any]] = {
    "first": {"heads": 5, "kv_heads": 1, "intermediate": 40, "target_layer_ids": (1, 2, 4)},
    "current": {"heads": 4, "kv_heads": 1, "intermediate": 68, "target_layer_ids": (1, 3, 4)},
}
FORMS: dict[str, dict[str, Any]] = {
    "fp8": {"quantization": "fp8"},
    "fp8-channel": {"quantization": "fp8-channel", "draft_quantization": "fp8"},
    "fp8-block": {"quantization": "fp8-block"},
    "nvfp4": {"quantization": "nvfp4", "quantize_head": True},
}


def draft_of(folder: Path, revision: str) -> Path:
    """A draft of five target layers with a block of 7."""
    return write_draft(
        folder / "d",
        hidden=32,
        layers=1,
        block_size=7,
        target_layers=5,
        max_position_embeddings=512,
        rope_parameters=YARN,
        **REVISIONS[revision],
    )


def check(report: CompileReport) -> None:
    """The engine agrees with the reference, and speculation changes no token."""
    assert len(report.checks) == 5
    assert report.bundle is not None
    result = verify_bundle(report.bundle.path, prompts=2, max_new_tokens=12)
    assert result.passed, [str(c) for c in result.checks]
    assert len(result.checks) == 5 + 2 * 2


@pytest.mark.parametrize("device", ["cpu", "onnx"])
@pytest.mark.parametrize("revision", REVISIONS)
def test_revisions(tmp_path: Path, revision: str, device: str) -> None:
    """FP8 mixers, NVFP4 MLPs and head in one checkpoint."""
    target = write_hybrid_target(tmp_path / "t", SIZES, mixed=True, multimodal=True)
    out = tmp_path / "b"
    report = edgecc.compile(
        target,
        draft_of(tmp_path, revision),
        out=out,
        device=device,
        max_model_len=128,
        prefill_chunk=24,
        verify="full",
    )
    check(report)
    taps = list(REVISIONS[revision]["target_layer_ids"])
    assert any(f"target layers {taps}" in line for line in report.decisions)


@pytest.mark.parametrize("form", FORMS)
def test_precisions(tmp_path: Path, form: str) -> None:
    target = write_hybrid_target(tmp_path / "t", SIZES)
    report = edgecc.compile(
        target,
        draft_of(tmp_path, "current"),
        out=tmp_path / "b",
        max_model_len=128,
        prefill_chunk=24,
        verify="full",
        **FORMS[form],
    )
    check(report)
