"""What a failure shrinks to: the smallest graph that still fails."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from edgecc.ir import Module, Node
from edgecc.testing import check_pass, modules
from helpers.seeded_bugs import SwapsOperands

SHRINK = settings(
    max_examples=1000,
    phases=[Phase.generate, Phase.shrink],
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def nodes(module: Module) -> list:
    return [n for g in module.graphs.values() for n in g.nodes]


def read_by(module: Module, first: str, second: str) -> list[Node]:
    """Nodes of one op that a node of another op reads."""
    readers = (n for n in nodes(module) if n.op.name == second)
    read = (o.producer for n in readers for o in n.operands if o.producer is not None)
    return [n for n in read if n.op.name == first]


def feeds(first: str, node: Node) -> bool:
    """Whether a node reads the result of an op."""
    return any(o.producer is not None and o.producer.op.name == first for o in node.operands)


def is_shared(module: Module) -> bool:
    """Whether one result is read by two kinds of ops."""
    return any(
        len({user.op.name for r in n.results for user in r.users()}) > 1 for n in nodes(module)
    )


FEW = ["add", "linear", "mul", "rms_norm", "sigmoid", "silu", "slice"]

SMALLEST = {
    "one op of all": (modules(), lambda m: any(n.op.name == "rms_norm" for n in nodes(m)), 1),
    "a chain of all": (modules(), lambda m: bool(read_by(m, "add", "mul")), 2),
    "a chain": (modules(ops=FEW), lambda m: bool(read_by(m, "linear", "rms_norm")), 2),
    "three ops": (
        modules(ops=["add", "mul", "sigmoid", "silu"]),
        lambda m: any(feeds("silu", mul) for mul in read_by(m, "mul", "sigmoid")),
        3,
    ),
    "sharing": (modules(ops=FEW), is_shared, 3),
}


@pytest.mark.parametrize("what", SMALLEST)
def test_smallest_graph(what):
    drawn, fails, size = SMALLEST[what]
    module = find(drawn, fails, settings=SHRINK)
    assert len(nodes(module)) == size
    assert len(module.graphs) == 1
    assert sum(len(g.outputs) for g in module.graphs.values()) <= 2


def test_a_mistake_in_a_pass_shrinks_to_the_op_it_is_about():
    def caught(module: Module) -> bool:
        try:
            check_pass(SwapsOperands(), module)
        except AssertionError:
            return True
        return False

    module = find(modules(ops=["swiglu", "silu", "linear"]), caught, settings=SHRINK)
    assert [n.op.name for n in nodes(module)] == ["swiglu"]
