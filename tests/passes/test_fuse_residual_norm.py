from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from edgecc.ir import Builder, DType, Module, Role, SymbolRange, sym
from edgecc.ir.ops.elementwise import CastAttributes
from edgecc.ir.ops.norm import AddRmsNormAttributes, RmsNormAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.fuse_residual_norm import FuseResidualNorm
from helpers.modules import check_pass, modules
from helpers.pairs import FEWER, PairOptions, pair, pair_inputs, pair_options
from helpers.weights import dense


def graph() -> tuple[Builder, list]:
    module = Module("m", symbols={"t": SymbolRange(0, 8)})
    module.weights.add("w", dense(np.arange(1.0, 5.0)))
    module.weights.add("v", dense(np.arange(2.0, 6.0)))
    module.weights.add("half", dense(np.ones(2)))
    b = Builder(module, "main")
    return b, [b.input(n, DType.F32, (sym("t"), 4), Role.ACTIVATION) for n in ("x", "y")]


def norm(b: Builder, x, weight: str = "w", name: str = "z", groups: int = 1):
    attrs = RmsNormAttributes(1e-5, groups)
    return b.at(f"model.{weight}").op("rms_norm", x, weights=(weight,), attrs=attrs, name=name)


def run(b: Builder, *values, changed: bool = True) -> tuple[list[str], list[str]]:
    """Ops and remarks afterwards."""
    for i, value in enumerate(values):
        b.output(value, f"out{i}", Role.ACTIVATION)
    ctx = PassContext()
    assert check_pass(FuseResidualNorm(), b.module, ctx=ctx) is changed
    return [n.op.name for n in b.graph.nodes], [str(r) for r in ctx.remarks]


def test_the_sum_is_the_next_residual():
    b, (x, y) = graph()
    total = b.at("model.add").op("add", x, y, name="s")
    z = norm(b, total)
    ops, remarks = run(b, b.op("mul", z, total))
    assert ops == ["add_rms_norm", "mul"]
    (fused, product) = b.graph.nodes
    assert fused.operands == (x, y)
    assert fused.weights == ("w",)
    assert fused.attrs == AddRmsNormAttributes(1e-5)
    assert [r.name for r in fused.results] == ["z", "s"]
    assert product.operands == fused.results
    assert str(fused.location) == "model.w <- fuse-residual-norm"
    assert remarks == ["fuse-residual-norm: applied at @main, rms_norm of model.w: fused"]


def test_a_sum_that_only_the_norm_reads():
    b, (x, y) = graph()
    ops, _ = run(b, norm(b, b.op("add", x, y)))
    assert ops == ["add_rms_norm"]


def test_both_results_may_be_returned():
    b, (x, y) = graph()
    total = b.op("add", x, y)
    run(b, total, norm(b, total), total)
    assert len(b.graph.nodes) == 1
    assert [o.value.index for o in b.graph.outputs] == [1, 0, 1]


def test_others_may_read_the_sum_before_the_norm():
    b, (x, y) = graph()
    total = b.op("add", x, y)
    before = b.op("silu", total)
    ops, _ = run(b, norm(b, total), before)
    assert ops == ["add_rms_norm", "silu"]


def test_operands_that_are_one_value():
    b, (x, _) = graph()
    ops, _ = run(b, norm(b, b.op("add", x, x)))
    assert ops == ["add_rms_norm"]


def test_two_norms_of_one_sum():
    b, (x, y) = graph()
    total = b.op("add", x, y)
    ops, remarks = run(b, norm(b, total), norm(b, total, "v", "u"))
    assert ops == ["add_rms_norm", "rms_norm"]
    assert remarks[1].endswith("x of rms_norm is made by add_rms_norm, expected add")


def test_chains():
    b, (x, y) = graph()
    for _ in range(3):
        x = b.op("add", x, y)
        y = norm(b, x)
    ops, _ = run(b, y)
    assert ops == ["add_rms_norm"] * 3


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda b, x, y: norm(b, x), "x of rms_norm is a graph input, expected add"),
        (
            lambda b, x, y: norm(b, b.op("mul", x, y)),
            "x of rms_norm is made by mul, expected add",
        ),
        (
            lambda b, x, y: norm(b, b.op("add", x, y), "half", groups=2),
            "the norm is over 2 groups of the last axis",
        ),
    ],
)
def test_near_misses(make, reason):
    b, (x, y) = graph()
    _, remarks = run(b, make(b, x, y), changed=False)
    assert [r.split(": ")[-1] for r in remarks] == [reason]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_sum_that_is_rounded_before_the_norm(dtype):
    b, values = graph()
    x, y = (b.op("cast", v, attrs=CastAttributes(dtype)) for v in values)
    _, remarks = run(b, norm(b, b.op("add", x, y)), changed=False)
    assert [r.split(": ")[-1] for r in remarks] == [
        f"the sum is rounded to {dtype} before the norm"
    ]


@given(modules())
def test_random_modules(module):
    check_pass(FuseResidualNorm(), module)


def test_every_norm_of_a_target_but_the_first():
    options = PairOptions(layers=3)
    module = pair(options, draft=False)
    assert check_pass(FuseResidualNorm(), module, pair_inputs(module, options))
    ops = [n.op.name for n in module.graphs["target"].nodes]
    assert ops.count("add_rms_norm") == 2 * options.layers


@FEWER
@given(pair_options())
def test_random_pairs(options):
    options = replace(options, draft_head="own", draft_embedding="own")
    module = pair(options)
    check_pass(FuseResidualNorm(), module, pair_inputs(module, options))
