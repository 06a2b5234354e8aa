from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import (
    Builder,
    DType,
    Graph,
    Module,
    Role,
    SymbolRange,
    Value,
    print_module,
    sym,
    verify,
)
from edgecc.ir.analysis import live_nodes
from edgecc.ir.ops.shape import AxisAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.bind_shared_weights import BindSharedWeights
from edgecc.passes.dce import Dce
from edgecc.passes.dedupe_weights import DedupeWeights, DedupeWeightsOptions
from edgecc.passes.outline_shared import OutlineShared, OutlineSharedOptions
from edgecc.passes.unroll_markov import UnrollMarkov
from helpers.modules import check_pass, interface, modules, random_inputs, storage
from helpers.pairs import (
    DRAFT_HEAD,
    FEWER,
    TARGET_HEAD,
    PairOptions,
    pair,
    pair_inputs,
    pair_options,
)
from helpers.weights import dense


def bound(options: PairOptions | None = None) -> Module:
    module = pair(options)
    BindSharedWeights().run(module, PassContext())
    return module


def leaves(module: Module) -> list[Graph]:
    return [g for g in module.graphs.values() if not list(g.callees())]


def linear_users(module: Module) -> dict[str, set[str]]:
    """Leaf graphs by the weights they multiply by."""
    users: dict[str, set[str]] = {}
    for graph in leaves(module):
        for node in graph.nodes:
            if node.op.name == "linear":
                users.setdefault(module.weights.resolve(node.weights[0]), set()).add(graph.name)
    return users


def shared(module: Module) -> dict[str, set[str]]:
    return {w: graphs for w, graphs in linear_users(module).items() if len(graphs) > 1}


def ops(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes]


def calls(graph: Graph) -> list[str]:
    return [n.attrs.callee if n.op.name == "call" else n.op.name for n in graph.nodes]


# Pairs


def test_the_head_of_a_pair_becomes_a_graph():
    module, ctx = bound(), PassContext()
    inputs = pair_inputs(module, batch=2)
    before = {name: interface(g) for name, g in module.graphs.items()}
    assert check_pass(OutlineShared(), module, inputs, ctx)
    assert list(module.graphs) == [
        "target",
        "draft",
        "lm_head",
        "target.body",
        "draft.body",
        "draft.tail",
    ]
    assert calls(module.graphs["target"]) == ["target.body", "lm_head"]
    assert calls(module.graphs["draft"]) == ["draft.body", "lm_head", "draft.tail"]
    for name, expected in before.items():
        assert interface(module.graphs[name]) == expected
    assert shared(module) == {}
    assert linear_users(module)[TARGET_HEAD] == {"lm_head"}
    head = module.graphs["lm_head"]
    assert [str(t) for t in head.signature().inputs] == ["f32[h0, h1, 8]"]
    assert [str(t) for t in head.signature().outputs] == ["f32[h0, h1, 13]"]
    assert module.decisions[-1] == (
        f"{TARGET_HEAD} runs as its own graph lm_head, called by draft, target"
    )
    assert [str(r) for r in ctx.remarks] == [
        f"outline-shared: applied at @{TARGET_HEAD}: graph @lm_head for @draft, @target"
    ]


def test_caches_stay_bound_to_the_inputs_they_overwrite():
    module = bound()
    OutlineShared().run(module, PassContext())
    for name in ("target", "draft"):
        body = module.graphs[f"{name}.body"]
        caches = [o for o in body.outputs if o.alias]
        assert [(o.name, o.role, o.alias) for o in caches] == [
            (f"{part}_cache.0", Role.KV_CACHE, f"{part}_cache.0") for part in "kv"
        ]
        assert {i.role for i in body.inputs} >= {Role.KV_CACHE, Role.CACHE_LENGTH}


def facts(graphs: Iterable[Graph]) -> set[tuple[object, ...]]:
    return {(n.location, *(r.name for r in n.results)) for g in graphs for n in g.nodes}


def test_nodes_keep_names_and_locations():
    module = bound()
    for graph in module.graphs.values():
        for index, node in enumerate(graph.nodes):
            node.location = replace(node.location, origin=f"{graph.name} {index}")
    before = facts(module.graphs.values())
    OutlineShared().run(module, PassContext())
    after = facts(leaves(module))
    heads = {f for f in before if f[1] in ("logits", "base_logits")}
    assert before - after <= heads


def test_what_only_the_tail_reads_moves_there():
    """The unrolled Markov head reads `w2` at every step, also at the first, which needs no head."""
    module = bound()
    UnrollMarkov().run(module, PassContext())
    inputs = pair_inputs(module)
    assert check_pass(OutlineShared(), module, inputs)
    assert linear_users(module)["draft.markov_w2"] == {"draft.tail"}
    assert shared(module) == {}


def test_a_second_run_changes_nothing():
    module = bound()
    OutlineShared().run(module, PassContext())
    text = print_module(module)
    assert not OutlineShared().run(module, PassContext())
    assert print_module(module) == text


def test_a_draft_with_a_head_of_its_own_is_not_cut():
    module = bound(PairOptions(draft_head="own"))
    assert not check_pass(OutlineShared(), module, pair_inputs(module))
    assert list(module.graphs) == ["target", "draft"]


@pytest.mark.parametrize("first", ["target", "draft"])
def test_the_head_is_called_lm_head_whichever_graph_comes_first(first):
    module = bound()
    graphs = sorted(module.graphs.items(), key=lambda item: item[0] != first)
    module.graphs = dict(graphs)
    assert check_pass(OutlineShared(), module, pair_inputs(module))
    assert "lm_head" in module.graphs
    assert next(iter(module.graphs)) == first


def test_a_head_that_is_an_alias_is_lm_head_too():
    module = pair()
    module.weights.alias(TARGET_HEAD, "target.embed_tokens.weight")
    BindSharedWeights().run(module, PassContext())
    assert check_pass(OutlineShared(), module, pair_inputs(module))
    assert linear_users(module)["target.embed_tokens.weight"] == {"lm_head"}


def test_a_tied_head_and_the_embedding():
    """The table is looked up in both bodies: only the product is outlined."""
    module = bound(PairOptions(head="tied"))
    assert check_pass(OutlineShared(), module, pair_inputs(module))
    assert linear_users(module)["target.embed_tokens.weight"] == {"lm_head"}


def test_dce_keeps_everything_afterwards():
    module = bound()
    OutlineShared().run(module, PassContext())
    graphs, symbols = list(module.graphs), set(module.weights)
    check_pass(Dce(), module, pair_inputs(module))
    assert list(module.graphs) == graphs
    assert symbols - set(module.weights) == {DRAFT_HEAD}  # only a name, of no use any more


# Small graphs


class Maker:
    """Graphs on `[t, 4]` that may share weights."""

    def __init__(self, *symbols: str) -> None:
        self.module = Module("m", symbols={s: SymbolRange(1, 8) for s in "tc"})
        for i, symbol in enumerate(symbols):
            values = np.random.default_rng(i).standard_normal((4 + 4 * (symbol == "big"), 4))
            self.module.weights.add(symbol, dense(values))

    def graph(self, name: str, build: Callable[[Builder, Value], dict[str, Value]]) -> Builder:
        b = Builder(self.module, name)
        x = b.input("x", DType.F32, (sym("t"), 4), Role.ACTIVATION)
        for output, value in build(b, x).items():
            b.output(value, output, Role.ACTIVATION)
        return b

    def check(self, ctx: PassContext | None = None) -> bool:
        changed = check_pass(OutlineShared(), self.module, random_inputs(self.module), ctx)
        for graph in self.module.graphs.values():
            callees = [self.module.graphs[c] for c in graph.callees()]
            assert all(not list(c.callees()) for c in callees), "calls of calls"
            assert not callees or set(ops(graph)) == {"call"}
            assert graph.nodes
        return changed


def linear(b: Builder, x: Value, symbol: str = "w") -> Value:
    return b.op("linear", x, weights=(symbol,))


def plain(b: Builder, x: Value) -> dict[str, Value]:
    return {"y": linear(b, b.op("silu", x))}


def test_graphs_without_a_target_share_too():
    made = Maker("w")
    made.graph("f", plain)
    made.graph("g", plain)
    assert made.check()
    assert list(made.module.graphs) == ["f", "g", "shared", "f.body", "g.body"]


def test_three_graphs():
    made = Maker("w")
    for name in "fgh":
        made.graph(name, plain)
    assert made.check()
    assert linear_users(made.module) == {"w": {"shared"}}
    assert made.module.decisions == ["w runs as its own graph shared, called by f, g, h"]


def test_parts_without_nodes_are_left_out():
    made = Maker("w")
    made.graph("all", plain)
    made.graph("head only", lambda b, x: {"y": linear(b, x)})
    made.graph("no body", lambda b, x: {"y": b.op("silu", linear(b, x))})
    assert made.check()
    assert {n: calls(g) for n, g in made.module.graphs.items() if "." not in n} == {
        "all": ["all.body", "shared"],
        "head only": ["shared"],
        "no body": ["shared", "no body.tail"],
        "shared": ["linear"],
    }


def test_work_that_does_not_need_the_layer_is_done_before_when_it_is_returned():
    made = Maker("w")

    def build(b: Builder, x: Value) -> dict[str, Value]:
        early = b.op("sigmoid", b.op("silu", x))
        y = linear(b, x)
        late = b.op("mul", b.op("silu", x), y)
        return {"early": early, "late": late, "x": x, "y": y, "again": y}

    made.graph("f", build)
    made.graph("g", plain)
    assert made.check()
    graphs = made.module.graphs
    assert calls(graphs["f"]) == ["f.body", "shared", "f.tail"]
    assert ops(graphs["f.body"]) == ["silu", "sigmoid"]
    assert ops(graphs["f.tail"]) == ["silu", "mul"]


def test_values_of_one_name_get_names_of_their_own():
    made = Maker("w")

    def build(b: Builder, x: Value) -> dict[str, Value]:
        a, c = b.op("silu", x, name="x"), b.op("sigmoid", x, name="x")
        y = b.op("linear", b.op("add", a, c, name="x"), weights=("w",), name="x")
        return {
            "a": b.op("mul", b.op("mul", a, c, name="x"), b.op("mul", x, y, name="x")),
            "b": a,
            "c": c,
        }

    made.graph("f", build)
    made.graph("g", plain)
    assert made.check()


def test_dead_nodes_are_not_kept():
    made = Maker("w", "v")

    def build(b: Builder, x: Value) -> dict[str, Value]:
        linear(b, b.op("silu", x), "v")
        y = linear(b, x)
        b.op("silu", y)
        return {"y": y}

    made.graph("f", build)
    made.graph("g", plain)
    assert made.check()
    assert calls(made.module.graphs["f"]) == ["shared"]


def test_dead_layers_do_not_count():
    made = Maker("w")

    def build(b: Builder, x: Value) -> dict[str, Value]:
        linear(b, x)
        return {"y": b.op("silu", x)}

    made.graph("f", build)
    made.graph("g", plain)
    assert not made.check()


def test_an_alias_that_a_part_cannot_keep_is_kept_by_the_graph():
    """The buffer of `old` is overwritten, but nobody reads `old`."""
    made = Maker("w")
    b = made.graph("f", plain)
    old = b.input("old", DType.F32, (sym("t"), 4), Role.KV_CACHE)
    b.output(b.graph.nodes[0].result, "new", Role.KV_CACHE, alias=old.name)
    made.graph("g", plain)
    assert made.check()
    assert [o.alias for o in made.module.graphs["f"].outputs] == [None, "old"]


def test_names_that_are_taken():
    made = Maker("w")
    for name in ("f", "g"):
        made.graph(name, plain)
    made.graph("shared", lambda b, x: {"y": b.op("silu", x)})
    made.graph("f.body", lambda b, x: {"y": b.op("silu", x)})
    assert made.check()
    assert calls(made.module.graphs["f"]) == ["f.body_", "shared_"]
    assert ops(made.module.graphs["f.body"]) == ["silu"]


def with_bias(b: Builder, x: Value) -> dict[str, Value]:
    return {"y": b.op("linear", x, weights=("w", "bias"))}


def test_layers_with_a_bias():
    made = Maker("w")
    made.module.weights.add("bias", dense(np.ones(4)))
    made.graph("f", with_bias)
    made.graph("g", with_bias)
    assert made.check()
    assert made.module.graphs["shared"].nodes[0].weights == ("w", "bias")


NEAR_MISSES: dict[str, Callable[[Maker], object]] = {
    "one graph": lambda m: m.graph("f", plain),
    "other weights": lambda m: (
        m.graph("f", plain),
        m.graph("g", lambda b, x: {"y": linear(b, x, "v")}),
    ),
    "twice in one graph": lambda m: m.graph("f", lambda b, x: {"y": linear(b, linear(b, x))}),
    "one with a bias": lambda m: (m.graph("f", plain), m.graph("g", with_bias)),
    "other rank": lambda m: (
        m.graph("f", plain),
        m.graph("g", lambda b, x: {"y": linear(b, b.op("unsqueeze", x, attrs=AxisAttributes(0)))}),
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    made = Maker("w", "v")
    made.module.weights.add("bias", dense(np.ones(4)))
    NEAR_MISSES[name](made)
    assert not made.check()


def test_cuts_that_lose_a_size_are_not_made():
    """The tail would see `2*t` rows only, and a call cannot tell `t` from that."""
    made, ctx = Maker("w"), PassContext()

    def build(b: Builder, x: Value) -> dict[str, Value]:
        rows = b.op("concat", x, x, attrs=AxisAttributes(0))
        return {"y": b.op("silu", linear(b, rows))}

    made.graph("f", build)
    made.graph("g", plain)
    assert not made.check(ctx)
    assert [(r.message, r.applied) for r in ctx.remarks] == [
        ("no input of a part would fix t", False)
    ]


def test_of_two_shared_layers_the_larger_is_outlined():
    made, ctx = Maker("w", "big"), PassContext()

    def build(b: Builder, x: Value) -> dict[str, Value]:
        return {"y": linear(b, linear(b, x, "w"), "big")}

    made.graph("f", build)
    made.graph("g", build)
    assert made.check(ctx)
    assert shared(made.module) == {"w": {"f.body", "g.body"}}
    assert [(r.where, r.applied) for r in ctx.remarks] == [("@big", True), ("@w", False)]


def test_a_graph_that_uses_the_layer_twice_is_cut_twice():
    made, ctx = Maker("w"), PassContext()
    made.graph("f", lambda b, x: {"y": linear(b, linear(b, x))})
    made.graph("g", plain)
    assert made.check(ctx)
    assert calls(made.module.graphs["f"]) == ["shared", "shared"]
    assert linear_users(made.module) == {"w": {"shared"}}


def test_aliases_are_one_weight():
    made = Maker("w", "v")
    made.module.weights.alias("v", "w")
    made.graph("f", plain)
    made.graph("g", lambda b, x: {"y": linear(b, x, "v")})
    assert made.check()
    assert linear_users(made.module) == {"w": {"shared"}}


# Properties


@given(modules(graphs=3, dead=True), st.integers(0, 5), st.booleans())
def test_random_modules(module, seed, steps):
    """What was outlined is computed nowhere else, unless a graph did so more than once."""
    before, ctx = storage(module), PassContext()
    check_pass(
        OutlineShared(OutlineSharedOptions(steps=steps)), module, random_inputs(module, seed), ctx
    )
    assert storage(module) <= before
    users: dict[tuple[str, ...], set[str]] = {}
    for graph in leaves(module):
        for node in live_nodes(graph):
            if node.op.name == "linear":
                users.setdefault(node.weights, set()).add(graph.name)
    twice = {r.where for r in ctx.remarks if "more than once" in r.message}
    for remark in ctx.remarks:
        if remark.applied and remark.where not in twice:
            callee = remark.message.split()[1][1:]
            assert users[module.graphs[callee].nodes[0].weights] == {callee}


@FEWER
@given(pair_options(), st.integers(0, 9), st.integers(1, 2), st.booleans())
def test_random_pairs(options, seed, batch, unrolled):
    """After deduplication a pair has at most one shared layer, and no leaf graphs share it."""
    options = replace(options, stored=True)
    module = bound(options)
    DedupeWeights(DedupeWeightsOptions(0)).run(module, PassContext())
    if unrolled:
        UnrollMarkov().run(module, PassContext())
    before = storage(module)
    same = options.draft_head != "own"
    inputs = pair_inputs(module, options, seed, batch=batch)
    assert check_pass(OutlineShared(), module, inputs) is same
    assert shared(module) == {}
    assert storage(module) == before
    assert verify(module) == []
