from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.errors import RequestError
from edgecc.ir.ops import TypeRuleError, sampling
from edgecc.ir.ops.sampling import ArgmaxAttributes, MarkovChainAttributes
from helpers.ops import Case as C
from helpers.ops import Cases, check_reference, check_rows, family, infer, run_op, values
from helpers.weights import dense, packed


def first_largest(row: np.ndarray, limit: int) -> int:
    best = 0
    for i in range(limit):
        if row[i] > row[best]:
            best = i
    return best


def argmax(rng: np.random.Generator) -> C:
    x = values(rng, 2, 3, 6)
    x[0, 0, 5] = 100  # padding
    expected = np.array([[first_largest(row, 5) for row in rows] for rows in x])
    return C(
        (x,),
        (expected,),
        attrs=ArgmaxAttributes(5),
        types=("f32[b, t, 6]",),
        results=("i64[b, t]",),
    )


def markov_chain(rng: np.random.Generator) -> C:
    """Three steps over a block of four slots, a vocabulary of 7 of which 6 are tokens."""
    base, anchor = values(rng, 2, 4, 7), np.array([5, 0])
    w1, w2 = values(rng, 7, 3), packed(rng, 7, 4)
    w1 = np.concatenate([w1, np.ones((7, 1))], axis=1)
    tokens, logits = np.zeros((2, 3), np.int64), np.zeros((2, 3, 7))
    embeddings = np.zeros((2, 3, 4))
    for b in range(2):
        previous = anchor[b]
        for j in range(3):
            embeddings[b, j] = w1[previous]
            for v in range(7):
                logits[b, j, v] = base[b, j, v] + sum(w1[previous] * w2.values[v])
            previous = tokens[b, j] = first_largest(logits[b, j], 6)
    return C(
        (base, anchor),
        (tokens, logits, embeddings),
        (dense(w1), w2.weight),
        MarkovChainAttributes(steps=3, limit=6),
        types=("f32[b, 4, 7]", "i64[b]"),
        results=("i64[b, 3]", "f32[b, 3, 7]", "f32[b, 3, 4]"),
    )


CASES: Cases = {"argmax": argmax, "markov_chain": markov_chain}


def test_every_op_has_a_case():
    assert set(CASES) == family(sampling.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference(name, CASES[name](np.random.default_rng(1)))


@pytest.mark.parametrize("name", CASES)
def test_sequences_do_not_depend_on_each_other(name):
    case = CASES[name](np.random.default_rng(2))
    check_rows(name, case.operands, case.weights, case.attrs)


def test_argmax_takes_the_first_on_a_tie():
    (found,) = run_op("argmax", [np.array([[1.0, 3.0, 3.0, 2.0]])], attrs=ArgmaxAttributes(4))
    assert found.tolist() == [1]


@given(width=st.integers(1, 6), limit=st.integers(1, 6), seed=st.integers(0, 99))
def test_padding_is_never_chosen(width, limit, seed):
    limit = min(limit, width)
    x = np.random.default_rng(seed).integers(-2, 3, (4, width)).astype(np.float64)
    x[:, limit:] = 1000
    (found,) = run_op("argmax", [x], attrs=ArgmaxAttributes(limit))
    assert found.tolist() == [first_largest(row, limit) for row in x]


def test_all_logits_are_minus_infinity():
    x = np.full((1, 4), -np.inf)
    assert run_op("argmax", [x], attrs=ArgmaxAttributes(3))[0].tolist() == [0]


def test_padding_is_neither_proposed_nor_fed_back():
    """Row 2 of the vocabulary is padding with the largest logit; the chain goes on from row 1."""
    base = np.array([[[0.0, 1.0, 50.0], [0.0, 1.0, 50.0]]])
    w1, w2 = np.array([[0.0], [1.0], [7.0]]), np.array([[3.0], [0.0], [0.0]])
    tokens, logits, embeddings = run_op(
        "markov_chain", [base, np.array([0])], [dense(w1), dense(w2)], MarkovChainAttributes(2, 2)
    )
    assert tokens.tolist() == [[1, 0]]  # step 1: row 0 gets 3 from the embedding of token 1
    assert embeddings.tolist() == [[[0], [1]]]
    assert logits[0, 1].tolist() == [3, 1, 50]


@pytest.mark.parametrize("anchor", [-1, 7])
def test_anchor_outside_the_table_is_a_request_error(anchor):
    case = CASES["markov_chain"](np.random.default_rng(3))
    with pytest.raises(RequestError, match=rf"index {anchor} is outside 0\.\.6"):
        run_op("markov_chain", [case.operands[0], np.array([0, anchor])], case.weights, case.attrs)


@pytest.mark.parametrize(
    ("type_", "attrs", "message"),
    [
        ("i64[t, 4]", ArgmaxAttributes(4), "x must be floating-point"),
        ("f32[]", ArgmaxAttributes(1), "limit 1 is outside the last axis"),
        ("f32[4, t]", ArgmaxAttributes(1), "limit 1 is outside the last axis"),
        ("f32[t, 4]", ArgmaxAttributes(0), "limit 0 is outside the last axis"),
        ("f32[t, 4]", ArgmaxAttributes(5), "limit 5 is outside the last axis"),
        ("f32[t, 4]", None, "expects attributes ArgmaxAttributes, got Attributes"),
    ],
)
def test_argmax_refuses(type_, attrs, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("argmax", [type_], (), attrs)


BASE, ANCHOR, W = "f32[b, 4, 7]", "i64[b]", np.ones((7, 3))


@pytest.mark.parametrize(
    ("types", "weights", "attrs", "message"),
    [
        (("i64[b, 4, 7]", ANCHOR), (W, W), (3, 7), "base_logits must be f32"),
        (("f64[b, 4, 7]", ANCHOR), (W, W), (3, 7), "base_logits must be f32"),
        (("f32[4, 7]", ANCHOR), (W, W), (3, 7), "base_logits must have rank 3"),
        ((BASE, "i32[b]"), (W, W), (3, 7), "anchor must be i64"),
        ((BASE, "i64[]"), (W, W), (3, 7), "anchor must have rank 1"),
        ((BASE, "i64[c]"), (W, W), (3, 7), "batch of the anchor: expected b, got c"),
        ((BASE, ANCHOR), (W[0], W), (3, 7), r"ranks of w1 and w2: expected \(2, 2\), got \(1, 2"),
        ((BASE, ANCHOR), (W, W[0]), (3, 7), "ranks of w1 and w2"),
        ((BASE, ANCHOR), (W, W[:, :2]), (3, 7), r"columns of w2\): expected 3, got 2"),
        ((BASE, ANCHOR), (W, W[:6]), (3, 6), r"rows of w2 .*: expected 7, got 6"),
        ((BASE, ANCHOR), (W, W), (5, 7), "steps 5 is outside the 4 slots"),
        ((BASE, ANCHOR), (W, W), (0, 7), "steps 0 is outside the 4 slots"),
        (("f32[b, t, 7]", ANCHOR), (W, W), (1, 7), "steps 1 is outside the t slots"),
        ((BASE, ANCHOR), (W, W), (3, 0), "limit 0 is outside the vocabulary"),
        ((BASE, ANCHOR), (W, W), (3, 8), "limit 8 is outside the vocabulary"),
        ((BASE, ANCHOR), (W,), (3, 7), r"expects weights \(w1, w2\), got 1"),
    ],
)
def test_markov_chain_refuses(types, weights, attrs, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("markov_chain", types, [dense(w) for w in weights], MarkovChainAttributes(*attrs))
