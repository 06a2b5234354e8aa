"""What is told before long or large work."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from edgecc import expectations
from edgecc.backends.onnxruntime import engine
from edgecc.devices import get_device
from edgecc.driver import lift
from edgecc.errors import Severity
from edgecc.expectations import evaluating, running
from edgecc.ir import Module
from edgecc.memory_plan import MemoryPlan, PartMemory
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.command_line import in_process
from helpers.goldens import DRAFT, TARGET

GB = 10**9
PART = PartMemory("target", stored=20 * GB, weights=100 * GB, mapped=3 * GB, caches=2 * GB)
PLAN = MemoryPlan("cpu", 1, 8192, 128, 8, (PART,))


def lowered(device: str, **options: str) -> Module:
    record = get_device(device)
    module = lift(TARGET, DRAFT, max_model_len=64)
    PassManager(default_pipeline(record, **options)).run(module, PassContext(record))
    return module


def test_memory_that_is_there_is_a_note() -> None:
    """Mapped weights need not be there: the system drops them."""
    for free in (None, 99 * GB, 200 * GB):
        found = running(PLAN, lowered("cpu"), free)
        assert found is not None
        assert (found.id, found.severity) == ("memory/running", Severity.NOTE)
        assert "takes 102.0 GB of memory: 20.0 GB of weights" in found.message
        assert "are 100.0 GB as the engine computes" in found.message
        assert "free here" not in found.message


def test_memory_that_is_not_there_is_a_warning_with_a_way_out() -> None:
    found = running(PLAN, lowered("cpu"), 98 * GB)
    assert found is not None
    assert found.severity is Severity.WARNING
    assert "98.0 GB are free here" in found.message
    assert "--linear-form int8-split" in found.help
    other = running(PLAN, lowered("cpu", linear_form="int8-split"), 98 * GB)
    assert other is not None
    assert "--linear-form" not in other.help
    assert "--max-model-len" in other.help


def test_little_is_not_worth_a_word() -> None:
    small = replace(PLAN, parts=(PartMemory("target", 10, 20, 0, 5),))
    assert running(small, lowered("cpu"), 1) is None


def test_a_language_model_is_evaluated_for_each_proposal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectations, "TOLD_S", 0.0)
    monkeypatch.setattr(expectations, "TARGET_S", 0.0)
    told = []
    for steps in (1, 4):
        module = lift(TARGET, TARGET, max_model_len=64, num_speculative_tokens=steps)
        monkeypatch.setattr(expectations, "DRAFT_S", 1e-3 / steps)
        found = evaluating([SimpleNamespace(lifted=module, device=get_device("cpu"))])
        assert found is not None
        told.append(found.message)
    assert told[0] == told[1]


def test_evaluating_counts_what_graphs_multiply_by(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lowered:
        def __init__(self, device: str) -> None:
            self.lifted, self.device = lift(TARGET, DRAFT, max_model_len=64), get_device(device)

    cpu, gpu = Lowered("cpu"), Lowered("sm120")
    assert evaluating([cpu]) is None  # the shipped pair takes no time
    monkeypatch.setattr(expectations, "TOLD_S", 0.0)
    monkeypatch.setattr(expectations, "TARGET_S", 1e-3)
    monkeypatch.setattr(expectations, "DRAFT_S", 0.0)
    config = json.loads((TARGET / "config.json").read_text())
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = hidden * (2 * heads * dim + 2 * kv * dim) + 3 * hidden * inner
    seconds = (config["num_hidden_layers"] * layer + hidden * vocab) * 1e-3
    for parts, times in (([cpu], 1), ([gpu], 3), ([cpu, gpu], 3)):
        found = evaluating(parts)
        assert found is not None
        assert f"about {times * seconds:.0f} s" in found.message
        assert ("graphs of engines" in found.message) == (gpu in parts)
        assert "--verify none" in found.help


def test_a_dry_run_tells_both(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expectations, "TOLD_S", 0.0)
    monkeypatch.setattr(expectations, "TOLD_BYTES", 0)
    command = ["compile", str(TARGET), "--draft", str(DRAFT), "--dry-run"]
    run = in_process(capsys)
    shown = run(*command).err
    assert "note[memory/running]: running on cpu takes" in shown
    assert "note[verify/estimate]: golden rows take about" in shown
    assert "verify/estimate" not in run(*command, "--verify", "none").err


def test_loading_says_what_it_takes_before_it_takes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    """Every linear weight of target and draft in float32, and no more."""
    run = in_process(capsys)
    out = tmp_path / "bundle"
    sizes = ("--max-model-len", "64", "--verify", "none")
    assert run("compile", str(TARGET), "--draft", str(DRAFT), "-o", str(out), *sizes).code == 0
    needed = sum(
        w.nbytes
        for w in lowered("cpu").weights.values()
        if str(w.source).startswith("dequantize") and len(w.shape) > 1
    )
    monkeypatch.setattr(engine, "available_bytes", lambda: needed - 1)
    found = run("run", str(out), "--prompt", "x")
    assert (found.code, found.id) == (6, "resources/memory")
    assert f"expands weights to {needed / 1e9:.1f} GB" in found.err
    monkeypatch.setattr(engine, "available_bytes", lambda: needed)
    assert run("run", str(out), "--prompt", "x", "--max-new-tokens", "1").code == 0
