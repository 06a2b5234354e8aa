from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from edgecc.ir import Builder, DType, Module, Role, SymbolRange, sym
from edgecc.ir.ops.control import CallAttributes
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.shape import SliceAttributes, SplitAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.cse import Cse
from helpers.modules import check_pass, modules, storage
from helpers.pairs import FEWER, pair, pair_inputs, pair_options
from helpers.weights import dense


def graph(name: str = "main", module: Module | None = None) -> tuple[Builder, list]:
    module = module or Module("m")
    module.symbols["t"] = SymbolRange(1, 8)
    b = Builder(module, name)
    if "w" not in module.weights:
        module.weights.add("w", dense(np.random.default_rng(0).standard_normal((4, 4))))
        module.weights.add("same", dense(np.zeros((4, 4))))
        module.weights.alias("same", "w")
        module.weights.add("v", dense(np.ones((4, 4))))
    return b, [b.input(n, DType.F32, (sym("t"), 4), Role.ACTIVATION) for n in ("x", "y")]


def outputs(b: Builder, *values) -> None:
    for i, value in enumerate(values):
        b.output(value, f"out{i}", Role.ACTIVATION)


def ops(b: Builder) -> list[str]:
    return [n.op.name for n in b.graph.nodes]


def test_the_first_node_stays_as_it_was():
    b, (x, _) = graph()
    first = b.at("model.a").op("silu", x, name="first")
    second = b.at("model.b").op("silu", x, name="second")
    user = b.op("sigmoid", second)
    outputs(b, b.op("mul", first, user), second)
    ctx = PassContext()
    assert check_pass(Cse(), b.module, ctx=ctx)
    assert b.graph.nodes[0].result is first
    assert (first.name, str(first.producer.location)) == ("first", "model.a")
    assert user.producer.operands == (first,)
    assert [o.value for o in b.graph.outputs] == [b.graph.nodes[2].result, first]
    assert [str(r) for r in ctx.remarks] == [
        "cse: applied at @main, silu of model.b: equals %first = silu(%x)"
    ]


def test_nodes_that_become_equal_are_found_in_the_same_walk():
    b, (x, _) = graph()
    ends = []
    for _ in range(2):
        value = x
        for _ in range(3):
            value = b.op("silu", value)
        ends.append(value)
    outputs(b, b.op("add", *ends))
    assert check_pass(Cse(), b.module)
    assert ops(b) == ["silu"] * 3 + ["add"]
    assert len(set(b.graph.nodes[-1].operands)) == 1


@pytest.mark.parametrize(("op", "left"), [("add", 1), ("mul", 1), ("swiglu", 2)])
def test_operands_of_commutative_ops_count_in_any_order(op, left):
    b, (x, y) = graph()
    outputs(b, b.op(op, x, y), b.op(op, y, x))
    assert check_pass(Cse(), b.module) is (left == 1)
    assert ops(b) == [op] * left


def test_repeated_operands_are_counted():
    b, (x, y) = graph()
    outputs(b, b.op("add", x, x), b.op("add", x, y), b.op("add", y, y))
    assert not check_pass(Cse(), b.module)


def test_aliases_of_one_weight_are_one():
    b, (x, _) = graph()
    outputs(b, b.op("linear", x, weights=("w",)), b.op("linear", x, weights=("same",)))
    assert check_pass(Cse(), b.module)
    assert ops(b) == ["linear"]


def other_op(b, x, y):
    return b.op("silu", x), b.op("sigmoid", x)


def other_operand(b, x, y):
    return b.op("silu", x), b.op("silu", y)


def other_weight(b, x, y):
    return b.op("linear", x, weights=("w",)), b.op("linear", x, weights=("v",))


def more_weights(b, x, y):
    b.module.weights.add("bias", dense(np.zeros(4)))
    return b.op("linear", x, weights=("w",)), b.op("linear", x, weights=("w", "bias"))


def other_attributes(b, x, y):
    return tuple(b.op("slice", x, attrs=SliceAttributes(1, 0, n)) for n in (1, 2))


def nearly_equal_floats(b, x, y):
    b.module.weights.add("n", dense(np.ones(4)))
    eps = (1e-6, float(np.nextafter(1e-6, 1)))
    return tuple(b.op("rms_norm", x, weights=("n",), attrs=RmsNormAttributes(e)) for e in eps)


@pytest.mark.parametrize(
    "make",
    [
        other_op,
        other_operand,
        other_weight,
        more_weights,
        other_attributes,
        nearly_equal_floats,
    ],
)
def test_near_misses(make):
    b, (x, y) = graph()
    outputs(b, *make(b, x, y))
    assert not check_pass(Cse(), b.module)


def test_all_results_are_replaced():
    b, (x, _) = graph()
    splits = [b.node("split", (x,), attrs=SplitAttributes(1, (1, 3))) for _ in range(2)]
    outputs(b, splits[0].results[1], splits[1].results[0], splits[1].results[1])
    assert check_pass(Cse(), b.module)
    assert [o.value for o in b.graph.outputs] == [splits[0].results[i] for i in (1, 0, 1)]


def test_calls_are_pure():
    inner, (x, y) = graph("inner")
    outputs(inner, inner.op("add", x, y))
    b, (x, y) = graph(module=inner.module)
    outputs(b, *(b.op("call", x, y, attrs=CallAttributes("inner")) for _ in range(2)))
    assert check_pass(Cse(), b.module)
    assert ops(b) == ["call"]


def test_graphs_stay_apart():
    b, (x, _) = graph()
    outputs(b, b.op("silu", x))
    other, (x, _) = graph("other", b.module)
    outputs(other, other.op("silu", x))
    assert not check_pass(Cse(), b.module)


def test_values_with_a_buffer_of_their_own_stay():
    """Two caches with equal contents are two buffers."""
    b, (x, _) = graph()
    first, second, third = (b.op("silu", x) for _ in range(3))
    b.output(first, "a", Role.KV_CACHE, alias="x")
    b.output(second, "b", Role.KV_CACHE, alias="y")
    b.output(third, "c", Role.ACTIVATION)
    assert not check_pass(Cse(), b.module)


def test_a_copied_head_stays_a_second_head():
    b, (x, _) = graph()
    b.module.weights.derive("copy", "concat_rows", ("w",))
    outputs(b, b.op("linear", x, weights=("w",)), b.op("linear", x, weights=("copy",)))
    assert not check_pass(Cse(), b.module)
    assert storage(b.module) == {"w", "copy"}


@given(modules())
def test_random_modules(module):
    check_pass(Cse(), module)
    for made in module.graphs.values():
        seen = {(n.op.name, n.operands, n.weights, n.attrs) for n in made.nodes}
        assert len(seen) == len(made.nodes)


@FEWER
@given(pair_options())
def test_random_pairs(options):
    options = replace(options, draft_head="own", draft_embedding="own")
    module = pair(options)
    check_pass(Cse(), module, pair_inputs(module, options))
