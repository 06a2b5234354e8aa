"""Quantized activations: the networks, evaluated layer by layer, and the plans made of them."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc import fp8, nvfp4
from edgecc.backends.tensorrt import quantization
from edgecc.errors import LegalizeError
from edgecc.ir import Interpreter, Module
from edgecc.ir.encodings import FP8, NVFP4
from edgecc.ir.ops.quantization import FakeQuantizeAttributes
from edgecc.ir.types import DType
from edgecc.passes.base import PassContext
from edgecc.passes.quantize_activations import QuantizeActivations
from helpers.plans import products
from helpers.tensorrt_network import NetworkInterpreter

from .test_lowerings import Net, built, net

BF16, F32 = DType.BF16, DType.F32
ROWS, WIDTH = 16, 64
"""Rows enough for blocks of 16 down a column: a wrong axis is not refused, but wrong."""


def calibrated(n: Net, encoding: NVFP4 | FP8, name: str = "w", scale: float = 0.0017) -> str:
    """A rounded random matrix `[64, 64]` with a scale for activations."""
    values = n.random.standard_normal((64, WIDTH)).astype(np.float32)
    if isinstance(encoding, NVFP4):
        whole = nvfp4.global_scale(np.abs(values).max())
        codes, scales = nvfp4.quantize(values, whole, encoding.block)
        parts = {"weight": codes, "weight_scale": scales, "weight_scale_2": whole}
        if encoding.divisor:
            parts["weight_global_scale"] = np.float32(1) / parts.pop("weight_scale_2")
            inverse = np.float32(1) / np.float32(scale)
            return n.stored(name, (64, WIDTH), encoding, {**parts, "input_global_scale": inverse})
    else:
        axis = 1 if encoding.scaling == "channel" else None
        scales = fp8.scale_of(np.abs(values).max(axis=axis))
        parts = {"weight": fp8.quantize(values, scales), "weight_scale": scales}
    return n.stored(name, (64, WIDTH), encoding, {**parts, "input_scale": np.float32(scale)})


FORMS = {
    "nvfp4": (NVFP4(input_scale=True), "sm120"),
    "nvfp4 divided": (NVFP4(input_scale=True, divisor=True), "sm120"),
    "fp8": (FP8(input_scale=True), "sm89"),
    "fp8 channel": (FP8("channel", input_scale=True), "sm120"),
}
SCALES = {"nvfp4": 0.0017, "fp8": 0.011}


def layer(encoding, dtype=BF16, bias=False) -> Module:
    def make(n: Net) -> object:
        w = calibrated(n, encoding, scale=SCALES[encoding.kind])
        weights = (w, n.dense("bias", (64,))) if bias else (w,)
        return n.op("linear", n.take(dtype=dtype, rows=ROWS), weights=weights)

    module = net(make)
    assert QuantizeActivations().run(module, PassContext())
    return module


X = (
    np.random.default_rng(5).standard_normal((1, ROWS, WIDTH))
    * np.geomspace(0.02, 3, ROWS)[:, None]
)


def error(trt, module: Module, device: str) -> float:
    """Of the network against the IR, which is evaluated in float64, relative to the largest."""
    x = X.astype(np.float32)
    expected = Interpreter(module, np.float64).run("main", {"x": x})["y"]
    found = NetworkInterpreter(trt, module, device).run("main", {"x": x})["y"]
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("dtype", "bias"), [(BF16, False), (F32, False), (F32, True)])
def test_the_network_computes_what_the_ir_says(trt, form, dtype, bias):
    encoding, device = FORMS[form]
    found = error(trt, layer(encoding, dtype, bias), device)
    # The IR rounds what the layer reads to bf16 as well, and the network does not.
    assert found < (2.0**-7 if dtype is BF16 else 1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_a_product_without_the_scale_shows(trt, form, dtype, monkeypatch):
    encoding, device = FORMS[form]
    make = quantization._quantize

    def broken(e, node):
        rows, _ = make(e, node)
        return rows, e.constant(np.ones((1, 1), np.float32))

    monkeypatch.setattr(quantization, "_quantize", broken)
    assert error(trt, layer(encoding, dtype), device) > 1


@pytest.mark.parametrize("form", FORMS)
def test_numbers_rounded_by_another_scale_show(trt, form, monkeypatch):
    encoding, device = FORMS[form]
    name = "_dynamic" if encoding.kind == "nvfp4" else "_static"
    make = getattr(quantization, name)

    def broken(e, x, scale):
        return make(e, x, e.constant(np.array(SCALES[encoding.kind] * 1.5, np.float32)))

    monkeypatch.setattr(quantization, name, broken)
    assert error(trt, layer(encoding, F32), device) > 0.1


def test_blocks_along_another_axis_show(trt, monkeypatch):
    make = quantization._dynamic

    def broken(e, x, scale):
        turned = e.transpose(x, (1, 0))
        return e.transpose(make(e, turned, scale), (1, 0))

    monkeypatch.setattr(quantization, "_dynamic", broken)
    assert error(trt, layer(NVFP4(input_scale=True), F32), "sm120") > 0.01


@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda d: d.value)
@pytest.mark.parametrize("form", FORMS)
def test_plans_multiply_packed_numbers(trt, form, dtype):
    """Said by the builder in its plan: both sides packed, sums in float32."""
    encoding, device = FORMS[form]
    kind = {"nvfp4": "fp4_e2m1", "fp8": "fp8_e4m3"}[encoding.kind]
    plan, facts = built(trt, layer(encoding, dtype), device)
    assert set(products(plan)) == {(kind, kind, "float")}
    assert facts["weights"]["w"]["precision"] == encoding.kind
    plan, _ = built(
        trt, net(lambda n: n.op("linear", n.take(), weights=(calibrated(n, encoding),))), device
    )
    assert set(products(plan)) == {("bf16", "bf16", "bf16")}


@pytest.mark.parametrize("form", FORMS)
def test_weights_and_scales_can_be_inputs(trt, form):
    """Bound at load: another fine-tune has other scales, for activations too."""
    encoding, device = FORMS[form]
    plan, facts = built(trt, layer(encoding), device, weights="bind")
    kind = {"nvfp4": "fp4_e2m1", "fp8": "fp8_e4m3"}[encoding.kind]
    assert set(products(plan)) == {(kind, kind, "float")}
    assert "@w.input_scale/stored/f32" in {i["name"] for i in facts["bound"]}


@pytest.mark.parametrize("device", ["sm120", "sm121"])
def test_rows_that_calls_choose(trt, device):
    def make(n: Net) -> object:
        return n.op("linear", n.take(), weights=(calibrated(n, NVFP4(input_scale=True)),))

    module = net(make)
    QuantizeActivations().run(module, PassContext())
    plan, _ = built(trt, module, device)
    assert set(products(plan)) == {("fp4_e2m1", "fp4_e2m1", "float")}


def test_layers_of_one_value_round_it_once(trt):
    def make(n: Net) -> object:
        x = n.take(rows=ROWS)
        weights = [calibrated(n, NVFP4(input_scale=True), name) for name in "ab"]
        return n.op("add", *(n.op("linear", x, weights=(w,)) for w in weights))

    module = net(make)
    QuantizeActivations().run(module, PassContext())
    network = NetworkInterpreter(trt, module, "sm120").network(module.graphs["main"])
    assert network.kinds["DYNAMIC_QUANTIZE"] == 1
    assert error(trt, module, "sm120") < 2.0**-7


@pytest.mark.parametrize("encoding", ["nvfp4<block=16>", "fp8<tensor>"])
def test_other_readers_get_the_rounded_values(trt, encoding):
    """An output, and an op that is not linear."""

    def make(n: Net) -> object:
        x = n.op(
            "fake_quantize",
            n.take(rows=ROWS, dtype=F32),
            weights=(n.dense("scale", ()),),
            attrs=FakeQuantizeAttributes(encoding),
        )
        return n.op("add", x, x)

    assert error(trt, net(make), "sm120") < 1e-6


def test_blocks_the_layer_does_not_have(trt):
    def make(n: Net) -> object:
        attrs = FakeQuantizeAttributes("nvfp4<block=32>")
        return n.op("fake_quantize", n.take(), weights=(n.dense("scale", ()),), attrs=attrs)

    with pytest.raises(LegalizeError, match="in blocks of 16, not to nvfp4<block=32>"):
        built(trt, net(make), "sm120")
