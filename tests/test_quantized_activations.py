"""Quantized activations from the option to what is known about the graphs that are built."""

from __future__ import annotations

import numpy as np
import pytest

import edgecc
from edgecc.activation_check import (
    LOCAL_TOLERANCE,
    ActivationProbe,
    activation_checks,
)
from edgecc.backends.runtime.golden import relative_rms
from edgecc.compile_options import CompileOptions
from edgecc.devices import get_device
from edgecc.driver import lift
from edgecc.errors import MismatchError, UnsupportedError, UsageError
from edgecc.golden import golden_rows
from edgecc.ir import Builder, Interpreter, Module, Role
from edgecc.ir.ops.quantization import FakeQuantizeAttributes
from edgecc.ir.types import DType
from edgecc.lowered_check import check_lowered
from edgecc.passes.base import PassContext
from edgecc.passes.default import default_pipeline
from edgecc.passes.manager import PassManager
from helpers.checkpoints import write_target
from helpers.goldens import PAIRS
from helpers.weights import dense

W4A4, DRAFT = PAIRS / "tiny-qwen3-nvfp4", PAIRS / "tiny-qwen3-dspark"


def lowered(target, device: str = "sm120", activations: str = "auto") -> tuple[Module, PassManager]:
    record = get_device(device)
    manager = PassManager(default_pipeline(record, activations=activations))
    module = lift(target)
    manager.run(module, PassContext(record))
    return module, manager


@pytest.fixture(scope="module")
def golden() -> bytes:
    _, manager = lowered(W4A4)
    return golden_rows(lift(W4A4), manager.passes)


def ops(module: Module, name: str = "fake_quantize"):
    return [n for g in module.graphs.values() for n in g.nodes if n.op.name == name]


def refused(module: Module, golden: bytes) -> str:
    """What failed, one line each."""
    with pytest.raises(MismatchError) as caught:
        check_lowered(module, golden)
    (finding,) = caught.value.diagnostics
    return "\n".join(note for note in finding.notes if "FAILED" in note)


# --- what is checked ------------------------------------------------------------------------------


def test_the_shipped_target_passes(golden):
    module, _ = lowered(W4A4)
    assert len(ops(module)) == 33  # 8 layers of 4, and the head; q, k, v and gate, up share one
    found = {c.name: c for c in check_lowered(module, golden)[0]}
    assert list(found) == [
        "lowered logits",
        "lowered next_logits",
        "activation scales",
        "activations in nvfp4<block=16>",
        "quantized logits",
    ]
    assert found["lowered logits"].error < 0.01
    assert 0.08 < found["activations in nvfp4<block=16>"].error < 0.11
    assert 0.05 < found["quantized logits"].error < 0.25


def test_16_bit_activations_have_nothing_more_to_check(golden):
    module, _ = lowered(W4A4, activations="16bit")
    checks, _ = check_lowered(module, golden)
    assert [c.name for c in checks] == ["lowered logits", "lowered next_logits"]


def test_a_missing_scale_is_refused(golden):
    """Block scales follow the data, so the numbers may hardly change: it is compared itself."""
    module, _ = lowered(W4A4)
    module.weights.rebind(ops(module)[5].weights[0], dense(1.0))
    assert "activation scales" in refused(module, golden)


def test_the_scale_of_another_layer_is_found():
    module, _ = lowered(W4A4)
    first, second = ops(module)[:2]
    first.weights, second.weights = second.weights, first.weights
    found = next(activation_checks(module, {"nvfp4<block=16>": [0.1]}, {}, {}))
    assert (found.name, found.error, found.passed) == ("activation scales", 2 / 33, False)


def test_another_value_is_refused(golden):
    """The wiring is compared without the roundings, as tightly as 16 bits allow."""
    module, _ = lowered(W4A4)
    first, other = [n for n in ops(module) if n.result.type.shape[-1] == 256][:2]
    other._set_operands((first.operands[0],))
    assert "lowered logits" in refused(module, golden)


def rounding(encoding: str, scale: float) -> Module:
    """One op."""
    module = Module("m")
    module.weights.add("scale", dense(np.float32(scale)))
    b = Builder(module, "main")
    x = b.input("x", DType.F32, (64, 64), Role.ACTIVATION)
    attrs = FakeQuantizeAttributes(encoding)
    b.output(b.op("fake_quantize", x, weights=("scale",), attrs=attrs), "y", Role.ACTIVATION)
    return module


X = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)


@pytest.mark.parametrize(
    ("encoding", "scale"),
    [
        ("nvfp4<block=16>", 1e-5),  # all blocks saturate
        ("nvfp4<block=16>", 1e4),  # all vanish
        ("fp8<tensor>", 1e-4),
        ("fp8<tensor>", 1e3),
    ],
)
def test_a_rounding_that_loses_too_much(encoding, scale):
    """Also where the file itself has the wrong scale: nothing else would tell."""
    module = rounding(encoding, scale)
    probe = ActivationProbe(module)
    np.testing.assert_array_equal(probe.run("main", {"x": X})["y"], X)
    rounded = Interpreter(module).run("main", {"x": X})["y"]
    assert probe.errors == {encoding: [pytest.approx(relative_rms(rounded, X))]}
    tensors = {"logits": X}
    checks = {c.name: c for c in activation_checks(module, probe.errors, tensors, tensors)}
    assert not checks[f"activations in {encoding}"].passed
    assert checks["quantized logits"].passed


def test_logits_that_have_nothing_in_common():
    tensors, others = {"logits": X}, {"logits": X[::-1]}
    *_, found = activation_checks(rounding("fp8<tensor>", 1), {"fp8<tensor>": [0]}, others, tensors)
    assert (found.name, found.passed) == ("quantized logits", False)
    assert 1.2 < found.error < 1.6


@pytest.mark.parametrize(
    ("encoding", "scale"), [("nvfp4<block=16>", 5 / 2688), ("fp8<tensor>", 5 / 448)]
)
def test_what_a_right_rounding_loses(encoding, scale):
    probe = ActivationProbe(rounding(encoding, scale))
    probe.run("main", {"x": X})
    bound = LOCAL_TOLERANCE[encoding.partition("<")[0]]
    assert bound / 2 < probe.errors[encoding][0] < bound


# --- the option -----------------------------------------------------------------------------------


def compile(target, tmp_path, **options):
    return edgecc.compile(target, out=tmp_path / "b", dry_run=True, **options)


def test_auto_follows_the_checkpoint_and_the_device(tmp_path):
    quantizes = "quantize-activations{device=sm120}"
    assert quantizes in compile(W4A4, tmp_path, device="sm120").pipeline
    report = compile(W4A4, tmp_path, device="sm120", activations="quantized")
    assert any("33 linear layers quantized to nvfp4<block=16>" in d for d in report.decisions)
    for device, choice in (("sm120", "16bit"), ("sm86", "auto"), ("cpu", "auto"), ("cpu", "16bit")):
        found = compile(W4A4, tmp_path, device=device, activations=choice)
        assert "quantize-activations" not in found.pipeline


@pytest.mark.parametrize("device", ["cpu", "sm86"])
def test_a_device_without_such_products(tmp_path, device):
    with pytest.raises(UnsupportedError, match=f"device {device} has no products") as caught:
        compile(W4A4, tmp_path, device=device, activations="quantized")
    assert "sm120" in caught.value.diagnostics[0].notes[0]


def test_a_checkpoint_without_scales(tmp_path):
    plain = write_target(tmp_path / "plain", quantized=False)
    with pytest.raises(UsageError, match="no linear layer has a scale for activations"):
        compile(plain, tmp_path, device="sm120", activations="quantized")


def test_options_that_contradict():
    with pytest.raises(UsageError, match="activations is 'fp4'"):
        CompileOptions(activations="fp4")
    with pytest.raises(UsageError, match="pass_pipeline replaces those"):
        CompileOptions(activations="16bit", pass_pipeline="dce")


def test_a_pair_shares_the_head_with_its_rounding():
    record = get_device("sm120")
    module = lift(W4A4, DRAFT)
    PassManager(default_pipeline(record)).run(module, PassContext(record))
    rounding, head = module.graphs["lm_head"].nodes
    assert (rounding.op.name, head.op.name) == ("fake_quantize", "linear")
    elsewhere = [n for g in module.graphs.values() if g.name != "lm_head" for n in g.nodes]
    scales = [n.weights[0] for n in elsewhere if n.op.name == "fake_quantize"]
    assert len(scales) == 32
    assert not any("lm_head" in scale for scale in scales)
