"""The standard dialect without our engine: the onnx reference evaluator runs the shipped pair.

Whoever has the models, the weight file and the program of an entry can run them; expected values
are the goldens, computed by transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from safetensors.numpy import load_file

from edgecc.roles import Role
from helpers.lowered_pairs import PAIRS, REAL_DRAFT, REAL_TARGET, Array, LoweredPair


class Portable:
    """Runs entries with nothing but onnx and the manifest; caches go in and out."""

    def __init__(self, folder: Path, artifact: dict[str, Any]) -> None:
        self.artifact = artifact
        self.models = {
            name: ReferenceEvaluator(onnx.load(str(folder / model["file"])))
            for name, model in artifact["models"].items()
        }
        self.caches: dict[str, dict[str, Array]] = {}

    def run(self, entry: str, inputs: dict[Role, Array]) -> dict[Role, Array]:
        ports = self.artifact["entries"][entry]
        fresh = {
            p["name"]: np.zeros([1, *p["shape"][1:]], np.float32)
            for p in ports["inputs"]
            if p["role"] == Role.KV_CACHE
        }
        values = dict(self.caches.get(entry, fresh))
        values |= {p["name"]: inputs[p["role"]] for p in ports["inputs"] if p["role"] in inputs}
        for step in self.artifact["programs"][entry]:
            feeds = {name: values[value] for name, value in step["inputs"].items()}
            results = self.models[step["graph"]].run(list(step["outputs"]), feeds)
            values |= dict(zip(step["outputs"].values(), results, strict=True))
        self.caches[entry] = {
            p["alias"]: values[p["value"]] for p in ports["outputs"] if p["alias"] is not None
        }
        return {Role(p["role"]): values[p["value"]] for p in ports["outputs"] if p["alias"] is None}


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Portable:
    folder = tmp_path_factory.mktemp("portable")
    pair = LoweredPair(folder, REAL_TARGET, REAL_DRAFT, device="onnx", max_model_len=64)
    return Portable(folder, dict(pair.artifact.manifest))


@pytest.fixture(scope="module")
def goldens() -> dict[str, Array]:
    return load_file(PAIRS / "goldens-tiny-qwen3-dspark.safetensors")


def assert_near(found: Array, expected: Array) -> None:
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("prompt", ["p0", "p1"])
def test_reference_evaluator_reproduces_the_goldens(
    prompt: str, portable: Portable, goldens: dict[str, Array]
) -> None:
    golden = {k.partition(".")[2]: v for k, v in goldens.items() if k.startswith(f"{prompt}.")}
    ids = golden["ids"].astype(np.int64)
    start = np.zeros(1, np.int64)
    features = []
    for rows in (ids[:-3], ids[-3:-2], ids[-2:]):  # the caches are handed from call to call
        target = portable.run(
            "target",
            {
                Role.TOKEN_IDS: rows[None],
                Role.CACHE_LENGTH: start,
                Role.LOGIT_ROWS: np.array([len(rows) - 1]),
            },
        )
        features.append(target[Role.HIDDEN_TAP])
        start = start + len(rows)
    assert_near(target[Role.LOGITS][0], golden["target_logits_last"])
    taps = np.concatenate(features, axis=1)
    if prompt == "p0":
        assert_near(taps[0], golden["draft_input_states"])
    draft = portable.run(
        "draft",
        {
            Role.FEATURES: taps,
            Role.ANCHOR: golden["greedy"][:1].astype(np.int64),
            Role.CACHE_LENGTH: np.zeros(1, np.int64),
        },
    )
    np.testing.assert_array_equal(draft[Role.PROPOSALS][0], golden["block_tokens"])
    assert_near(draft[Role.BASE_LOGITS][0], golden["block_logits_before_markov"])
    assert_near(draft[Role.DRAFT_LOGITS][0], golden["block_logits_after_markov"])
    assert_near(draft[Role.CONFIDENCE][0], golden["block_confidence_logits"])
