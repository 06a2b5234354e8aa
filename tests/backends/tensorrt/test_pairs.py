"""The shipped pairs: what the builder gets, and the engines it makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edgecc
from edgecc.backends.tensorrt.profiles import fixed_sizes, profiles
from edgecc.devices import DEVICES, get_device
from edgecc.driver import lift
from edgecc.errors import MismatchError, UnsupportedError
from edgecc.golden import check_lowered, golden_rows
from edgecc.inspection import inspect_path
from edgecc.ir import Role
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.goldens import PAIRS

torch = pytest.importorskip("torch")

GPUS = [name for name, device in DEVICES.items() if device.library]
BUILT = ("sm86", "sm89", "sm120")


def lowered(target: Path, draft: Path | None, device: str):
    record = get_device(device)
    manager = PassManager(default_pipeline(record))
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
    (head,) = module.graphs["lm_head"].nodes
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


@pytest.mark.parametrize("device", ["sm86", "sm120"])
def test_the_lowered_pair_matches_the_goldens_and_the_second_oracle(pair, device):
    """In its own 16-bit types, by the interpreter and by PyTorch."""
    from edgecc.backends.torch import TorchExecutor

    module, manager = lowered(*pair, device)
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
    error = np.abs(found["logits"][0] - want["logits"]).max() / np.abs(want["logits"]).max()
    assert error < 0.05


def test_a_wrong_lowered_graph_is_not_built(pair):
    module, manager = lowered(*pair, "sm120")
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


@pytest.mark.slow
@pytest.mark.parametrize("device", BUILT)
def test_a_pair_compiles(trt, pair, tmp_path, device):
    first = edgecc.compile(*pair, out=tmp_path / "a", device=device)
    bundle = json.loads((tmp_path / "a" / "bundle.json").read_text())
    engines = bundle["artifacts"][device]["engines"]
    assert set(engines) == {"lm_head", "target.body", "target.tail", "draft.body", "draft.tail"}
    assert len(first.checks) == 3
    head = engines["lm_head"]
    assert [s["role"] for s in bundle["shared"]] == ["embed_tokens", "lm_head"]
    assert [e["bound_bytes"] > 0 for e in engines.values()] == [
        name in ("target.body", "draft.body") for name in engines
    ]
    assert bundle["files"]["weights/weights.safetensors"]["bytes"] < 1.01 * (4096 * 256 * 2)
    assert (tmp_path / "a" / head["file"]).stat().st_size == head["bytes"]
    if device == "sm120":
        assert {w["precision"] for w in head["weights"].values()} == {"nvfp4"}
    caches = [p for p in engines["target.body"]["outputs"] if p["alias"]]
    assert len(caches) == 16
    assert f"{device}/lm_head" in inspect_path(tmp_path / "a")["engines"]
    with pytest.raises(UnsupportedError) as caught:
        edgecc.load(tmp_path / "a")
    assert caught.value.id in ("cuda/no-gpu", "cuda/not-installed", "tensorrt/wrong-gpu")


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
    with pytest.raises(UnsupportedError, match="cannot run them yet"):
        edgecc.load(tmp_path / "a")


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
