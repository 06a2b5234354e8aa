"""Random modules are well-typed, varied, and cover every op and encoding."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from edgecc.errors import UnsupportedError
from edgecc.ir import Dense, DType, Encoding, Module, evaluate, parse_module, print_module, verify
from edgecc.ir import encodings as ir_encodings
from edgecc.ir.ops import OPS
from edgecc.ir.random_inputs import random_inputs
from edgecc.ir.recipes import RECIPES
from edgecc.ir.types import DimExpr
from edgecc.ir.verifier import check_property
from edgecc.ir.weights import Alias, Derived, Inline, Unbound
from edgecc.roles import Role
from edgecc.testing import encodings, modules, weights
from edgecc.testing.encoding_samples import ENCODINGS, encodings_of, random_weight
from edgecc.testing.families import RULES
from edgecc.testing.weight_trees import Bytes, add_weight
from helpers.ops import tensor

QUICK = settings(
    max_examples=400,
    phases=[Phase.generate],
    database=None,
    suppress_health_check=list(HealthCheck),
)


def ops_of(module: Module) -> Counter[str]:
    return Counter(n.op.name for g in module.graphs.values() for n in g.nodes)


@given(modules(dead=True), st.integers(0, 9))
def test_they_verify_read_back_and_evaluate(module, seed):
    assert verify(module) == []
    text = print_module(module, locations=True)
    assert print_module(parse_module(text), locations=True) == text
    values = evaluate(module, random_inputs(module, seed))
    assert len(values) == sum(len(g.outputs) for g in module.entries())


# Every op, every encoding


def test_every_op_has_a_rule():
    """A new op needs a rule in `edgecc.testing.families`."""
    assert sorted(set(OPS) - {rule.op for rule in RULES}) == []


def test_every_op_is_drawn():
    missing = set(OPS).difference(*map(ops_of, sample()))
    for op in sorted(missing):  # rare ones, among only the ops their rules need
        needed = {name for rule in RULES if rule.op == op for name in (op, *rule.uses)}
        find(modules(ops=needed), lambda m, op=op: op in ops_of(m), settings=QUICK)


def test_only_the_ops_asked_for_are_drawn():
    @settings(QUICK, max_examples=60)
    @given(modules(ops=["linear", "silu"], depth=4))
    def check(module: Module) -> None:
        assert set(ops_of(module)) <= {"linear", "silu"}

    check()


def test_an_unknown_op_is_refused():
    with pytest.raises(UnsupportedError, match="unknown op 'liner'"):
        find(modules(ops=["liner"]), lambda m: True)


@given(modules(results=[tensor("f32[t, 3]")], outputs=2, graphs=1))
def test_results_are_those_asked_for(module):
    (graph,) = module.entries()
    found = [o.value.type for o in graph.outputs if o.alias is None]
    assert set(map(str, found)) == {"f32[t, 3]"}
    assert len(found) <= 2


def concrete_encodings() -> set[type]:
    """Classes of encodings; a dataclass with slots leaves a double behind that has no name."""
    waiting, found = [Encoding], set()
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        named = getattr(sys.modules[cls.__module__], cls.__name__, None) is cls
        if named and cls.__module__.startswith("edgecc.") and not inspect.isabstract(cls):
            found.add(cls)
    return found


def test_every_encoding_is_listed():
    """A new class of encodings needs a line in `edgecc.testing.encoding_samples`."""
    assert concrete_encodings() >= {ir_encodings.Dense, ir_encodings.NVFP4}
    assert concrete_encodings() == set(ENCODINGS)
    for cls, listed in ENCODINGS.items():
        assert {type(e) for e in listed} == {cls}


@pytest.mark.parametrize("encoding", [e for listed in ENCODINGS.values() for e in listed], ids=str)
def test_every_listed_encoding_holds_random_weights(encoding):
    shapes = [
        (r, c) for r in (0, 1, 2, 3) for c in (0, 1, 3, 4, 8) if encoding in encodings_of((r, c))
    ]
    assert any(0 not in s for s in shapes)
    for shape in shapes:
        module = Module("m")
        symbols = [add_weight(module, Bytes(shape, encoding, seed)) for seed in range(3)]
        assert verify(module) == []
        values = [module.weights.dense(s) for s in symbols]
        assert all(v.shape == shape and np.isfinite(v.astype(np.float64)).all() for v in values)
        if np.prod(shape) > 2:
            assert len({v.tobytes() for v in values}) == 3


@pytest.mark.parametrize("encoding", [e for listed in ENCODINGS.values() for e in listed], ids=str)
def test_scalars_are_equal_for_two_seeds_only(encoding):
    shape = next(s for s in ((3, 4), (3, 3), (2, 4)) if encoding in encodings_of(s))
    scalars = {n for n, c in encoding.components(shape).items() if not c.rows}
    first, second, third = (dict(random_weight(encoding, shape, s).parts) for s in range(3))
    assert all(first[n] == second[n] != third[n] for n in scalars)


@given(st.data())
def test_weights_have_the_shape_asked_for(data):
    shape = data.draw(st.sampled_from([(4,), (2, 4), (3, 3), (0, 4), (5, 0), (1, 8)]))
    module = Module("m")
    symbol = add_weight(module, data.draw(weights(*shape)))
    assert module.weights[symbol].shape == shape
    assert verify(module) == []
    assert module.weights.dense(symbol).shape == shape


@given(encodings(3, 3))
def test_encodings_fit(encoding):
    assert encoding.components((3, 3))


# What modules are made of


@functools.cache
def sample() -> tuple[Module, ...]:
    """Modules as they come."""
    found: list[Module] = []

    @settings(QUICK, derandomize=True)
    @given(modules(dead=True))
    def collect(module: Module) -> None:
        found.append(module)

    collect()
    return tuple(found)


FEATURES = {
    "no rows at all": lambda m: any(0 in v.type.shape[:1] for v in inputs(m)),
    "no columns": lambda m: any(v.type.shape[-1:] == (0,) for v in inputs(m)),
    "one row": lambda m: any(v.type.shape[:1] == (1,) for v in inputs(m)),
    "a size that is a sum": lambda m: any(
        isinstance(d, DimExpr) and len(d.terms) > 1 for v in values(m) for d in v.type.shape
    ),
    "scalars": lambda m: any(v.type.rank == 0 for v in values(m)),
    "rank 4": lambda m: any(v.type.rank == 4 for v in inputs(m)),
    "indices": lambda m: any(v.type.dtype is DType.I64 for v in inputs(m)),
    "a symbol that may be zero": lambda m: any(r.low == 0 for r in m.symbols.values()),
    "two graphs": lambda m: len(m.entries()) > 1,
    "a called graph": lambda m: len(m.graphs) > len(m.entries()),
    "an updated cache": lambda m: any(o.alias for g in m.graphs.values() for o in g.outputs),
    "a weight two graphs share": lambda m: any(len(u) > 1 for u in m.weight_users().values()),
    "a value two nodes share": lambda m: any(len(v.users()) > 1 for v in values(m)),
    "an updated state": lambda m: any(
        o.role is Role.STATE for g in m.graphs.values() for o in g.outputs
    ),
    "an alias": lambda m: any(isinstance(w.source, Alias) for w in m.weights.values()),
    "a bias": lambda m: any(
        len(n.weights) == 2 for g in m.graphs.values() for n in g.nodes if n.op.name == "linear"
    ),
    "several results": lambda m: any(len(n.results) > 1 for n in nodes(m)),
    "a node without users": lambda m: any(
        not r.users() and all(o.value is not r for o in g.outputs)
        for g in m.graphs.values()
        for n in g.nodes
        for r in n.results
    ),
    "a width that only some blocks divide": lambda m: any(
        w.shape[-1:] == (3,) and not isinstance(w.encoding, Dense) for w in m.weights.values()
    ),
    **{
        f"a weight by {name}": lambda m, name=name: any(
            isinstance(w.source, Derived) and w.source.recipe == name for w in m.weights.values()
        )
        for name in RECIPES
    },
}


def inputs(module):
    return [i.value for g in module.graphs.values() for i in g.inputs]


def nodes(module):
    return [n for g in module.graphs.values() for n in g.nodes]


def values(module):
    return [*inputs(module), *(r for n in nodes(module) for r in n.results)]


@pytest.mark.parametrize("feature", FEATURES)
def test_modules_have(feature):
    assert any(FEATURES[feature](m) for m in sample())


def test_caches_have_the_role_the_runtime_looks_for():
    for module in sample():
        for graph in module.entries():
            for output in graph.outputs:
                carried = output.role in (Role.KV_CACHE, Role.STATE)
                assert carried == (output.alias is not None)
                assert not carried or graph.input(str(output.alias)).role is output.role


def test_every_recipe_is_drawn_or_needs_none():
    """A new recipe should be added to `edgecc.testing.weight_trees`."""
    drawn = {
        w.source.recipe
        for m in sample()
        for w in m.weights.values()
        if isinstance(w.source, Derived)
    }
    assert sorted(set(RECIPES) - drawn) == []


def test_nodes_know_where_they_come_from():
    assert all(n.location.origin for m in sample() for n in nodes(m))


def test_unbound_weights_only_when_asked_for():
    assert not any(check_property(m, "heads-bound") for m in sample())
    module = find(
        modules(unbound=True, ops=["linear"]),
        lambda m: any(isinstance(w.source, Unbound) for w in m.weights.values()),
        settings=QUICK,
    )
    assert verify(module) == []
    assert check_property(module, "heads-bound")


def test_weights_are_inline():
    """So that the text of a module is all there is to know about it."""
    sources = {type(w.source) for m in sample() for w in m.weights.values()}
    assert sources == {Inline, Alias, Derived}
