from __future__ import annotations

import numpy as np
import pytest

from edgecc.errors import InternalError, UnsupportedError
from edgecc.ir import Builder, DType, Location, Module, Role, SymbolRange, sym, verify
from edgecc.ir.builder import make_node
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.shape import AxisAttributes, SplitAttributes
from helpers.weights import dense


def module() -> Module:
    made = Module("m", symbols={"t": SymbolRange(1, 8)})
    made.weights.add("w", dense(np.ones((3, 4))))
    return made


def builder() -> Builder:
    return Builder(module(), "main")


def test_builds_a_graph_that_verifies():
    b = builder()
    x = b.input("x", DType.F32, (sym("t"), 4), Role.HIDDEN)
    y = b.op("linear", x, weights=("w",), name="y")
    b.output(y, "out", Role.LOGITS)
    assert verify(b.module) == []
    assert list(b.module.graphs) == ["main"]
    assert str(y.type) == "f32[t, 3]"
    assert y.name == "y"
    assert (b.graph.inputs[0].role, b.graph.outputs[0].role) == (Role.HIDDEN, Role.LOGITS)
    assert b.graph.outputs[0].alias is None


def test_extends_an_existing_graph():
    b = builder()
    x = b.input("x", DType.F32, (4,), Role.HIDDEN)
    again = Builder(b.module, b.graph)
    again.op("add", x, x)
    assert again.graph is b.graph
    assert len(b.graph.nodes) == 1


def test_graph_and_input_names_are_unique():
    b = builder()
    with pytest.raises(InternalError, match="graph @main exists") as caught:
        Builder(b.module, "main")
    assert caught.value.id == "ir/duplicate-graph"
    b.input("x", DType.F32, (4,), Role.HIDDEN)
    with pytest.raises(InternalError, match="@main has an input %x") as caught:
        b.input("x", DType.F32, (4,), Role.HIDDEN)
    assert caught.value.id == "ir/duplicate-input"
    assert len(b.graph.inputs) == 1


def test_locations_go_to_the_nodes_added_next():
    b = builder()
    x = b.input("x", DType.F32, (4,), Role.HIDDEN)
    b.op("add", x, x)
    assert b.at("model.safetensors: q_proj") is b
    b.op("mul", x, x)
    b.node("split", (x,), attrs=SplitAttributes(0, (2, 2)))
    b.at("other").op("silu", x)
    found = [n.location for n in b.graph.nodes]
    assert found == [
        Location(),
        *[Location("model.safetensors: q_proj")] * 2,
        Location("other"),
    ]


def test_results():
    b = builder()
    x = b.input("x", DType.F32, (4,), Role.HIDDEN)
    node = b.node("split", (x,), attrs=SplitAttributes(0, (1, 3)), names=("a", "b"))
    assert [(r.name, str(r.type)) for r in node.results] == [("a", "f32[1]"), ("b", "f32[3]")]
    with pytest.raises(InternalError, match="split has 2 results"):
        b.op("split", x, attrs=SplitAttributes(0, (1, 3)))


@pytest.mark.parametrize(
    ("op", "operands", "weights", "attrs", "message"),
    [
        ("linear", 1, ("w",), None, "linear: columns of the weight .*: expected 5, got 4"),
        ("linear", 1, (), None, r"linear: expects weights \(weight, bias\?\), got 0"),
        ("add", 1, (), None, r"add: expects operands \(a, b\), got 1"),
        ("concat", 1, (), None, "concat: expects attributes AxisAttributes, got Attributes"),
        ("concat", 1, (), RmsNormAttributes(1e-6), "got RmsNormAttributes"),
        ("concat", 1, (), AxisAttributes(3), r"concat: axis 3 is outside f32\[5\]"),
    ],
)
def test_operands_that_do_not_fit(op, operands, weights, attrs, message):
    b = builder().at("model.safetensors: q_proj")
    x = b.input("x", DType.F32, (5,), Role.HIDDEN)
    with pytest.raises(InternalError, match=message) as caught:
        b.node(op, [x] * operands, weights, attrs)
    found = caught.value.diagnostics[0]
    assert found.id == "ir/type-rule"
    assert found.where == "model.safetensors: q_proj"
    assert found.notes == (repr([x] * operands),)
    assert b.graph.nodes == []
    assert x.uses == {}


def test_unknown_ops_and_weights():
    b = builder()
    x = b.input("x", DType.F32, (4,), Role.HIDDEN)
    with pytest.raises(UnsupportedError, match="unknown op 'conv'"):
        b.op("conv", x)
    with pytest.raises(InternalError, match="no weight @z") as caught:
        b.op("linear", x, weights=("z",))
    assert caught.value.id == "ir/unknown-weight"
    assert b.graph.nodes == []


def test_weights_are_typed_through_aliases():
    b = builder()
    b.module.weights.add("other", dense(np.ones(7)))
    b.module.weights.alias("other", "w")
    x = b.input("x", DType.F32, (4,), Role.HIDDEN)
    assert str(b.op("linear", x, weights=("other",)).type) == "f32[3]"


def test_make_node_adds_nothing_to_the_graph():
    b = builder()
    x = b.input("x", DType.F32, (4,), Role.HIDDEN)
    node = make_node(b.module, "silu", (x,), names=("y",), location=Location("here"))
    assert b.graph.nodes == []
    assert (node.result.name, node.location) == ("y", Location("here"))
