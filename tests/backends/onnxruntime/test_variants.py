"""Pairs that keep head and embedding in different places, against the interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgecc.roles import Role
from helpers.checkpoints import write_draft, write_target
from helpers.lowered_pairs import FORMS, LoweredPair, Reference, draft_inputs, target_inputs

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "target alone": ({}, None),
    "target alone, tied": ({"tied": True}, None),
    "unquantized": ({"quantized": False}, {}),
    "tied": ({"tied": True}, {}),
    "head in bf16": ({"quantized_head": False}, {}),
    "draft with a head": ({}, {"own_head": True}),
    "draft with an embedding": ({}, {"own_embedding": True}),
    "draft with both": ({}, {"own_head": True, "own_embedding": True}),
    "no confidence head": ({}, {"confidence_head": False}),
    "one query head per KV head": ({"kv_heads": 4}, {"kv_heads": 4}),
    "one KV head": ({"kv_heads": 1}, {"kv_heads": 1, "heads": 2}),
    "heads of 24": ({"head_dim": 24}, {"head_dim": 40}),
    "block of one": ({}, {"block_size": 1}),
    "block of nine": ({}, {"block_size": 9}),
    "linear rope": (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
    ),
}


def make(folder: Path, name: str, form: str) -> LoweredPair:
    target_options, draft_options = VARIANTS[name]
    target = write_target(folder / "target", layers=2, **target_options)
    draft = None
    if draft_options is not None:
        options = {"layers": 1, "target_layer_ids": (0, 1), "target_layers": 2} | draft_options
        draft = write_draft(folder / "draft", **options)
    device, linear = FORMS[form]
    return LoweredPair(folder / "out", target, draft, device=device, form=linear, max_model_len=32)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", VARIANTS)
def test_engine_agrees_with_the_interpreter(name: str, form: str, tmp_path: Path) -> None:
    pair = make(tmp_path, name, form)
    engine = pair.engine()
    ids = np.random.default_rng(1).integers(0, 250, 11).tolist()
    reference, target = Reference(pair.reference, "target"), engine.entry("target")
    taps = []
    for start, end in ((0, 7), (7, 8), (8, 11)):
        inputs = target_inputs(ids[start:end], start)
        expected = reference.run(inputs)
        found = target.run(inputs, list(expected))
        compare(found, expected, pair.tolerance)
        if Role.HIDDEN_TAP in expected:
            taps.append(expected[Role.HIDDEN_TAP][0])
    if not taps:
        return
    features = np.concatenate(taps)
    reference, draft = Reference(pair.reference, "draft"), engine.entry("draft")
    for start, end in ((0, 9), (9, 10), (10, 11)):
        inputs = draft_inputs(features[start:end], ids[end - 1], start)
        expected = reference.run(inputs)
        compare(draft.run(inputs, list(expected)), expected, pair.tolerance)


def compare(found: dict[Role, Any], expected: dict[Role, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for role, array in expected.items():
        if array.dtype.kind == "i":
            np.testing.assert_array_equal(found[role], array, err_msg=role)
        else:
            atol = tolerance * float(np.abs(array).max())
            np.testing.assert_allclose(found[role], array, rtol=0, atol=atol, err_msg=role)


@pytest.mark.parametrize(
    ("name", "shared"),
    [
        ("tied", True),
        ("unquantized", True),
        ("head in bf16", True),
        ("draft with a head", False),
        ("draft with both", False),
        ("draft with an embedding", True),
    ],
)
def test_only_a_borrowed_head_becomes_a_model_of_its_own(
    name: str, shared: bool, tmp_path: Path
) -> None:
    pair = make(tmp_path, name, "cpu-dense")
    assert ("lm_head" in pair.artifact.manifest["models"]) == shared
