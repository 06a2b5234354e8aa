"""One bundle for several devices: one lift, passes and engines of each, one copy of the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import edgecc
from edgecc.backends.bundle import Bundle
from edgecc.backends.mapped_weights import WeightFile
from edgecc.backends.runtime.verify import verify_bundle
from edgecc.backends.tensorrt.bound_weights import BoundWeights
from edgecc.compile_options import CompileOptions
from edgecc.errors import UnsupportedError, UsageError
from edgecc.explanation import explain
from edgecc.inspection import inspect_path
from helpers.engines import joined
from helpers.goldens import DRAFT, SHIPPED, TARGET
from helpers.lowered_pairs import write_pair

SIZES: dict[str, Any] = {"layers": 2, "hidden": 64, "vocab": 512, "heads": 2, "kv_heads": 1}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"), **SIZES)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


@pytest.fixture(scope="module")
def both(pair, tmp_path_factory):
    """The bundle of two devices, and the IR that was dumped on the way."""
    folder = tmp_path_factory.mktemp("both")
    options: dict[str, Any] = {"max_model_len": 48, "verify": "full"}
    devices = ["cpu", "onnx"]
    report = edgecc.compile(
        *pair, out=folder / "b", device=devices, dump_ir=folder / "ir", **options
    )
    for device in devices:
        edgecc.compile(*pair, out=folder / device, device=device, **options)
    return folder, report


def test_each_device_has_what_it_has_alone(both) -> None:
    """Byte for byte: models, weights, golden rows, tokenizer; and one manifest over all."""
    folder, report = both
    found = contents(folder / "b")
    for device in ("cpu", "onnx"):
        alone = contents(folder / device)
        for name, content in alone.items():
            if name == "ir/lowered.eir":
                assert found[f"ir/lowered-{device}.eir"] == content
            elif name != "bundle.json":
                assert found[name] == content, name
        own = json.loads(alone["bundle.json"])
        assert report.bundle.manifest["artifacts"][device] == own["artifacts"][device]
        assert report.bundle.manifest["shared"] == own["shared"]
        assert report.bundle.manifest["weights"] == own["weights"]
    assert report.weight_bytes == len(found["weights/weights.safetensors"])


def test_both_run(both) -> None:
    folder, _ = both
    for device in ("cpu", "onnx"):
        assert verify_bundle(folder / "b", device=device, prompts=1, max_new_tokens=6).passed
    tokens = []
    for device in ("cpu", "onnx", None):
        with edgecc.load(folder / "b", device=device) as generator:
            tokens.append(generator.generate(token_ids=[5, 6, 7], max_new_tokens=8).token_ids)
    assert tokens[0] == tokens[1] == tokens[2]


def test_what_is_told_about_several_devices(both) -> None:
    folder, report = both
    manifest = Bundle.open(folder / "b").manifest
    assert list(manifest["artifacts"]) == ["cpu", "onnx"]
    assert manifest["provenance"]["options"]["device"] == ["cpu", "onnx"]
    assert "weights" not in manifest["provenance"]["options"]
    assert manifest["provenance"]["pipeline"].keys() == {"cpu", "onnx"}
    assert "fuse-cached-attention" in manifest["provenance"]["pipeline"]["cpu"]
    assert [c.partition(":")[0] for c in report.checks] == ["cpu"] * 4 + ["onnx"] * 4
    common = [d for d in report.decisions if not d.startswith(("cpu: ", "onnx: "))]
    assert len(common) == len(set(common))
    assert any("draft.lm_head.weight -> target.lm_head.weight" in d for d in common)
    assert list(report.decisions) == manifest["decisions"]
    facts = inspect_path(folder / "b")
    assert facts["devices"].keys() == {"cpu", "onnx"}
    assert facts["pipeline"] == manifest["provenance"]["pipeline"]
    assert "lm_head" in explain(folder / "b", "@target.lm_head.weight")
    assert "lm_head" in explain(folder / "b", "@lm_head/%logits")
    dumped = {p.name for p in (folder / "ir").iterdir()}
    assert dumped == {"cpu", "onnx"}
    assert all((folder / "ir" / d / "000-input.eir").exists() for d in dumped)


def test_two_compiles_give_the_same_bytes(pair, both, tmp_path) -> None:
    edgecc.compile(
        *pair, out=tmp_path / "b", device=("cpu", "onnx"), max_model_len=48, verify="full"
    )
    assert contents(tmp_path / "b") == contents(both[0] / "b")


@pytest.mark.parametrize(
    ("options", "id"),
    [
        ({"device": ["cpu", "cpu"]}, "usage/device-twice"),
        ({"device": []}, "usage/no-device"),
        ({"device": ["cpu", "onnx"], "pass_pipeline": "dce"}, "usage/pipeline-devices"),
        ({"device": ["cpu", "onnx"], "weights": "bind"}, "usage/weights"),
        ({"weights": "embed"}, "usage/weights"),
        ({"device": "sm120", "weights": "both"}, "usage/bad-choice"),
    ],
)
def test_options_that_contradict_each_other(pair, tmp_path, options, id) -> None:
    with pytest.raises(UsageError) as caught:
        edgecc.compile(*pair, out=tmp_path / "b", **options)
    assert caught.value.id == id
    assert not list(tmp_path.iterdir())


def test_one_unknown_device_of_two(pair, tmp_path) -> None:
    with pytest.raises(UnsupportedError, match="unknown device 'abacus'"):
        edgecc.compile(*pair, out=tmp_path / "b", device=["cpu", "abacus"])
    assert not list(tmp_path.iterdir())


def test_a_list_of_one_is_that_one() -> None:
    from edgecc.compile_options import compile_options

    assert compile_options({"device": ["onnx"]}) == CompileOptions(device="onnx")


def test_sizes_of_a_dry_run(pair, tmp_path) -> None:
    """One weight file for both, and what lies inside of engines."""
    sizes = {}
    for weights in ("embed", "bind", "auto"):
        report = edgecc.compile(
            *pair, out=tmp_path / "b", device=["cpu", "sm120"], weights=weights, dry_run=True
        )
        sizes[weights] = report.weight_bytes
        asked = "as asked for" if weights != "auto" else "at most"
        assert any(asked in d and d.startswith("sm120: ") for d in report.decisions)
    alone = edgecc.compile(*pair, out=tmp_path / "b", device="cpu", dry_run=True).weight_bytes
    assert alone <= sizes["bind"] < alone * 1.1
    assert sizes["auto"] == sizes["embed"] > sizes["bind"] * 1.2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["embed", "bind"])
def test_a_cpu_and_a_gpu(tmp_path, weights) -> None:
    """The shipped pair; the CPU's part runs, and the GPU's inputs can be filled."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'edgecc[rtx]'")
    report = edgecc.compile(
        TARGET, DRAFT, out=tmp_path / "b", device=["cpu", "sm120"], weights=weights
    )
    manifest = report.bundle.manifest
    artifact = manifest["artifacts"]["sm120"]
    assert artifact["weights"] == weights
    engines = artifact["engines"]
    constant = sum(e["weight_bytes"] for e in engines.values())
    file = manifest["files"]["weights/weights.safetensors"]["bytes"]
    assert report.weight_bytes == constant + file
    assert (constant == 0) == (weights == "bind")
    assert {s["role"] for s in manifest["shared"]} == {"lm_head", "embed_tokens"}
    places = artifact["tensors"]
    known = manifest["artifacts"]["cpu"]["tensors"]
    assert all(known[name] == place for name, place in places.items() if name in known)
    assert all(name.endswith("input_scale") for name in places.keys() - known.keys())
    bound = BoundWeights(
        artifact, WeightFile(report.bundle.file(artifact["weight_file"]), artifact["tensors"])
    )
    assert all(len(joined(bound.blocks(b))) == b.nbytes for b in bound.buffers)
    for name, engine in engines.items():
        taken = {bound.buffers[i].id: bound.buffers[i].nbytes for i in bound.inputs(name).values()}
        assert sum(taken.values()) == engine["bound_bytes"]
    assert verify_bundle(tmp_path / "b", device="cpu", prompts=1, max_new_tokens=4).passed
    facts = inspect_path(tmp_path / "b")
    assert facts["engines"]["sm120/target.body"]["bound"] == engines["target.body"]["bound"]


def test_a_hybrid_for_a_cpu_and_a_gpu_tells_what_each_takes(tmp_path) -> None:
    """On the GPU keys, values and weights are half as wide, and states have two places."""
    pair = SHIPPED["qwen3_5"]
    report = edgecc.compile(
        pair.target, pair.draft, out=tmp_path / "b", device=["cpu", "sm120"], dry_run=True
    )
    cpu, gpu = (plan.total for plan in report.memory)
    assert 2 * cpu.states == gpu.states > 0
    assert cpu.caches == pytest.approx(2 * gpu.caches)
    assert cpu.stored == pytest.approx(gpu.stored, rel=0.01)
    assert cpu.weights > 2 * gpu.weights
    own = [d for d in report.decisions if d.startswith("sm120: ")]
    assert any("activations of" in d for d in own)
    assert not any("replaying" in d for d in own)  # what holds for both is told once


@pytest.mark.slow
def test_a_hybrid_for_a_cpu_and_a_gpu(tmp_path) -> None:
    """One bundle: the CPU's part decodes, and the GPU's engines bind the same weights."""
    pytest.importorskip("tensorrt_rtx", reason="pip install 'edgecc[rtx]'")
    pair = SHIPPED["qwen3_5"]
    report = edgecc.compile(
        pair.target, pair.draft, out=tmp_path / "b", device=["cpu", "sm120"], weights="bind"
    )
    artifacts = report.bundle.manifest["artifacts"]
    assert [e["role"] for e in artifacts["sm120"]["entries"]["target"]["inputs"]].count("state") > 0
    bound = BoundWeights(
        artifacts["sm120"],
        WeightFile(
            report.bundle.file(artifacts["sm120"]["weight_file"]), artifacts["sm120"]["tensors"]
        ),
    )
    assert bound.nbytes == report.memory[1].total.weights
    files = [n for n in report.bundle.manifest["files"] if n.startswith("weights/")]
    assert len(files) == 1
    assert verify_bundle(tmp_path / "b", device="cpu", prompts=1, max_new_tokens=4).passed
