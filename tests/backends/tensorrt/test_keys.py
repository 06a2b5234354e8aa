"""Cache keys: what changes them, and what must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgecc.backends.cache import CacheKey
from edgecc.backends.cache.key import differences
from edgecc.backends.tensorrt import keys
from edgecc.backends.tensorrt.engines import same_engines
from edgecc.backends.tensorrt.lower import jobs
from edgecc.backends.tensorrt.policy import plan_weights
from edgecc.devices import get_device
from edgecc.driver import lift
from edgecc.ir import Module
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.checkpoints import write_draft, write_target
from helpers.command_line import SMALL, TAPS

LIBRARY = SimpleNamespace(__version__="1.7.1", ComputeCapability=SimpleNamespace(SM120=1))
"""As much of a builder as a key needs: no package has to be installed."""


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgecc.backends.tensorrt.lower.load_library", lambda name: LIBRARY)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("keys") / "target", **SMALL)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_draft(tmp_path_factory.mktemp("keys") / "draft", **SMALL, **TAPS)


def lowered(target: Path, draft: Path, device: str = "sm120", length: int = 64) -> Module:
    module = lift(target, draft, max_model_len=length)
    record = get_device(device)
    PassManager(default_pipeline(record)).run(module, PassContext(record))
    return module


def keys_of(module: Module, device: str = "sm120", weights: str = "embed") -> dict[str, CacheKey]:
    """The key of each engine of a lowered module."""
    found = {}
    for job in jobs(module, get_device(device), plan_weights(module, weights)):
        key = job.key()
        assert key is not None
        found[job.estimate.name] = key
    return found


def test_the_same_pair_from_another_folder(target: Path, draft: Path, tmp_path: Path) -> None:
    again = write_target(tmp_path / "elsewhere" / "renamed", **SMALL)
    assert keys_of(lowered(target, draft)) == keys_of(lowered(again, draft))


def test_a_fine_tuned_target_finds_the_engines_of_the_draft(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgecc.backends.tensorrt.policy.SHARED_BYTES", 0)  # as if it were large
    tuned = write_target(tmp_path / "tuned", **SMALL, seed=9)
    first, second = keys_of(lowered(target, draft)), keys_of(lowered(tuned, draft))
    equal = {name for name in first if first[name] == second[name]}
    assert equal == {"draft.body", "draft.tail", "target.tail"}  # the tail only chooses
    assert differences(first["lm_head"], second["lm_head"]) == [
        "2 of 2 weights changed (target.lm_head.input_scale, target.lm_head.weight)"
    ]


def test_bound_weights_do_not_count(target: Path, draft: Path, tmp_path: Path) -> None:
    """An engine that gets its weights at load serves every fine-tune."""
    tuned = write_target(tmp_path / "tuned", **SMALL, seed=9)
    first = keys_of(lowered(target, draft), weights="bind")
    assert first == keys_of(lowered(tuned, draft), weights="bind")
    embedded = keys_of(lowered(target, draft))
    found = differences(embedded["lm_head"], first["lm_head"])
    assert any("flag bound weights" in d for d in found)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """Ten layers: four, four and two, of which the first is tapped."""
    folder = tmp_path_factory.mktemp("deep")
    sizes = {**SMALL, "layers": 10}
    taps = {"target_layers": 10, "target_layer_ids": (0,)}
    return lowered(
        write_target(folder / "target", **sizes), write_draft(folder / "draft", **SMALL, **taps)
    )


def test_graphs_of_equal_layers_are_one_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where weights are inputs; constants are those of one graph."""
    folder = tmp_path_factory.mktemp("deep")
    module = lift(write_target(folder / "target", **{**SMALL, "layers": 16}), max_model_len=64)
    record = get_device("sm120")
    PassManager(default_pipeline(record)).run(module, PassContext(record))
    bound, held = (
        jobs(module, record, plan_weights(module, policy)) for policy in ("bind", "embed")
    )
    assert same_engines(bound) == {f"target.{i}": "target.1" for i in (2, 3, 4)}
    assert same_engines(held) == {}
    keys = {job.estimate.name: job.key() for job in bound}
    assert keys["target.1"] == keys["target.2"]
    assert keys["target.1"] is not None
    assert keys["target.1"].name == "target"


def test_other_outputs_and_other_numbers_of_layers_are_other_engines(deep: Module) -> None:
    found = jobs(deep, get_device("sm120"), plan_weights(deep, "bind"))
    assert same_engines(found) == {}
    assert {"target.body.1", "target.body.2", "target.body.3"} < {j.estimate.name for j in found}


CHANGES: dict[str, tuple[Callable[[Path, Path], dict[str, CacheKey]], str]] = {
    "capacity": (lambda t, d: keys_of(lowered(t, d, length=96)), "the graph changed"),
    "device": (lambda t, d: keys_of(lowered(t, d, "sm121"), "sm121"), "device sm120 -> sm121"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_an_engine_with_caches(target: Path, draft: Path, change: str) -> None:
    make, said = CHANGES[change]
    first, second = keys_of(lowered(target, draft)), make(target, draft)
    assert first["target.body"] != second["target.body"]
    assert said in differences(first["target.body"], second["target.body"])


def test_rows_of_a_call_change_the_profiles(target: Path, draft: Path) -> None:
    module = lowered(target, draft)
    first = keys_of(module)
    module.symbols["t"] = replace(module.symbols["t"], high=32)
    found = differences(first["target.body"], keys_of(module)["target.body"])
    assert any(d.startswith("flag prefill token_ids [1, 1] to [1, 65]") for d in found)


def test_another_builder(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = lowered(target, draft)
    first = keys_of(module)
    monkeypatch.setattr(LIBRARY, "__version__", "1.7.2")
    assert differences(first["lm_head"], keys_of(module)["lm_head"]) == [
        "builder version 1.7.1 -> 1.7.2"
    ]


def test_another_lowering(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = lowered(target, draft)
    first = keys_of(module)
    monkeypatch.setattr(keys, "_lowering", lambda: "other")
    assert differences(first["lm_head"], keys_of(module)["lm_head"]) == [
        "edgecc's lowering changed"
    ]


def test_one_bit_of_a_weight_counts(target: Path, draft: Path, tmp_path: Path) -> None:
    """Also of a weight that is only an ingredient: packed codes of a matrix in 8 bits."""
    other = write_target(tmp_path / "other", **SMALL)
    module, changed = (lowered(t, draft, "sm86") for t in (target, other))
    assert keys_of(module, "sm86") == keys_of(changed, "sm86")
    path = other / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # of the last tensor
    path.write_bytes(data)
    changed = lowered(other, draft, "sm86")
    first, second = keys_of(module, "sm86"), keys_of(changed, "sm86")
    assert sum(first[name] != second[name] for name in first) == 1


def test_a_builder_for_the_gpu_that_is_there(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU of the machine is part of the key; where nothing tells it, there is no key."""
    module = lowered(target, draft)
    monkeypatch.delattr(LIBRARY, "ComputeCapability")
    monkeypatch.setattr(keys, "_DRIVER", tmp_path / "driver")
    monkeypatch.setattr(keys, "_BOARD", tmp_path / "model")
    (job, *_) = jobs(module, get_device("sm120"), plan_weights(module, "embed"))
    assert job.key() is None
    (tmp_path / "model").write_bytes(b"NVIDIA Jetson AGX Orin\0")
    key = job.key()
    assert key is not None
    assert key.flags["gpu"] == "NVIDIA Jetson AGX Orin"
    gpu = tmp_path / "driver" / "gpus" / "0000:01:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H100\nIRQ: 4\n")
    (tmp_path / "driver" / "version").write_text("NVRM version: 580.1\nGCC 13\n")
    key = job.key()
    assert key is not None
    assert key.flags["gpu"] == "NVIDIA H100, NVRM version: 580.1"
