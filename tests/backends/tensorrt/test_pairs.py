"""The shipped pairs: what the builder gets, and the engines it makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import edgecc
from edgecc.activation_check import QUANTIZED_TOLERANCE
from edgecc.backends.runtime.golden import relative_rms
from edgecc.backends.tensorrt.profiles import fixed_sizes, profiles
from edgecc.devices import DEVICES, get_device
from edgecc.driver import lift
from edgecc.errors import MismatchError, UnsupportedError
from edgecc.golden import golden_rows
from edgecc.inspection import inspect_path
from edgecc.ir import Role
from edgecc.lowered_check import check_lowered
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.byte_tokenizer import NUM_TOKENS, write_tokenizer
from helpers.checkpoints import MASK_ID, write_draft, write_target
from helpers.dspark_heads import BLOCK, write_heads
from helpers.eagle3 import write_eagle3
from helpers.goldens import PAIRS, relative
from helpers.hybrid import FULL, LINEAR, HybridSizes, write_hybrid_target
from helpers.plans import products
from helpers.reference import Draft, Target
from helpers.tensorrt_network import NetworkPair
from helpers.vision import VisionSizes, write_vision_target

torch = pytest.importorskip("torch")

GPUS = [name for name, device in DEVICES.items() if device.library]
BUILT = ("sm86", "sm89", "sm120")
CANNOT_RUN = (
    *("cuda/no-gpu", "cuda/not-installed", "tensorrt/wrong-gpu"),
    "runtime/unsupported-draft",
)
"""Why a bundle of the tests does not open: no GPU, or a kind of pair that is not driven there."""


def lowered(target: Path, draft: Path | None, device: str, activations: str = "auto"):
    record = get_device(device)
    manager = PassManager(default_pipeline(record, activations=activations))
    module = lift(target, draft)
    manager.run(module, PassContext(record))
    return module, manager


@pytest.fixture(scope="module")
def pair():
    return PAIRS / "tiny-qwen3-nvfp4", PAIRS / "tiny-qwen3-dspark"


@pytest.mark.parametrize("device", GPUS)
def test_weights_have_the_form_of_the_record(pair, device):
    module, _ = lowered(*pair, device)
    kinds = {
        module.weights[module.weights.resolve(n.weights[0])].encoding.kind
        for g in module.graphs.values()
        for n in g.nodes
        if n.op.name == "linear"
    }
    native = "nvfp4" if "nvfp4" in get_device(device).native_linear else "int8_block"
    assert kinds == {"dense", native}


def test_caches_and_everything_but_scores_has_16_bits(pair):
    module, _ = lowered(*pair, "sm120")
    for graph in module.graphs.values():
        assert {i.value.type.dtype.value for i in graph.by_role(Role.KV_CACHE)} <= {"bf16"}
    (logits,) = module.graphs["target"].outputs_by_role(Role.LOGITS)
    assert logits.value.type.dtype.value == "f32"
    *_, head = module.graphs["lm_head"].nodes
    assert head.result.type.dtype.value == "f32"


def test_profiles_of_a_pair(pair):
    module, _ = lowered(*pair, "sm86")
    body = module.graphs["target.body"]
    sizes = fixed_sizes(module, body)
    assert sizes["b"] == 1
    found = {p.name: p.shapes["token_ids"] for p in profiles(module, body, sizes)}
    assert found == {
        "verify": ((1, 1), (1, 8), (1, 8)),
        "prefill": ((1, 1), (1, 128), (1, 128)),
    }
    head = module.graphs["lm_head"]
    assert fixed_sizes(module, head)["h0"] == 1
    tail = module.graphs["draft.tail"]
    assert profiles(module, tail, fixed_sizes(module, tail)) == []


@pytest.mark.parametrize(
    ("device", "activations"), [("sm86", "auto"), ("sm120", "16bit"), ("sm120", "auto")]
)
def test_the_lowered_pair_matches_the_goldens_and_the_second_oracle(pair, device, activations):
    """In its own 16-bit types, by the interpreter and by PyTorch."""
    from edgecc.backends.torch import TorchExecutor

    module, manager = lowered(*pair, device, activations)
    golden = golden_rows(lift(*pair), manager.passes)
    checks, _ = check_lowered(module, golden)
    assert all(c.passed for c in checks)
    from safetensors.numpy import load

    want = load(golden)
    ids = want["token_ids"][None]
    graph = module.graphs["target"]
    caches = {
        i.name: np.zeros([1, *map(int, i.value.type.shape[1:])], np.float32)
        for i in graph.by_role(Role.KV_CACHE)
    }
    rows = {"cache_length": np.zeros(1, np.int64), "logit_rows": np.array([ids.shape[1] - 1])}
    found = TorchExecutor(module).run("target", {"token_ids": ids, **rows, **caches})
    if "activation scales" in {c.name for c in checks}:  # chaotic: see docs/adr/0013
        assert relative_rms(found["logits"][0], want["logits"]) < QUANTIZED_TOLERANCE
    else:
        error = np.abs(found["logits"][0] - want["logits"]).max() / np.abs(want["logits"]).max()
        assert error < 0.05


def test_a_wrong_lowered_graph_is_not_built(pair):
    module, manager = lowered(*pair, "sm120", "16bit")
    golden = golden_rows(lift(*pair), manager.passes)
    (head,) = module.graphs["lm_head"].nodes
    swapped = module.weights[module.weights.resolve(head.weights[0])]
    other = lift(pair[0])
    table = other.weights["target.model.embed_tokens.weight"]
    module.weights.rebind(module.weights.resolve(head.weights[0]), table)
    assert swapped.shape == table.shape
    with pytest.raises(MismatchError, match="other numbers than the reference"):
        check_lowered(module, golden)


def test_compiling_without_the_package(pair, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_rtx", None)
    with pytest.raises(UnsupportedError, match="TensorRT-RTX, which is not installed"):
        edgecc.compile(*pair, out=tmp_path / "b", device="sm120")
    assert not (tmp_path / "b").exists()
    report = edgecc.compile(*pair, out=tmp_path / "b", device="sm120", dry_run=True)
    assert report.weight_bytes > 0


SHIPPED = {
    "dspark": ("tiny-qwen3-nvfp4", "tiny-qwen3-dspark", "tiny-qwen3-dspark"),
    "eagle3": ("tiny-qwen3-nvfp4", "tiny-qwen3-eagle3", "tiny-qwen3-eagle3"),
    "hybrid": ("tiny-qwen3_5-mixed", "tiny-qwen3_5-dspark", "tiny-qwen3_5-mixed-dspark"),
}
"""Target, draft and goldens of each pair."""

TOLERANCE = 0.02
"""Of the networks, relative to the largest value of the goldens, which are in float32."""


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(
    "device", ["sm120", *(pytest.param(d, marks=pytest.mark.slow) for d in ("sm86", "sm89"))]
)
def test_networks_compute_the_goldens(trt, name, device):
    """What the builder gets, layer by layer, against values of transformers."""
    target, draft, goldens = SHIPPED[name]
    golden = {
        key.removeprefix("p0."): array
        for key, array in load_file(PAIRS / f"goldens-{goldens}.safetensors").items()
        if key.startswith("p0.")
    }
    pair = NetworkPair(trt, device, PAIRS / target, PAIRS / draft, max_model_len=64)
    ids, anchor = golden["ids"].tolist(), int(golden["greedy"][0])
    cut = len(ids) - 6  # two calls, so that the second reads what the first left
    calls = [pair.target(ids[:cut]), pair.target(ids[cut:])]
    logits, taps = (np.concatenate([c[n] for c in calls]) for n in ("logits", "hidden_tap"))
    assert relative(logits[-1:], golden["target_logits_last"].reshape(1, -1)) <= TOLERANCE
    assert logits.argmax(axis=-1).tolist() == golden["target_top1"].tolist()
    assert relative(taps, golden["draft_input_states"]) <= TOLERANCE
    if name == "eagle3":
        block, scores = pair.draft_chain(taps, [*ids[1:], anchor]), golden["block_logits"]
    else:
        block, scores = pair.draft(taps, anchor), golden["block_logits_after_markov"]
    assert relative(block["draft_logits"], scores) <= TOLERANCE
    assert block["proposals"].tolist() == golden["block_tokens"].tolist()


def precisions(engine: Mapping[str, Any], part: str) -> set[str]:
    """Stored forms of the weights whose names have a part; scales of activations are no weights."""
    named = {n: w for n, w in engine["weights"].items() if not n.endswith("input_scale")}
    return {w["precision"] for name, w in named.items() if part in name}


FP8_FORM = {"sm86": "bf16", "sm89": "fp8", "sm120": "fp8"}
NVFP4_FORM = {"sm86": "int8, bf16 scales of 16", "sm89": "int8, bf16 scales of 16"}


def compiled(target: Path, draft: Path, out: Path, device: str) -> dict[str, Any]:
    """Engines of a pair; every check of the evaluation has passed."""
    report = edgecc.compile(target, draft, out=out, device=device, max_model_len=128)
    rounded = any("activations" in c for c in report.checks)
    assert len(report.checks) == 5 or (rounded and len(report.checks) > 5)
    assert all(": ok" in c for c in report.checks)
    bundle = json.loads((out / "bundle.json").read_text())
    engines: dict[str, Any] = bundle["artifacts"][device]["engines"]
    for engine in engines.values():
        assert (out / engine["file"]).stat().st_size == engine["bytes"]
    with pytest.raises(UnsupportedError) as caught:
        edgecc.load(out)
    assert caught.value.id in CANNOT_RUN
    return {**bundle, "engines": engines, "decisions": report.decisions}


def check_hybrid(found: Mapping[str, Any], device: str) -> None:
    """Mixed precision for each module, states in float32 and not in place, caches in place."""
    body = found["engines"]["target.body"]
    assert precisions(body, "linear_attn.in_proj_qkv") == {FP8_FORM[device]}
    assert precisions(body, "self_attn.o_proj") == {FP8_FORM[device]}
    assert precisions(body, "mlp.") == {NVFP4_FORM.get(device, "nvfp4")}
    assert precisions(body, "conv1d") == {"f32"}
    states = [p for p in body["outputs"] if "state" in p["name"]]
    assert {(p["dtype"], p["alias"]) for p in states} == {("f32", None)}
    assert {p["dtype"] for p in body["outputs"] if p["alias"]} == {"bf16"}
    assert not any(d.startswith("engines only") for d in found["decisions"])


@pytest.mark.slow
@pytest.mark.parametrize("device", BUILT)
def test_the_shipped_hybrid_compiles(trt, tmp_path, device):
    target, draft, _ = SHIPPED["hybrid"]
    found = compiled(PAIRS / target, PAIRS / draft, tmp_path / "b", device)
    parts = {"lm_head", "target.body", "target.tail", "draft.body", "draft.tail"}
    assert set(found["engines"]) == parts
    check_hybrid(found, device)


@pytest.mark.slow
@pytest.mark.parametrize("device", BUILT)
def test_the_shipped_eagle3_pair_compiles(trt, tmp_path, device):
    """The draft has a head of its own, so each model is one engine."""
    target, draft, _ = SHIPPED["eagle3"]
    found = compiled(PAIRS / target, PAIRS / draft, tmp_path / "b", device)
    assert set(found["engines"]) == {"target", "draft"}
    assert [s["role"] for s in found["shared"]] == ["embed_tokens"]
    assert not [d for d in found["decisions"] if d.startswith("engines only")]


def test_a_small_hybrid_compiles(trt, tmp_path):
    """A layer of each kind, in mixed precision."""
    sizes = HybridSizes(layer_types=(LINEAR, FULL))
    target = write_hybrid_target(tmp_path / "t", sizes, mixed=True)
    write_tokenizer(target)
    draft = write_draft(
        tmp_path / "d", hidden=32, layers=1, target_layers=2, target_layer_ids=(0, 1)
    )
    found = compiled(target, draft, tmp_path / "b", "sm89")
    check_hybrid(found, "sm89")


def test_a_small_tower_compiles(trt, tmp_path):
    """The tower is an engine beside the target's, and both are evaluated before."""
    sizes = HybridSizes(layer_types=(FULL,), head_dim=64, sections=(6, 5, 5))
    target = write_vision_target(tmp_path / "t", VisionSizes(depth=1, hidden=144, heads=2), sizes)
    write_tokenizer(target, images=True)
    out = tmp_path / "b"
    report = edgecc.compile(target, out=out, device="sm120", max_model_len=128, components="all")
    assert [c.partition(":")[0] for c in report.checks] == [
        "lowered image_features",
        "lowered logits",
        "lowered next_logits",
    ]
    assert all(": ok" in c for c in report.checks)
    assert report.bundle is not None
    artifact = report.bundle.manifest["artifacts"]["sm120"]
    engines = artifact["engines"]
    assert set(engines) == {"target", "vision"}
    assert [p["name"] for p in engines["vision"]["profiles"]] == ["image"]
    with pytest.raises(UnsupportedError) as caught:
        edgecc.load(out)
    assert caught.value.id in CANNOT_RUN


def test_a_small_eagle3_pair_compiles(trt, tmp_path):
    target = write_target(tmp_path / "t", layers=2, hidden=64)
    draft = write_eagle3(tmp_path / "d", hidden=64, taps=2, target_layer_ids=[0, 1])
    report = edgecc.compile(
        target, draft, out=tmp_path / "b", device="sm86", num_speculative_tokens=2
    )
    assert len(report.checks) == 5


def test_a_small_recurrent_markov_head(trt, tmp_path):
    """The state goes through one engine; what the builder gets computes the reference."""
    target, draft = write_heads(tmp_path, kind="rnn", reduced=True)
    pair = NetworkPair(trt, "sm120", target, draft, max_model_len=64)
    ids = [7, 3, 11, 2, 5, 13]
    model = Target(target)
    reference = Draft(draft, model, block_size=BLOCK, mask_token_id=MASK_ID, num_tokens=NUM_TOKENS)
    expected = reference.run(model.run(ids).taps((0,)), 12, BLOCK)
    found = pair.draft(pair.target(ids)["hidden_tap"], 12)
    assert relative(found["draft_logits"], expected.logits) <= TOLERANCE
    assert found["proposals"].tolist() == expected.tokens
    report = edgecc.compile(target, draft, out=tmp_path / "b", device="sm86", max_model_len=64)
    assert all(": ok" in c for c in report.checks)
    assert report.bundle is not None
    assert set(report.bundle.manifest["artifacts"]["sm86"]["engines"]) == {"target", "draft"}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["sm86", "sm120"])
def test_a_target_with_its_own_block_compiles(trt, tmp_path, device):
    """The head is one engine, and so are all steps of the block but the first."""
    sizes = HybridSizes(layer_types=(LINEAR, FULL))
    target = write_hybrid_target(tmp_path / "t", sizes, mtp=1)
    report = edgecc.compile(
        target,
        out=tmp_path / "b",
        device=device,
        spec_method="mtp",
        num_speculative_tokens=4,
        max_model_len=64,
        prefill_chunk=8,
    )
    artifact = report.bundle.manifest["artifacts"][device]
    steps = [step["graph"] for step in artifact["programs"]["draft"]]
    assert steps.count("lm_head") == 4
    assert steps.count("draft.step1") == 3
    assert set(steps) == {"draft.body", "draft.step1", "draft.tail", "lm_head"}


@pytest.mark.slow
@pytest.mark.parametrize("device", BUILT)
def test_pairs_in_bf16_compile(trt, tmp_path, device):
    """Unquantized targets of both architectures."""
    hybrid = write_hybrid_target(tmp_path / "h", HybridSizes(layer_types=(LINEAR, FULL)))
    write_tokenizer(hybrid)
    first = write_draft(
        tmp_path / "hd", hidden=32, layers=1, target_layers=2, target_layer_ids=(0, 1)
    )
    dense = write_target(tmp_path / "t", layers=2, quantized=False)
    second = write_draft(tmp_path / "td", layers=1, target_layers=2, target_layer_ids=(0, 1))
    for name, pair in {"hybrid": (hybrid, first), "dense": (dense, second)}.items():
        found = compiled(*pair, tmp_path / name, device)
        assert precisions(found["engines"]["target.body"], "mlp.") == {"bf16"}


@pytest.mark.slow
@pytest.mark.parametrize("device", BUILT)
def test_a_pair_compiles(trt, pair, tmp_path, device):
    found = compiled(*pair, tmp_path / "a", device)
    engines = found["engines"]
    assert set(engines) == {"lm_head", "target.body", "target.tail", "draft.body", "draft.tail"}
    head = engines["lm_head"]
    assert {s["role"] for s in found["shared"]} == {"embed_tokens", "lm_head"}
    assert [e["bound_bytes"] > 0 for e in engines.values()] == [
        name in ("target.body", "draft.body") for name in engines
    ]
    assert found["files"]["weights/weights.safetensors"]["bytes"] < 1.01 * (4096 * 256 * 2)
    if device == "sm120":
        assert {w["precision"] for w in head["weights"].values()} == {"nvfp4", "f32"}
        for name, count in (("lm_head", 1), ("target.body", 32)):
            made = products((tmp_path / "a" / engines[name]["file"]).read_bytes())
            assert set(made) == {("fp4_e2m1", "fp4_e2m1", "float")}
            assert len(made) == count * len(engines[name]["profiles"])
    caches = [p for p in engines["target.body"]["outputs"] if p["alias"]]
    assert len(caches) == 16
    assert f"{device}/lm_head" in inspect_path(tmp_path / "a")["engines"]


@pytest.mark.slow
@pytest.mark.parametrize("device", BUILT)
def test_a_pair_compiles_with_weights_as_inputs(trt, pair, tmp_path, device):
    """No weight is in a plan, and those of the file are as few as the checkpoint's."""
    report = edgecc.compile(*pair, out=tmp_path / "a", device=device, weights="bind")
    bundle = report.bundle.manifest
    engines = bundle["artifacts"][device]["engines"]
    assert {e["weight_bytes"] for e in engines.values()} == {0}
    assert bundle["artifacts"][device]["weights"] == "bind"
    encoded = sum(w["bytes"] for w in bundle["weights"].values())
    size = bundle["files"]["weights/weights.safetensors"]["bytes"]
    assert report.weight_bytes == size <= 1.01 * encoded
    assert {w["file"] for w in bundle["weights"].values()} == {"weights/weights.safetensors"}
    shipped = sum((folder / "model.safetensors").stat().st_size for folder in pair)
    computed = sum(w["bytes"] for w in bundle["weights"].values() if "rope_table" in w["origin"])
    assert size - computed <= 1.1 * shipped
    with pytest.raises(UnsupportedError) as caught:
        edgecc.load(tmp_path / "a")
    assert caught.value.id in CANNOT_RUN


@pytest.mark.slow
def test_two_compiles_give_the_same_bundle_but_for_numbers_in_plans(trt, pair, tmp_path):
    for name in "ab":
        edgecc.compile(pair[0], out=tmp_path / name, device="sm86", verify="none")
    first, second = (json.loads((tmp_path / n / "bundle.json").read_text()) for n in "ab")
    for manifest in (first, second):  # what the builder numbers: see docs/tensorrt.md
        for name, file in manifest["files"].items():
            if name.endswith(".plan"):
                del file["sha256"]
    assert first == second
