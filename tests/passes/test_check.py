"""`check=N`: the manager finds passes that change values, says where, and lets good ones pass."""

from __future__ import annotations

from pathlib import Path

import pytest

import edgecc
from edgecc.devices import get_device
from edgecc.errors import MismatchError
from edgecc.ir import Module
from edgecc.passes.base import Pass, PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from edgecc.passes.repeat import Repeat
from helpers.pairs import PairOptions, pair
from helpers.planted import Scale, SwapGate

DATA = Path(__file__).parents[1] / "data" / "pairs"
OWN = PairOptions(draft_head="own", draft_embedding="own")


def test_the_default_pipeline_of_the_lifted_pair_is_right() -> None:
    module = edgecc.lift(DATA / "tiny-qwen3-nvfp4", DATA / "tiny-qwen3-dspark", max_model_len=4096)
    device = get_device("cpu")
    manager = PassManager(default_pipeline(device), check=2)
    manager.run(module, PassContext(device))
    assert all(t.check_seconds > 0 for t in manager.timings)
    lines = manager.unchecked()
    assert any("draft.proposals" in line and "unbound" in line for line in lines)
    assert any(
        "draft.proposals" in line and line.endswith("it depends on the choice of argmax")
        for line in lines
    )


def test_a_wrong_pass_is_named_with_what_it_changed() -> None:
    kept: list[tuple[Module, str]] = []

    def keep(module: Module, item: Pass[object], error: MismatchError) -> list[str]:
        kept.append((module, item.name))
        return ["kept for later"]

    manager = PassManager(["fuse-qkv", SwapGate(), "dce"], check=1, on_mismatch=keep)
    with pytest.raises(MismatchError, match="pass swap-gate changed what is computed: ") as raised:
        manager.run(pair(OWN))
    (diagnostic,) = raised.value.diagnostics
    assert raised.value.exit_code == 5
    assert diagnostic.id == "check/mismatch"
    assert diagnostic.where == "pass swap-gate"
    assert diagnostic.notes[0].startswith("first at [")
    assert diagnostic.notes[1] == "random inputs of seed 0, of 1 checked"
    assert diagnostic.notes[-1] == "kept for later"
    assert [t.name for t in manager.timings] == ["fuse-qkv"]
    ((before, name),) = kept
    assert name == "swap-gate"
    assert not any("swap-gate" in n.location.passes for n in before.graphs["target"].nodes)


def test_without_check_nothing_is_compared() -> None:
    manager = PassManager([SwapGate()])
    manager.run(pair(OWN))
    assert manager.unchecked() == []
    assert manager.timings[0].check_seconds == 0


def test_the_tolerance_is_that_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    PassManager([Scale()], check=1).run(pair(OWN))
    PassManager([Repeat([Scale()])], check=1).run(pair(OWN))
    monkeypatch.setattr(Scale, "tolerance", 1e-6)
    with pytest.raises(MismatchError, match=r"tolerance 1e-06"):
        PassManager([Scale()], check=1).run(pair(OWN))


def test_a_module_without_valid_inputs_is_told_and_not_refused() -> None:
    module = pair(PairOptions(capacity=1, slots=3, draft_head="own", draft_embedding="own"))
    manager = PassManager(["fuse-qkv"], check=1)
    manager.run(module)
    (line,) = manager.unchecked()
    assert line.startswith("check 1: fuse-qkv: not compared: the module: cannot be evaluated: ")
