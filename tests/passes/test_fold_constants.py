from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Alias, Builder, Dense, DType, Module, Role, SymbolRange, Unbound, Weight, sym
from edgecc.ir.ops import OPS
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.sampling import ArgmaxAttributes
from edgecc.ir.ops.shape import AxisAttributes, PadAttributes, SliceAttributes, SplitAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights, BindSharedWeightsOptions
from edgecc.passes.fold_constants import FoldConstants, FoldConstantsOptions
from helpers.modules import check_pass, evaluate, modules, random_inputs, storage
from helpers.pairs import DRAFT_HEAD, TARGET_HEAD, pair
from helpers.weights import dense, packed

RNG = np.random.default_rng(0)
X, Y, NORM = RNG.standard_normal((3, 8)), RNG.standard_normal((3, 8)), RNG.standard_normal(8)
PACKED = packed(RNG, 6, 8)
IDS = np.array([[4, 0, 5]])


def builder(**weights) -> Builder:
    module = Module("m", symbols={"t": SymbolRange(1, 8)})
    for name, weight in weights.items():
        module.weights.add(name, weight if isinstance(weight, Weight) else dense(weight))
    return Builder(module, "main")


def constant(b: Builder, symbol: str):
    return b.op("constant", weights=(symbol,), name=symbol)


def finish(b: Builder, *values, inputs=None, changed=True, **options) -> list[str]:
    """Run, check, and return the ops that outputs are made by."""
    for i, value in enumerate(values):
        b.output(value, f"out{i}", Role.ACTIVATION)
    ctx = PassContext()
    made = FoldConstants(FoldConstantsOptions(**options))
    assert check_pass(made, b.module, inputs, ctx) is changed
    b.remarks = [r.message for r in ctx.remarks]
    return [o.value.producer.op.name for o in b.graph.outputs]


def test_a_value_keeps_name_and_place():
    b = builder(x=X)
    x = constant(b, "x")
    b.output(b.at("model.act").op("silu", x, name="y"), "y", Role.ACTIVATION)
    expected = evaluate(b.module, {"main": {}})["main.y"]
    assert check_pass(FoldConstants(), b.module)
    folded = b.graph.outputs[0].value
    assert (folded.name, str(folded.producer.location)) == ("y", "model.act <- fold-constants")
    assert folded.producer.weights == ("main.y",)
    assert b.module.weights["main.y"].encoding == Dense(DType.F32)
    assert b.module.weights.dense("main.y").tobytes() == expected.tobytes()


CASES = {
    "slice": lambda b, x, y: b.op("slice", x, attrs=SliceAttributes(1, 2, 7)),
    "concat": lambda b, x, y: b.op("concat", x, y, attrs=AxisAttributes(0)),
    "add": lambda b, x, y: b.op("add", x, y),
    "linear": lambda b, x, y: b.op("linear", x, weights=("packed",)),
    "rms_norm": lambda b, x, y: b.op(
        "rms_norm", x, weights=("norm",), attrs=RmsNormAttributes(1e-5)
    ),
    "tail": lambda b, x, y: b.op("tail", x, y, attrs=AxisAttributes(1)),
    "unsqueeze": lambda b, x, y: b.op("unsqueeze", x, attrs=AxisAttributes(1)),
    "argmax": lambda b, x, y: b.op("argmax", x, attrs=ArgmaxAttributes(8)),
}


@pytest.mark.parametrize("name", CASES)
def test_ops(name):
    b = builder(x=X, y=Y, norm=NORM, packed=PACKED.weight)
    made = CASES[name](b, constant(b, "x"), constant(b, "y"))
    assert finish(b, made) == ["constant"]


def test_chains_are_folded_in_one_run():
    b = builder(ids=IDS, table=PACKED.weight, norm=NORM)
    ids = b.op("pad", constant(b, "ids"), attrs=PadAttributes(1, 2, 3))
    x = b.op("embedding", ids, weights=("table",))
    y = b.op("rms_norm", x, weights=("norm",), attrs=RmsNormAttributes(1e-5))
    assert finish(b, b.op("mul", x, y)) == ["constant"]


def test_all_results_of_a_split():
    b = builder(x=X)
    split = b.node("split", (constant(b, "x"),), attrs=SplitAttributes(1, (3, 5)))
    assert finish(b, *split.results) == ["constant", "constant"]
    assert [n.op.name for n in b.graph.nodes] == ["constant"] * 3
    assert {"main.split", "main.split.1"} <= storage(b.module)


def test_equal_values_share_one_weight():
    """The third is equal to weights that are there: the last of them."""
    b = builder(x=X, y=X.copy())
    values = [b.op("silu", constant(b, n)) for n in ("x", "y")]
    values.append(b.op("slice", constant(b, "x"), attrs=SliceAttributes(0, 0, 3)))
    assert finish(b, *values) == ["constant"] * 3
    symbols = [o.value.producer.weights[0] for o in b.graph.outputs]
    assert symbols == ["main.silu", "main.silu", "y"]


@pytest.mark.parametrize("value", [2**53 + 1, -(2**62), 0])
def test_integers_are_exact(value):
    b = builder(ids=np.array([value]))
    x = b.op("unsqueeze", constant(b, "ids"), attrs=AxisAttributes(0))
    assert finish(b, x) == ["constant"]
    assert b.module.weights.dense("main.unsqueeze").tolist() == [[value]]
    assert b.graph.outputs[0].value.type.dtype is DType.I64


def test_signs_of_zeros_and_nans_stay():
    with np.errstate(invalid="ignore"):
        b = builder(x=np.array([-0.0, np.nan, np.inf]), y=np.array([-0.0, 1.0, -np.inf]))
        assert finish(b, b.op("add", constant(b, "x"), constant(b, "y"))) == ["constant"]
    found = b.module.weights.dense("main.add")
    assert np.signbit(found[0])
    assert np.isnan(found[1:]).all()


def test_what_reads_an_input_stays():
    b = builder(x=X)
    x = b.input("in", DType.F32, (3, 8), Role.ACTIVATION)
    assert finish(b, b.op("add", x, constant(b, "x")), changed=False) == ["add"]


def test_constants_and_inputs_stay():
    b = builder(x=X)
    assert finish(b, constant(b, "x"), changed=False) == ["constant"]


@pytest.mark.parametrize(("max_bytes", "fits"), [(96, True), (95, False)])
def test_larger_results_stay(max_bytes, fits):
    b = builder(x=X)
    made = finish(b, b.op("silu", constant(b, "x")), changed=fits, max_bytes=max_bytes)
    assert made == ["constant" if fits else "silu"]
    if not fits:
        assert b.remarks == ["the result takes 96 bytes, max-bytes is 95"]


def test_the_default_limit():
    b = builder(x=np.ones(1 << 14), y=np.ones((1 << 14) + 1))
    made = finish(b, *(b.op("silu", constant(b, n)) for n in "xy"))
    assert made == ["constant", "silu"]


def test_empty_results_stay():
    b = builder(x=np.ones((0, 4)))
    assert finish(b, b.op("silu", constant(b, "x")), changed=False) == ["silu"]
    assert b.remarks == ["the result is empty or of unknown size: f32[0, 4]"]


def test_unbound_weights_are_not_read():
    b = builder(x=X)
    weight = Weight((4, 8), Dense(DType.F32), Unbound("lm_head"))
    b.module.weights.add("head", weight)
    b.output(b.op("linear", constant(b, "x"), weights=("head",)), "y", Role.ACTIVATION)
    ctx = PassContext()
    assert not FoldConstants().run(b.module, ctx)
    assert [r.message for r in ctx.remarks] == [
        "weight @head has no bytes: unbound lm_head",
    ]


def test_errors_are_left_to_the_run():
    b = builder(ids=np.array([7]), table=PACKED.weight)
    b.output(b.op("embedding", constant(b, "ids"), weights=("table",)), "y", Role.ACTIVATION)
    ctx = PassContext()
    assert not FoldConstants().run(b.module, ctx)
    assert [r.message for r in ctx.remarks] == ["table @table: index 7 is outside 0..5"]
    assert [n.op.name for n in b.graph.nodes] == ["constant", "embedding"]


def test_calls():
    b = builder(x=X)
    inner = Builder(b.module, "inner")
    h = inner.input("h", DType.F32, (sym("t"), 8), Role.ACTIVATION)
    inner.output(inner.op("silu", h), "y", Role.ACTIVATION)
    b.output(b.op("call", constant(b, "x"), attrs=CallAttributes("inner")), "y", Role.ACTIVATION)
    before = evaluate(b.module, {"main": {}})
    assert FoldConstants().run(b.module, PassContext())
    assert [n.op.name for n in b.graph.nodes] == ["constant", "constant"]
    assert evaluate(b.module, {"main": {}})["main.y"].tobytes() == before["main.y"].tobytes()


def test_names_of_weights_that_are_taken():
    b = builder(x=X)
    b.module.weights.add("main.y", dense(np.ones(2)))
    y = b.op("silu", constant(b, "x"), name="y")
    finish(b, y, b.op("sigmoid", y, name="y"))
    symbols = [o.value.producer.weights[0] for o in b.graph.outputs]
    assert symbols == ["main.y.1", "main.y.2"]


def linear_of(b: Builder, *symbols: str) -> None:
    x = b.input("in", DType.F32, (sym("t"), 8), Role.ACTIVATION)
    for i, symbol in enumerate(symbols):
        b.output(b.op("linear", x, weights=(symbol,)), f"y{i}", Role.ACTIVATION)


def test_dequantized_f32_is_the_same_weight():
    b = builder(x=X)
    table = b.module.weights
    table.derive("once", "dequantize", ("x",))
    table.derive("twice", "dequantize", ("once",))
    linear_of(b, "twice")
    assert check_pass(FoldConstants(), b.module, random_inputs(b.module))
    assert table["once"].source == Alias("x")
    assert storage(b.module) == {"x"}


@pytest.mark.parametrize("weight", [PACKED.weight, dense(X, DType.BF16)])
def test_other_encodings_are_dequantized(weight):
    b = builder(x=weight)
    b.module.weights.derive("f32", "dequantize", ("x",))
    linear_of(b, "f32")
    assert not check_pass(FoldConstants(), b.module)


def test_an_encoding_that_binding_may_change_is_left_alone():
    b = builder()
    table = b.module.weights
    table.add("head", Weight((4, 8), Dense(DType.F32), Unbound("lm_head")))
    table.derive("f32", "dequantize", ("head",))
    assert not FoldConstants().run(b.module, PassContext())


def test_a_copied_head_stays_a_copy():
    module = pair()
    BindSharedWeights(BindSharedWeightsOptions(copy=True)).run(module, PassContext())
    assert not FoldConstants().run(module, PassContext())
    assert module.weights.resolve(DRAFT_HEAD) != module.weights.resolve(TARGET_HEAD)


def fix_inputs(module: Module, name: str, inputs) -> Builder:
    """A second graph with the same nodes, where constants stand for the inputs."""
    b, graph = Builder(module, f"{name}.fixed"), module.graphs[name]
    values = {
        item.value: constant(b, module.weights.add(f"{name}.{item.name}", dense(inputs[item.name])))
        for item in graph.inputs
    }
    for node in graph.nodes:
        operands = [values[o] for o in node.operands]
        made = b.node(node.op.name, operands, node.weights, node.attrs)
        values.update(zip(node.results, made.results, strict=True))
    for output in graph.outputs:
        b.output(values[output.value], output.name, output.role)
    return b


@given(modules(ops=sorted(OPS.keys() - {"cast"})), st.integers(0, 3))
def test_random_modules(module, seed):
    """With constants for inputs, everything is folded to the same bits, unless it is empty.

    Constants are float32 or integers: what is cast to 16 bits in between stays.
    """
    inputs = random_inputs(module, seed)
    expected = evaluate(module, inputs)
    fixed = [fix_inputs(module, name, arrays).graph for name, arrays in inputs.items()]
    check_pass(FoldConstants(), module, {**inputs, **{g.name: {} for g in fixed}})
    found = evaluate(module, {g.name: {} for g in fixed})
    for name, value in expected.items():
        assert found[name.replace(".", ".fixed.", 1)].tobytes() == value.tobytes()
    nodes = [n for g in fixed for n in g.nodes]
    if not any(0 in r.type.shape for n in nodes for r in n.results):
        assert {n.op.name for n in nodes} <= {"constant"}
