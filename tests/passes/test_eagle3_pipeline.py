"""The default passes on a lifted EAGLE3 pair: the same bits before and after, one head each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgecc.devices import ONNX_DEVICES, get_device
from edgecc.frontends.lift import lift
from edgecc.frontends.options import LiftOptions
from edgecc.ir import Module, parse_module, print_module, verify
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from edgecc.passes.pipeline import parse_pipeline
from helpers.checkpoints import write_target
from helpers.eagle3 import write_eagle3
from helpers.modules import evaluate, storage
from helpers.ops import assert_same_bits

DATA = Path(__file__).parents[1] / "data" / "pairs"
REAL = (DATA / "tiny-qwen3-nvfp4", DATA / "tiny-qwen3-eagle3")
SMALL = {"layers": 3, "hidden": 32, "head_dim": 16, "intermediate": 48}


def pair(folder: Path, **draft: object) -> tuple[Path, Path]:
    target = write_target(folder / "t", **SMALL)
    return target, write_eagle3(folder / "d", target_layer_ids=[0, 1, 2], **draft)


def lifted(paths: tuple[Path, Path], steps: int = 3) -> Module:
    sizes = LiftOptions(max_model_len=32, prefill_chunk=16, num_speculative_tokens=steps)
    return lift(*paths, sizes)


def inputs(module: Module, ids: int) -> dict[str, dict[str, np.ndarray]]:
    """Four tokens of the target, two rows of the draft, caches full of noise."""
    rng = np.random.default_rng(0)
    given: dict[str, dict[str, np.ndarray]] = {
        "target": {"token_ids": rng.integers(0, ids, (1, 4)), "logit_rows": np.array([3])},
        "draft": {"next_token_ids": rng.integers(0, ids, (1, 2))},
    }
    for name, arrays in given.items():
        arrays["cache_length"] = np.array([3])
        for item in module.graphs[name].inputs:
            if item.name not in arrays:
                rows = 2 if item.name == "features" else item.value.type.shape[1]
                shape = (1, rows, *item.value.type.shape[2:])
                arrays[item.name] = rng.standard_normal(shape)
    return given


def check(module: Module, reference: Module, run: PassManager, ctx: PassContext) -> set[str]:
    """Bits of all outputs that stay are equal; returns the names of those that do not stay."""
    BindSharedWeights().run(reference, PassContext())
    given = inputs(reference, 250)
    before = evaluate(reference, given)
    run.run(module, ctx)
    assert verify(module) == []
    after = evaluate(module, given)
    assert_same_bits(list(after.values()), [before[name] for name in after])
    return set(before) - set(after)


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_the_real_pair(device: str) -> None:
    made = get_device(device)
    module = lifted(REAL)
    manager = PassManager(default_pipeline(made))
    dropped = check(module, lifted(REAL), manager, PassContext(made))
    assert dropped == {"draft.draft_logits"}
    table = module.weights
    assert table.resolve("draft.embed_tokens.weight") == "target.model.embed_tokens.weight"
    assert table.resolve("draft.lm_head.weight") == "draft.lm_head.weight"
    assert "lm_head" not in module.graphs
    fused = {
        n for n, g in module.graphs.items() for x in g.nodes if x.op.name == "cached_attention"
    }
    if made.fused_attention:
        assert {"draft.body", "draft.step1"} < fused
        assert not [x for g in module.graphs.values() for x in g.nodes if x.op.name == "attention"]


@pytest.mark.parametrize("device", ONNX_DEVICES)
def test_a_borrowed_head(tmp_path: Path, device: str) -> None:
    made = get_device(device)
    paths = pair(tmp_path, draft_ids=None, own_head=False)
    module = lifted(paths)
    check(module, lifted(paths), PassManager(default_pipeline(made)), PassContext(made))
    assert "target.lm_head.weight" in storage(module)
    assert not [s for s in storage(module) if s.startswith("draft.lm_head")]


@pytest.mark.parametrize(
    "names",
    [
        "bind-shared-weights",
        "bind-shared-weights,dedupe-weights,dce",
        "bind-shared-weights,fuse-qkv,fuse-gate-up",
        "bind-shared-weights,fuse-cached-attention,dce",
    ],
)
def test_exact_passes(tmp_path: Path, names: str) -> None:
    paths = pair(tmp_path)
    manager = PassManager(parse_pipeline(names))
    assert check(lifted(paths), lifted(paths), manager, PassContext()) == set()


def test_no_weight_is_stored_twice(tmp_path: Path) -> None:
    """Each step reads the same weights: stacking them in one step would copy them."""
    module = lifted(pair(tmp_path))
    PassManager(parse_pipeline("bind-shared-weights,fuse-qkv,fuse-gate-up,dce")).run(
        module, PassContext()
    )
    assert not [s for s in module.graphs["draft"].used_weights() if "+" in s]


@pytest.mark.parametrize("bound", [True, False])
def test_text_parses_back_equal(tmp_path: Path, bound: bool) -> None:
    module = lifted(pair(tmp_path))
    if bound:
        BindSharedWeights().run(module, PassContext())
    text = print_module(module, locations=True)
    parsed = parse_module(text)
    assert print_module(parsed, locations=True) == text
