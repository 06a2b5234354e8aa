"""Weights as other producers store them: what a device multiplies, and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc.devices import get_device
from edgecc.ir import DType, Interpreter, Module
from edgecc.ir.clone import clone_module
from edgecc.ir.encodings import FP8, MXFP4, NVFP4, Encoding, Int4
from edgecc.ir.weights import Weight
from edgecc.passes.base import PassContext
from edgecc.passes.lower_encodings import LowerEncodings, LowerEncodingsOptions
from edgecc.testing.encoding_samples import random_weight
from helpers.tensorrt_network import NetworkInterpreter

from .test_lowerings import Net, built, net

BF16, F16 = DType.BF16, DType.F16
X = np.random.default_rng(7).standard_normal((1, 16, 64)).astype(np.float32)
MXFP8 = FP8("block", (1, 32), scale_dtype=DType.F8E8M0)
EXACT, ROUNDED = 2.0**-8, 2.0**-6
CASES: dict[str, tuple[Encoding, str, str, float]] = {
    "nvfp4 as it is": (NVFP4(divisor=True), "sm120", "nvfp4", EXACT),
    "nvfp4 in 8 bits": (NVFP4(divisor=True), "sm86", "int8, bf16 scales of 16", EXACT),
    "int4 as it is": (Int4(32, scale_dtype=F16), "sm86", "int4, f32 scales of 32", EXACT),
    "int4 of bf16": (Int4(16, scale_dtype=BF16), "sm120", "int4, f32 scales of 16", EXACT),
    "int4 with zero points": (Int4(32, zero_point=True, scale_dtype=F16), "sm86", "bf16", ROUNDED),
    "int4 ordered": (Int4(32, ordered=True, scale_dtype=F16), "sm120", "bf16", ROUNDED),
    "mxfp4": (MXFP4(), "sm120", "bf16", EXACT),
    "mxfp8": (MXFP8, "sm89", "bf16", EXACT),
}


def layer(encoding: Encoding) -> Module:
    def make(n: Net) -> object:
        source = random_weight(encoding, (64, 64), 1)
        w = n.module.weights.add("w", Weight((64, 64), encoding, source))
        return n.op("linear", n.take(dtype=BF16, rows=16), weights=(w,))

    return net(make)


def lowered(module: Module, device: str) -> Module:
    made = clone_module(module)
    options = LowerEncodingsOptions(device=device)
    LowerEncodings(options).run(made, PassContext(get_device(device)))
    return made


@pytest.mark.parametrize("case", CASES)
def test_the_network_computes_what_the_ir_says(trt, case):
    encoding, device, precision, tolerance = CASES[case]
    module = layer(encoding)
    expected = Interpreter(module, np.float64).run("main", {"x": X})["y"]
    made = lowered(module, device)
    found = NetworkInterpreter(trt, made, device).run("main", {"x": X})["y"]
    assert np.abs(found - expected).max() / np.abs(expected).max() < tolerance
    for weights in ("embed", "bind"):
        _, facts = built(trt, made, device, weights=weights)
        assert precision in {w["precision"] for w in facts["weights"].values()}


@pytest.mark.parametrize("case", ["mxfp4", "mxfp8"])
def test_powers_of_two_lose_nothing_in_16_bits(case):
    encoding, device, *_ = CASES[case]
    module = layer(encoding)
    made = lowered(module, device)
    (symbol,) = [w for n in made.graphs["main"].nodes for w in n.weights]
    assert str(made.weights[symbol].encoding) == "dense<bf16>"
    np.testing.assert_array_equal(made.weights.dense(symbol), module.weights.dense("w"))
