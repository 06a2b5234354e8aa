"""What a failure shrinks to: the smallest graph that still fails."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, find, settings

from edgecc.ir import Module
from edgecc.testing import modules

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


def feeds(module: Module, first: str, second: str) -> bool:
    """Whether an op reads the result of another."""
    return any(
        o.producer is not None and o.producer.op.name == first
        for n in nodes(module)
        if n.op.name == second
        for o in n.operands
    )


def is_shared(module: Module) -> bool:
    """Whether the result of a layer is read by two kinds of ops."""
    return any(
        len({user.op.name for r in n.results for user in r.users()}) > 1
        for n in nodes(module)
        if n.op.name == "linear"
    )


SMALLEST = {
    "one op": (lambda m: any(n.op.name == "rms_norm" for n in nodes(m)), 1),
    "a chain": (lambda m: feeds(m, "silu", "add"), 2),
    "a chain with a weight": (lambda m: feeds(m, "linear", "rms_norm"), 2),
    "three ops": (lambda m: feeds(m, "slice", "mul") and feeds(m, "mul", "sigmoid"), 3),
    "sharing": (is_shared, 3),
}


@pytest.mark.parametrize("what", SMALLEST)
def test_smallest_graph(what):
    fails, size = SMALLEST[what]
    module = find(modules(), fails, settings=SHRINK)
    assert len(nodes(module)) == size
    assert len(module.graphs) == 1
    assert sum(len(g.outputs) for g in module.graphs.values()) <= 2
