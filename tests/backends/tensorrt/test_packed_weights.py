"""Packed weights with 16-bit activations: networks evaluated layer by layer, and their plans."""

from __future__ import annotations

import numpy as np
import pytest

from edgecc.errors import LegalizeError
from edgecc.ir import DType, Interpreter, Module
from edgecc.ir.encodings import Encoding, Int4, parse_encoding
from helpers.tensorrt_network import NetworkInterpreter

from .test_lowerings import Net, built, net

BF16, F32 = DType.BF16, DType.F32
X = np.random.default_rng(7).standard_normal((1, 16, 64)).astype(np.float32)


def layer(encoding: Encoding, dtype: DType, rows: int | None = 16) -> Module:
    def make(n: Net) -> object:
        return n.op("linear", n.take(dtype=dtype, rows=rows), weights=(n.rounded("w", encoding),))

    return net(make)


def error(trt, module: Module, device: str) -> float:
    """Of the network against the IR, which is evaluated in float64, relative to the largest."""
    expected = Interpreter(module, np.float64).run("main", {"x": X})["y"]
    found = NetworkInterpreter(trt, module, device).run("main", {"x": X})["y"]
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("group", [2, 16, 32, 64])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=lambda d: d.value)
def test_int4_is_exact(trt, group, dtype):
    """Scales are float32 and so is the product: only the result is rounded."""
    found = error(trt, layer(Int4(group), dtype), "sm86")
    assert found < (2.0**-9 if dtype is BF16 else 1e-6)


@pytest.mark.parametrize("encoding", ["fp8<tensor>", "fp8<channel>", "int8<channel>"])
def test_8_bits(trt, encoding):
    """The product is rounded to bf16 before its scale: twice in all."""
    assert error(trt, layer(parse_encoding(encoding), BF16), "sm120") < 2.0**-7
    assert error(trt, layer(parse_encoding(encoding), F32), "sm120") < 1e-6


@pytest.mark.parametrize(("device", "group"), [("sm86", 128), ("sm89", 32), ("sm120", 64)])
def test_int4_stays_4_bits_in_the_plan(trt, device, group):
    rows, columns = 8192, 4096

    def make(n: Net) -> object:
        packed = n.random.integers(0, 256, (rows // 2, columns), dtype=np.uint8)
        scale = n.random.uniform(0.5, 1, (rows, columns // group)).astype(np.float32)
        parts = {"weight": packed, "weight_scale": scale}
        w = n.stored("w", (rows, columns), Int4(group), parts)
        return n.op("linear", n.take(width=columns), weights=(w,))

    plan, facts = built(trt, net(make), device)
    assert facts["weight_bytes"] == rows * columns // 2 + 4 * rows * columns // group
    assert len(plan) <= 1.1 * facts["weight_bytes"]
    assert facts["weights"]["w"]["precision"] == f"int4, f32 scales of {group}"


def test_an_odd_number_of_columns_has_no_form(trt):
    def make(n: Net) -> object:
        parts = {"weight": np.zeros((2, 3), np.uint8), "weight_scale": np.ones((4, 3), np.float32)}
        w = n.stored("w", (4, 3), Int4(1), parts)
        return n.op("linear", n.take(width=3), weights=(w,))

    with pytest.raises(LegalizeError, match="has no form in TensorRT"):
        built(trt, net(make), "sm86")
