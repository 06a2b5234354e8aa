from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import (
    Builder,
    DType,
    Interpreter,
    Location,
    Module,
    Role,
    SymbolRange,
    sym,
)
from edgecc.ir.ops.sampling import ArgmaxAttributes, MarkovChainAttributes
from edgecc.ir.verifier import check_property
from edgecc.passes.base import PassContext
from edgecc.passes.dce import Dce
from edgecc.passes.unroll_markov import UnrollMarkov
from helpers.modules import check_pass, storage
from helpers.pairs import PairOptions, pair, pair_inputs
from helpers.weights import dense, packed

OWN = PairOptions(draft_head="own", draft_embedding="own")


def chain(
    *, steps: int = 2, slots: int = 3, vocab: int = 6, limit: int = 5, seed: int = 0
) -> Builder:
    """One chain; all three results are returned."""
    rng = np.random.default_rng(seed)
    module = Module("m", symbols={"b": SymbolRange(1, 4)})
    module.weights.add("w1", dense(rng.standard_normal((vocab, 4)), DType.BF16))
    module.weights.add("w2", packed(rng, vocab, 4, global_scale=1.0).weight)
    b = Builder(module, "main").at("config.json: markov_head_type")
    base = b.input("base", DType.F32, (sym("b"), slots, vocab), Role.ACTIVATION)
    anchor = b.input("anchor", DType.I64, (sym("b"),), Role.ANCHOR)
    node = b.node(
        "markov_chain",
        (base, anchor),
        weights=("w1", "w2"),
        attrs=MarkovChainAttributes(steps, limit),
        names=("proposals", "draft_logits", "embeddings"),
    )
    for result, role in zip(
        node.results, (Role.PROPOSALS, Role.DRAFT_LOGITS, Role.ACTIVATION), strict=True
    ):
        b.output(result, result.name, role)
    return b


def inputs(b: Builder, seed: int = 0, *, batch: int = 2) -> dict[str, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    _, slots, vocab = b.graph.inputs[0].value.type.shape
    base = rng.standard_normal((batch, slots, vocab))
    return {"main": {"base": base, "anchor": rng.integers(0, vocab, batch)}}


def test_each_step_is_embedding_linear_add_argmax():
    b = chain(steps=2)
    ctx = PassContext()
    assert check_pass(UnrollMarkov(), b.module, inputs(b), ctx)
    names = [n.op.name for n in b.graph.nodes]
    step = ["slice", "squeeze", "embedding", "linear", "add", "argmax", *["unsqueeze"] * 3]
    assert names == [*step, *step, "concat", "concat", "concat"]
    assert [o.value.name for o in b.graph.outputs] == ["proposals", "draft_logits", "embeddings"]
    expected = Location("config.json: markov_head_type", ("unroll-markov",))
    assert {n.location for n in b.graph.nodes} == {expected}
    assert [str(r) for r in ctx.remarks] == ["unroll-markov: applied at @main: 2 steps"]
    assert check_property(b.module, "markov-unrolled") == []


def test_the_token_of_a_step_feeds_the_next():
    b = chain(steps=3)
    UnrollMarkov().run(b.module, PassContext())
    chosen = [n for n in b.graph.nodes if n.op.name == "argmax"]
    looked_up = [n for n in b.graph.nodes if n.op.name == "embedding"]
    assert [n.operands[0] for n in looked_up] == [
        b.graph.inputs[1].value,
        *(n.result for n in chosen[:2]),
    ]
    assert {n.weights for n in looked_up} == {("w1",)}
    assert {n.weights for n in b.graph.nodes if n.op.name == "linear"} == {("w2",)}
    assert all(n.attrs == ArgmaxAttributes(5) for n in chosen)
    assert storage(b.module) == {"w1", "w2"}


@pytest.mark.parametrize(("steps", "slots"), [(1, 1), (1, 3), (3, 3)])
def test_boundaries_of_the_block(steps, slots):
    b = chain(steps=steps, slots=slots)
    assert check_pass(UnrollMarkov(), b.module, inputs(b))


@given(
    steps=st.integers(1, 4),
    more=st.integers(0, 2),
    vocab=st.integers(2, 7),
    limit=st.integers(1, 7),
    batch=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_any_chain(steps, more, vocab, limit, batch, seed):
    limit = min(limit, vocab)
    b = chain(steps=steps, slots=steps + more, vocab=vocab, limit=limit, seed=seed)
    assert check_pass(UnrollMarkov(), b.module, inputs(b, seed, batch=batch))


def test_ties_and_padding():
    """Equal logits: the first token wins in both forms, and padding never does."""
    b = chain(steps=3, vocab=6, limit=4)
    b.module.weights.rebind("w2", dense(np.zeros((6, 4))))
    base = np.zeros((1, 3, 6))
    base[:, :, 4:] = 9
    data = {"main": {"base": base, "anchor": np.array([5])}}
    assert check_pass(UnrollMarkov(), b.module, data)
    found = Interpreter(b.module).run("main", data["main"])
    assert found["proposals"].tolist() == [[0, 0, 0]]


def test_double_precision():
    b = chain(steps=3)
    data = inputs(b)["main"]
    before = Interpreter(b.module, np.float64).run("main", data)
    UnrollMarkov().run(b.module, PassContext())
    after = Interpreter(b.module, np.float64).run("main", data)
    assert all(after[n].tobytes() == before[n].tobytes() for n in before)


def test_unused_results_are_left_to_dce():
    b = chain()
    b.graph.outputs = b.graph.outputs[:1]
    assert check_pass(UnrollMarkov(), b.module, inputs(b))
    assert check_pass(Dce(), b.module, inputs(b))
    assert [n.op.name for n in b.graph.nodes].count("concat") == 1


def test_results_with_several_users():
    b = chain()
    tokens, logits, _ = b.graph.nodes[0].results
    b.output(b.op("add", logits, logits), "twice", Role.ACTIVATION)
    b.output(tokens, "again", Role.ACTIVATION)
    assert check_pass(UnrollMarkov(), b.module, inputs(b))


def test_two_chains_in_one_graph():
    b = chain()
    first = b.graph.nodes[0]
    again = b.node("markov_chain", first.operands, weights=first.weights, attrs=first.attrs)
    b.output(again.results[0], "again", Role.ACTIVATION)
    assert check_pass(UnrollMarkov(), b.module, inputs(b))
    assert not any(n.op.name == "markov_chain" for n in b.graph.nodes)


def test_pairs():
    module = pair(OWN)
    assert check_pass(UnrollMarkov(), module, pair_inputs(module, OWN, batch=2))
    assert check_property(module, "markov-unrolled") == []


def test_nothing_to_unroll():
    module = pair(OWN, draft=False)
    assert not check_pass(UnrollMarkov(), module, pair_inputs(module, OWN))
