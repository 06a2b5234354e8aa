from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir import Builder, DType, Module, Role, SymbolRange, sym
from edgecc.ir.ops.attention import RopeAttributes
from edgecc.ir.ops.norm import RmsNormAttributes
from edgecc.ir.ops.shape import SplitAttributes
from edgecc.passes.base import PassContext
from edgecc.passes.fuse_rope import FuseRope
from helpers.modules import check_pass
from helpers.pairs import FEWER, pair, pair_inputs, pair_options
from helpers.weights import dense

T = sym("t")
RNG = np.random.default_rng(0)


def graph(*widths: int, axis: int = 2) -> tuple[Builder, list]:
    """A split into pieces of the given widths, and positions."""
    module = Module("m", symbols={"t": SymbolRange(1, 8)})
    for name in ("cos", "sin", "cos2"):
        module.weights.add(name, dense(RNG.standard_normal((8, 2))))
    module.weights.add("same", dense(np.zeros((8, 2))))
    module.weights.alias("same", "cos")
    b = Builder(module, "main")
    shape = (1, T, sum(widths)) if axis == 2 else (1, sum(widths), 8)
    x = b.input("x", DType.F32, shape, Role.ACTIVATION)
    rows = shape[1] if axis == 2 else widths[0]
    for name in ("positions", "others"):
        b.input(name, DType.I64, (1, rows), Role.ACTIVATION)
    return b, list(b.node("split", (x,), attrs=SplitAttributes(axis, widths)).results)


def rope(b: Builder, x, heads: int, *, positions: int = 1, cos: str = "cos", name: str = "r"):
    where = b.graph.inputs[positions].value
    attrs = RopeAttributes(heads)
    return b.op("rope", x, where, weights=(cos, "sin"), attrs=attrs, name=name)


def run(b: Builder, *values, changed: bool = True) -> list[str]:
    """The remarks."""
    for i, value in enumerate(values):
        b.output(value, f"out{i}", Role.ACTIVATION)
    (rows,) = {i.value.type.shape[1] for i in b.graph.inputs[1:]}
    rows = rows if isinstance(rows, int) else 3
    rng = np.random.default_rng(1)
    inputs = {"x": rng.standard_normal([1, *shape_of(b, rows)])}
    inputs |= {n: rng.integers(0, 8, (1, rows)) for n in ("positions", "others")}
    ctx = PassContext()
    assert check_pass(FuseRope(), b.module, {"main": inputs}, ctx) is changed
    return [r.message for r in ctx.remarks]


def shape_of(b: Builder, rows: int) -> list[int]:
    return [d if isinstance(d, int) else rows for d in b.graph.inputs[0].value.type.shape[1:]]


def test_queries_and_keys():
    b, (q, k) = graph(16, 8)
    b.at("model.q")
    q1 = rope(b, q, 4, name="q1")
    k1 = rope(b.at("model.k"), k, 2, name="k1")
    assert run(b, q1, b.op("silu", k1)) == ["one rotation for all pieces"]
    whole, split, silu = b.graph.nodes
    assert whole.operands == (b.graph.inputs[0].value, b.graph.inputs[1].value)
    assert whole.attrs == RopeAttributes(6)
    assert split.attrs == SplitAttributes(2, (16, 8))
    assert [r.name for r in split.results] == ["q1", "k1"]
    assert silu.operands == (split.results[1],)
    assert b.graph.outputs[0].value is split.results[0]
    assert str(whole.location) == "model.q <- fuse-rope"


def test_rotations_in_another_order_and_aliases_of_tables():
    b, (q, k) = graph(4, 8)
    k1 = rope(b, k, 2, cos="same")
    run(b, rope(b, q, 1), k1)
    assert [n.op.name for n in b.graph.nodes] == ["rope", "split"]


def test_three_pieces():
    b, pieces = graph(4, 4, 8)
    run(b, *(rope(b, p, p.type.shape[2] // 4) for p in pieces))
    assert [n.op.name for n in b.graph.nodes] == ["rope", "split"]


def test_partial_rotation():
    """Heads of 8, of which the tables rotate 4."""
    b, (q, k) = graph(16, 8)
    run(b, rope(b, q, 2), rope(b, k, 1))


def returned(b, q, k):
    b.output(k, "k", Role.ACTIVATION)
    return rope(b, q, 4), rope(b, k, 2)


def read_twice(b, q, k):
    return rope(b, q, 4), rope(b, k, 2), b.op("silu", k)


def normed(b, q, k):
    b.module.weights.add("n", dense(np.ones(8)))
    k = b.op("rms_norm", k, weights=("n",), attrs=RmsNormAttributes(1e-5))
    return rope(b, q, 4), rope(b, k, 2)


NORMED = "x of rope is made by rms_norm, expected split"


@pytest.mark.parametrize(
    ("make", "reasons"),
    [
        (returned, {"%split is returned unrotated"}),
        (read_twice, {"%split has 2 readers, expected one rotation"}),
        (
            normed,
            {"%split is read by rms_norm: it would be split from the others twice", NORMED},
        ),
        (
            lambda b, q, k: (rope(b, q, 4), rope(b, k, 2, positions=2)),
            {"%split is rotated at other positions"},
        ),
        (
            lambda b, q, k: (rope(b, q, 4), rope(b, k, 2, cos="cos2")),
            {"%split is rotated by other tables"},
        ),
        (
            lambda b, q, k: (rope(b, q, 4), rope(b, k, 1)),
            {"%split has heads of 4, not of 8", "%split has heads of 8, not of 4"},
        ),
        (lambda b, q, k: (rope(b, q, 4), k), {"%split is returned unrotated"}),
        (lambda b, q, k: (rope(b, q, 4),), {"%split has 0 readers, expected one rotation"}),
    ],
)
def test_near_misses(make, reasons):
    b, (q, k) = graph(16, 8)
    assert set(run(b, *make(b, q, k), changed=False)) == reasons


def test_values_would_be_split_twice():
    b, (q, k, v) = graph(16, 8, 8)
    remarks = run(b, rope(b, q, 4), rope(b, k, 2), b.op("silu", v), changed=False)
    assert set(remarks) == {"%split is read by silu: it would be split from the others twice"}


def test_a_split_of_rows():
    b, (q, k) = graph(2, 2, axis=1)
    assert set(run(b, rope(b, q, 2), rope(b, k, 2), changed=False)) == {
        "the split is not of the last axis"
    }


def test_one_piece():
    b, (q,) = graph(16)
    assert run(b, rope(b, q, 4), changed=False) == ["there is nothing to join"]


def test_no_split():
    b, _ = graph(16)
    x = b.graph.inputs[0].value
    assert run(b, rope(b, x, 4), changed=False) == ["x of rope is a graph input, expected split"]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_any_number_of_pieces(heads, data):
    """With all pieces rotated alike it applies, with one that is not it does not."""
    odd = data.draw(st.integers(-1, len(heads) - 1))
    b, pieces = graph(*(4 * h for h in heads))
    made = [
        rope(b, p, h, positions=2 if i == odd and len(heads) > 1 else 1)
        for i, (p, h) in enumerate(zip(pieces, heads, strict=True))
    ]
    run(b, *made, changed=len(heads) > 1 and odd < 0)


@FEWER
@given(pair_options())
def test_random_pairs(options):
    options = replace(options, draft_head="own", draft_embedding="own")
    module = pair(options)
    check_pass(FuseRope(), module, pair_inputs(module, options))
