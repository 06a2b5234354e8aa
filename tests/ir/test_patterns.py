"""The pattern language: what matches, what is bound, and what a failed match says."""

from __future__ import annotations

import pytest

from edgecc.ir import Builder, DType, Module, Role
from edgecc.ir.ops.shape import AxisAttributes, SplitAttributes
from edgecc.ir.parser import parse_module
from edgecc.ir.patterns import Match, NoMatch, match, op, through, var


class Net:
    """`out = add(silu(x), mul(x, y))`, and what a test adds."""

    def __init__(self) -> None:
        self.b = Builder(Module("m"), "main")
        self.x, self.y = (self.b.input(n, DType.F32, (4,), Role.ACTIVATION) for n in "xy")
        self.silu = self.b.op("silu", self.x, name="s")
        self.mul = self.b.op("mul", self.x, self.y, name="m")
        self.add = self.b.op("add", self.silu, self.mul, name="a")

    def match(self, pattern, value=None):
        root = (self.add if value is None else value).producer
        return match(pattern, self.b.module, self.b.graph, root)


@pytest.fixture
def net() -> Net:
    return Net()


def test_a_match_binds_nodes_and_values(net):
    pattern = op("add", op("silu", var("in"), label="left"), op("mul", var("in"), var("other")))
    found = net.match(pattern)
    assert isinstance(found, Match)
    assert found.root is net.add.producer
    assert found["left"] is net.silu.producer
    assert (found.value("in"), found.value("other")) == (net.x, net.y)
    assert found.matched == (net.add.producer, net.silu.producer, net.mul.producer)


def test_commutative_operands_match_in_either_order(net):
    flipped = op("add", op("mul", var("a"), var("b")), op("silu", var("a")))
    found = net.match(flipped)
    assert isinstance(found, Match)
    assert found.value("b") is net.y
    inner = op("add", op("silu", var("a")), op("mul", var("b"), var("a")))
    found = net.match(inner)
    assert isinstance(found, Match)
    assert (found.value("a"), found.value("b")) == (net.x, net.y)


def test_operands_of_other_ops_keep_their_places(net):
    swiglu = net.b.op("swiglu", net.silu, net.mul)
    assert isinstance(net.match(op("swiglu", op("silu"), op("mul")), swiglu), Match)
    found = net.match(op("swiglu", op("mul"), op("silu")), swiglu)
    assert isinstance(found, NoMatch)
    assert found.reason == "gate of swiglu is made by silu, expected mul"


def test_several_ops_and_any_operands(net):
    assert isinstance(net.match(op(["sub", "add"])), Match)
    found = net.match(op(["mul", "silu"]))
    assert isinstance(found, NoMatch)
    assert found.reason == "add, expected mul or silu"


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (op("add", op("rope"), var("b")), "a of add is made by silu, expected rope"),
        (op("add", op("silu", op("mul")), var("b")), "x of silu is a graph input, expected mul"),
        (op("add", op("silu", var("x")), var("x")), "b of add is %m, expected %x as before"),
        (op("add", var("a")), "add has 2 operands, expected 1"),
        (op("add", where=lambda n: "not today"), "not today"),
        (
            op("add", op("silu", where=lambda n: f"no {n.op.name} here"), var("b")),
            "no silu here",
        ),
    ],
)
def test_a_failed_match_says_what_was_found(net, pattern, reason):
    found = net.match(pattern)
    assert isinstance(found, NoMatch)
    assert found.reason == reason


def test_the_attempt_that_got_furthest_is_the_one_reported(net):
    """In the order silu, mul both operands match as nodes; the other order fails at once."""
    pattern = op("add", op("silu", var("a")), op("mul", var("a"), var("a")))
    found = net.match(pattern)
    assert isinstance(found, NoMatch)
    assert found.reason == "b of mul is %y, expected %x as before"
    assert found.node is net.mul.producer


def test_a_label_used_twice_is_one_node(net):
    twice = op("add", op("silu", label="s"), op("silu", label="s"))
    assert isinstance(net.match(twice), NoMatch)
    same = net.b.op("add", net.silu, net.silu)
    assert isinstance(net.match(twice, same), Match)
    other = net.b.op("silu", net.x, name="t")
    found = net.match(twice, net.b.op("add", net.silu, other))
    assert isinstance(found, NoMatch)
    assert found.reason == "%t = silu(%x) is not %s = silu(%x), as before"


def test_a_piece_must_be_the_right_one(net):
    pieces = net.b.node("split", (net.x,), attrs=SplitAttributes(0, (1, 3))).results
    second = net.b.op("silu", pieces[1])
    assert isinstance(net.match(op("silu", op("split", result=1)), second), Match)
    found = net.match(op("silu", op("split", result=0)), second)
    assert isinstance(found, NoMatch)
    assert found.reason == "x of silu is result 1 of split, expected 0"


def test_values_with_other_readers(net):
    pattern = op("add", op("silu", only_user=True), var("b"))
    assert isinstance(net.match(pattern), Match)
    net.b.op("sigmoid", net.silu, name="z")
    found = net.match(pattern)
    assert isinstance(found, NoMatch)
    assert found.reason == "a of add is also read by %z = sigmoid(%s)"


def test_through_skips_any_number_of_nodes(net):
    pattern = op("add", through(["silu", "sigmoid"], op("mul", label="far")), var("b"))
    chain = net.mul
    for name in ("sigmoid", "silu", "sigmoid"):
        assert isinstance(net.match(pattern, net.b.op("add", chain, net.x)), Match)
        chain = net.b.op(name, chain)
    found = net.match(pattern, net.b.op("add", chain, net.x))
    assert isinstance(found, Match)
    assert found["far"] is net.mul.producer
    assert len(found.matched) == 5
    found = net.match(pattern, net.b.op("add", net.b.op("silu", net.x), net.y))
    assert isinstance(found, NoMatch)
    assert found.reason == "x of silu is a graph input, expected mul"


def test_through_follows_the_operand_it_is_told(net):
    joined = net.b.op("concat", net.x, net.silu, attrs=AxisAttributes(0))
    root = net.b.op("sigmoid", joined)
    assert isinstance(net.match(op("sigmoid", through({"concat": 1}, op("silu"))), root), Match)
    found = net.match(op("sigmoid", through({"concat": 0}, op("silu"))), root)
    assert isinstance(found, NoMatch)
    assert found.reason == "x of concat is a graph input, expected silu"


def test_a_chain_ends_where_there_is_no_operand_to_follow():
    module = parse_module(
        'edgecc.module v1 "m"\n'
        "weight @c : dense<f32> [1] = inline {weight: 0x0000803f}\n"
        "graph @g() {\n  %c = constant(@c) : f32[1]\n  %d = silu(%c) : f32[1]\n"
        "  return\n    d = %d activation\n}\n"
    )
    graph = module.graphs["g"]
    constant, silu = graph.nodes
    found = match(op("silu", through(["constant"], var("x"))), module, graph, silu)
    assert isinstance(found, Match)
    assert found.value("x") is constant.result
