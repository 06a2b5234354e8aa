from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import InternalError
from edgecc.ir import (
    NVFP4,
    Builder,
    DType,
    Location,
    Module,
    Role,
    SymbolRange,
    Unbound,
    Value,
    Weight,
    sym,
    verify,
)
from edgecc.passes.base import PassContext
from edgecc.passes.dce import Dce
from edgecc.passes.fuse_gate_up import FuseGateUp
from edgecc.passes.fuse_linears import common_name
from helpers.modules import check_pass, modules, random_inputs, storage
from helpers.pairs import PairOptions, pair
from helpers.weights import Packed, dense, packed

K = 8


def builder(*, name: str = "main", module: Module | None = None) -> tuple[Builder, Value]:
    module = module or Module("m", symbols={"t": SymbolRange(1, 8)})
    b = Builder(module, name).at("model.safetensors: mlp")
    return b, b.input("x", DType.F32, (sym("t"), K), Role.ACTIVATION)


def weight(seed: int, rows: int = 6, *, scale: float = 0.0625) -> Packed:
    return packed(np.random.default_rng(seed), rows, K, global_scale=scale)


def mlp(gate: Weight | None = None, up: Weight | None = None) -> tuple[Builder, Value]:
    b, x = builder()
    b.module.weights.add("mlp.gate.weight", gate or weight(1).weight)
    b.module.weights.add("mlp.up.weight", up or weight(2).weight)
    layers = [
        b.op("linear", x, weights=(f"mlp.{n}.weight",), name=f"{n}_proj") for n in ("gate", "up")
    ]
    b.output(b.op("swiglu", *layers, name="act"), "y", Role.ACTIVATION)
    return b, x


def ops(module: Module, graph: str = "main") -> list[str]:
    return [n.op.name for n in module.graphs[graph].nodes]


@pytest.mark.parametrize(
    ("gate", "up"),
    [
        (weight(1).weight, weight(2).weight),
        (dense(np.ones((6, K))), dense(np.zeros((6, K)))),
        (dense(np.ones((6, K)), DType.BF16), dense(np.zeros((6, K)), DType.BF16)),
    ],
)
def test_match(gate, up):
    b, _ = mlp(gate, up)
    module = b.module
    assert check_pass(FuseGateUp(), module)
    linear, split, swiglu = module.graphs["main"].nodes
    assert (linear.op.name, split.op.name, swiglu.op.name) == ("linear", "split", "swiglu")
    assert linear.weights == ("mlp.gate+up.weight",)
    fused = module.weights["mlp.gate+up.weight"]
    assert (fused.shape, fused.encoding) == ((12, K), gate.encoding)
    assert str(fused.source) == "concat_rows(@mlp.gate.weight, @mlp.up.weight)"
    assert [r.name for r in split.results] == ["gate_proj", "up_proj"]
    assert [str(r.type) for r in split.results] == ["f32[t, 6]"] * 2
    expected = Location("model.safetensors: mlp", ("fuse-gate-up",))
    assert linear.location == split.location == expected
    assert swiglu.operands == split.results


def test_remarks():
    b, _ = mlp()
    ctx = PassContext()
    FuseGateUp().run(b.module, ctx)
    assert [str(r) for r in ctx.remarks] == [
        "fuse-gate-up: applied at @main, swiglu of model.safetensors: mlp: @mlp.gate+up.weight"
    ]


def test_up_may_come_first():
    """The gate's rows are on top, wherever its layer stood."""
    b, x = builder()
    for symbol, seed in (("gate", 1), ("up", 2)):
        b.module.weights.add(symbol, weight(seed).weight)
    up = b.op("linear", x, weights=("up",), name="u")
    other = b.op("silu", up)
    gate = b.op("linear", x, weights=("gate",), name="g")
    b.output(b.op("swiglu", gate, up), "y", Role.ACTIVATION)
    b.output(other, "other", Role.ACTIVATION)
    assert check_pass(FuseGateUp(), b.module)
    assert ops(b.module) == ["linear", "split", "silu", "swiglu"]
    assert b.graph.nodes[0].weights == ("gate+up",)


def test_several_users_and_outputs_read_the_pieces():
    b, _ = mlp()
    gate, up = (n.result for n in b.graph.nodes[:2])
    b.output(gate, "gate", Role.ACTIVATION)
    b.output(b.op("mul", up, up), "up", Role.ACTIVATION)
    assert check_pass(FuseGateUp(), b.module)
    assert ops(b.module) == ["linear", "split", "swiglu", "mul"]
    assert b.graph.outputs[1].value is b.graph.nodes[1].results[0]


def test_two_mlps_of_one_input():
    b, x = mlp()
    for symbol, seed in (("a", 3), ("b", 4)):
        b.module.weights.add(symbol, weight(seed).weight)
    layers = [b.op("linear", x, weights=(s,)) for s in "ab"]
    b.output(b.op("swiglu", *layers), "z", Role.ACTIVATION)
    assert check_pass(FuseGateUp(), b.module)
    assert ops(b.module).count("linear") == 2


def test_a_layer_in_two_mlps_is_fused_once():
    b, x = mlp()
    gate = b.graph.nodes[0].result
    b.module.weights.add("other", weight(3).weight)
    other = b.op("linear", x, weights=("other",))
    b.output(b.op("swiglu", gate, other), "z", Role.ACTIVATION)
    assert check_pass(FuseGateUp(), b.module)
    assert ops(b.module) == ["linear", "split", "swiglu", "linear", "swiglu"]


def test_every_graph_is_visited():
    b, _ = mlp()
    c, x = builder(name="other", module=b.module)
    for symbol, seed in (("a", 3), ("b", 4)):
        b.module.weights.add(symbol, weight(seed).weight)
    layers = [c.op("linear", x, weights=(s,)) for s in "ab"]
    c.output(c.op("swiglu", *layers), "z", Role.ACTIVATION)
    assert check_pass(FuseGateUp(), b.module)
    assert ops(b.module) == ops(b.module, "other") == ["linear", "split", "swiglu"]


def test_weights_behind_aliases():
    b, _ = mlp()
    table = b.module.weights
    table.add("gate bytes", table["mlp.gate.weight"])
    table.rebind("mlp.gate.weight", weight(9).weight)
    table.alias("mlp.gate.weight", "gate bytes")
    assert check_pass(FuseGateUp(), b.module)
    assert b.graph.nodes[0].weights == ("gate bytes+mlp.up.weight",)


NEAR_MISSES: dict[str, tuple[str, Callable[[], Builder]]] = {}


def near_miss(reason: str):
    def register(function: Callable[[], Builder]):
        NEAR_MISSES[function.__name__] = (reason, function)
        return function

    return register


@near_miss("only some of the layers have a bias")
def bias() -> Builder:
    b, x = mlp()
    b.module.weights.add("bias", dense(np.ones(6)))
    gate = b.op("linear", x, weights=("mlp.gate.weight", "bias"))
    swiglu = b.graph.nodes[2]
    swiglu._set_operands((gate, swiglu.operands[1]))
    b.graph.nodes.insert(2, b.graph.nodes.pop())
    return b


@near_miss("x of linear is %x, expected %other as before")
def inputs() -> Builder:
    b, x = mlp()
    other = b.input("other", DType.F32, x.type.shape, Role.ACTIVATION)
    b.graph.nodes[0]._set_operands((other,))
    return b


@near_miss("two layers share one weight")
def one_weight() -> Builder:
    b, _ = mlp()
    b.graph.nodes[1].weights = ("mlp.gate.weight",)
    return b


@near_miss("two layers share one weight")
def one_weight_behind_an_alias() -> Builder:
    b, _ = mlp()
    b.module.weights.alias("mlp.up.weight", "mlp.gate.weight")
    return b


@near_miss("encodings differ: dense<f32>, nvfp4<block=4>")
def encodings() -> Builder:
    return mlp(up=dense(np.ones((6, K))))[0]


@near_miss("weight_scale_2 differs between the layers")
def global_scales() -> Builder:
    return mlp(up=weight(2, scale=0.125).weight)[0]


@near_miss("weight_scale_2 differs between the layers")
def global_scales_by_one_bit() -> Builder:
    one_bit_more = float(np.nextafter(np.float32(0.0625), np.float32(1)))
    return mlp(up=weight(2, scale=one_bit_more).weight)[0]


@near_miss("@mlp.up.weight is also read in @main by %linear = linear(%x)")
def another_reader() -> Builder:
    b, x = mlp()
    b.output(b.op("linear", x, weights=("mlp.up.weight",)), "z", Role.ACTIVATION)
    return b


@near_miss("@mlp.gate.weight is also read in @other by %linear = linear(%x)")
def a_reader_in_another_graph() -> Builder:
    b, _ = mlp()
    c, x = builder(name="other", module=b.module)
    c.output(c.op("linear", x, weights=("mlp.gate.weight",)), "z", Role.ACTIVATION)
    return b


@near_miss("@mlp.gate.weight is also read in @main by %linear = linear(%x)")
def a_reader_of_a_derived_weight() -> Builder:
    b, x = mlp()
    b.module.weights.derive("wide", "dequantize", ("mlp.gate.weight",))
    b.output(b.op("linear", x, weights=("wide",)), "z", Role.ACTIVATION)
    return b


@near_miss("gate of swiglu is made by silu, expected linear")
def operand_that_is_no_linear_layer() -> Builder:
    b, _ = mlp()
    silu = b.op("silu", b.graph.nodes[0].result)
    swiglu = b.graph.nodes[2]
    swiglu._set_operands((silu, swiglu.operands[1]))
    b.graph.nodes.insert(2, b.graph.nodes.pop())
    return b


@near_miss("gate of swiglu is a graph input, expected linear")
def operand_that_is_an_input() -> Builder:
    b, _ = mlp()
    gate = b.input("gate", DType.F32, (sym("t"), 6), Role.ACTIVATION)
    swiglu = b.graph.nodes[2]
    swiglu._set_operands((gate, swiglu.operands[1]))
    return b


@near_miss("two layers share one weight")
def one_layer_for_both() -> Builder:
    b, _ = mlp()
    swiglu = b.graph.nodes[2]
    swiglu._set_operands((swiglu.operands[0], swiglu.operands[0]))
    return b


@near_miss("")
def mul_instead_of_swiglu() -> Builder:
    b, _ = mlp()
    gate, up = (n.result for n in b.graph.nodes[:2])
    b.graph.outputs[0].value = b.op("mul", gate, up)
    return b


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    reason, make = NEAR_MISSES[name]
    module = make().module
    if name == "mul_instead_of_swiglu":
        Dce().run(module, PassContext())
    ctx = PassContext()
    assert not check_pass(FuseGateUp(), module, ctx=ctx)
    reasons = {r.message for r in ctx.remarks}
    assert reasons == ({reason} if reason else set())
    assert not any(r.applied for r in ctx.remarks)


def test_unbound_weights_are_left_alone():
    unbound = Weight((6, K), NVFP4(4), Unbound("lm_head"))
    b, _ = mlp(up=unbound)
    ctx = PassContext()
    assert not FuseGateUp().run(b.module, ctx)
    assert [r.message for r in ctx.remarks] == ["a weight is unbound"]
    assert verify(b.module) == []


def test_no_weight_is_stored_twice():
    b, _ = mlp()
    before = storage(b.module)
    FuseGateUp().run(b.module, PassContext())
    Dce().run(b.module, PassContext())
    after = storage(b.module)
    assert after - before == {"mlp.gate+up.weight"}
    inputs = b.module.weights["mlp.gate+up.weight"].source.inputs
    assert len(set(inputs)) == len(inputs)


def test_the_mlps_of_a_pair():
    module = pair(PairOptions(draft_head="own", draft_embedding="own", layers=2))
    assert FuseGateUp().run(module, PassContext())
    assert sum(ops(module, g).count("split") for g in ("target", "draft")) == 4
    assert "target.layers.1.gate_proj+up_proj.weight" in module.weights


@given(modules(), st.integers(0, 5))
def test_random_modules(module, seed):
    before = storage(module)
    check_pass(FuseGateUp(), module, random_inputs(module, seed))
    # What was stacked is read through the stack alone: no row is stored twice.
    stacked = [s for s in storage(module) - before if "+" in s]
    inputs = [i for s in stacked for i in module.weights[s].source.inputs]
    assert len(set(inputs)) == len(inputs)
    read = {w for g in module.graphs.values() for w in g.used_weights()}
    assert read.isdisjoint(inputs)


@pytest.mark.parametrize(
    ("names", "common"),
    [
        (["a.q.weight", "a.k.weight"], "a.q+k.weight"),
        (["m.0.q.weight", "m.0.k.weight", "m.0.v.weight"], "m.0.q+k+v.weight"),
        (["a.q.weight", "b.k.weight"], "a.q.weight+b.k.weight"),
        (["a.q.weight", "a.k.bias"], "a.q.weight+a.k.bias"),
        (["a.q.weight", "a.b.k.weight"], "a.q.weight+a.b.k.weight"),
        (["q", "k"], "q+k"),
        (["q.weight", "k.weight"], "q+k.weight"),
    ],
)
def test_common_names(names, common):
    assert common_name(names) == common


def test_a_taken_name_is_an_error_and_never_another_weight():
    b, _ = mlp()
    b.module.weights.add("mlp.gate+up.weight", weight(3, 12).weight)
    with pytest.raises(InternalError, match=r"weight @mlp\.gate\+up\.weight is defined twice"):
        FuseGateUp().run(b.module, PassContext())
