from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgecc.ir.ops import TypeRuleError
from edgecc.ir.ops import state as family_module
from edgecc.ir.ops.state import GatedDeltaNetAttributes, l2_normalize, softplus
from edgecc.ir.types import DType
from helpers.ops import Case as C
from helpers.ops import Cases, assert_same_bits, check_reference, family, infer, run_op, values
from helpers.weights import dense

ATTRS = GatedDeltaNetAttributes(2, 4)


def causal_conv1d(rng: np.random.Generator) -> C:
    """Each output by the sum in the docstring, inputs before the call looked up in the state."""
    x, state, w = values(rng, 2, 5, 3), values(rng, 2, 3, 3), values(rng, 3, 1, 4)
    y = np.zeros_like(x)
    for b, t, c in np.ndindex(x.shape):
        for j in range(4):
            row = t - 3 + j
            y[b, t, c] += w[c, 0, j] * (x[b, row, c] if row >= 0 else state[b, c, row + 3])
    return C(
        (x, state),
        (y, x[:, -3:].transpose(0, 2, 1)),
        (dense(w),),
        types=("f32[b, t, 3]", "f32[b, 3, 3]"),
        results=("f32[b, t, 3]", "f32[b, 3, 3]"),
    )


def causal_conv1d_short(rng: np.random.Generator) -> C:
    """Fewer rows than taps: the new state still holds old inputs."""
    x, state, w = values(rng, 1, 1, 2), values(rng, 1, 2, 3), values(rng, 2, 1, 4)
    window = np.concatenate([state, x.transpose(0, 2, 1)], axis=2)
    y = np.sum(window * w[None, :, 0], axis=2)[:, None]
    return C(
        (x, state),
        (y, window[:, :, 1:]),
        (dense(w),),
        types=("f32[b, t, 2]", "f32[b, 2, 3]"),
        results=("f32[b, t, 2]", "f32[b, 2, 3]"),
    )


def operands(rng: np.random.Generator, batch: int, rows: int, scale: float = 1.0) -> list:
    """q, k, v, a, b and a state of 2 key heads of 3 and 4 value heads of 5."""
    return [
        values(rng, batch, rows, 6, scale=scale),
        values(rng, batch, rows, 6, scale=scale),
        values(rng, batch, rows, 20, scale=scale),
        values(rng, batch, rows, 4),
        values(rng, batch, rows, 4),
        values(rng, batch, 4, 3, 5),
    ]


def gates(rng: np.random.Generator) -> tuple:
    """Weights A_log and dt_bias."""
    return dense(values(rng, 4)), dense(values(rng, 4))


def chunked(q, k, v, a, b, state, a_log, dt_bias):
    """All rows of a head at once, as matrices: the form prefill kernels use.

    With G the running sum of g and D_ij = exp(G_i - G_j) below the diagonal, the corrected values
    solve a unit lower triangular system; the state enters through exp(G).
    """
    batch, rows, _ = v.shape
    out, after = np.empty_like(v), np.empty_like(state)
    for i, h in np.ndindex(batch, 4):
        pick = slice(3 * (h // 2), 3 * (h // 2) + 3)
        queries, keys = q[i, :, pick], k[i, :, pick]
        queries = queries / np.sqrt((queries**2).sum(1, keepdims=True) + 1e-6) / np.sqrt(3)
        keys = keys / np.sqrt((keys**2).sum(1, keepdims=True) + 1e-6)
        vectors = v[i, :, 5 * h : 5 * h + 5]
        beta = 1 / (1 + np.exp(-b[i, :, h]))
        total = np.cumsum(-np.exp(a_log[h]) * np.log1p(np.exp(a[i, :, h] + dt_bias[h])))
        lower = np.tril(np.ones((rows, rows), dtype=bool))
        decay = np.where(lower, np.exp(np.where(lower, total[:, None] - total[None], 0)), 0)
        system = np.eye(rows) + np.tril(beta[:, None] * (keys @ keys.T) * decay, -1)
        seen = np.exp(total)[:, None] * (keys @ state[i, h])
        written = np.linalg.solve(system, beta[:, None] * (vectors - seen))
        answer = np.exp(total)[:, None] * (queries @ state[i, h])
        out[i, :, 5 * h : 5 * h + 5] = answer + ((queries @ keys.T) * decay) @ written
        left = np.exp(total[-1] - total)[:, None] * keys
        after[i, h] = np.exp(total[-1]) * state[i, h] + left.T @ written
    return out, after


def gated_delta_net(rng: np.random.Generator) -> C:
    given_, weights = operands(rng, 2, 7), [values(rng, 4), values(rng, 4)]
    return C(
        tuple(given_),
        chunked(*given_, *weights),
        tuple(dense(w) for w in weights),
        ATTRS,
        types=(
            *("f32[b, t, 6]", "f32[b, t, 6]", "f32[b, t, 20]"),
            *("f32[b, t, 4]", "f32[b, t, 4]", "f32[b, 4, 3, 5]"),
        ),
        results=("f32[b, t, 20]", "f32[b, 4, 3, 5]"),
    )


def gated_delta_net_golden(rng: np.random.Generator) -> C:
    """Three rows of one head of two dims that transformers' recurrence computed in float32."""
    rows = np.array(
        [
            [1, 2, 0.5, -1, 1, -2, 0.5, 0],
            [-1, 0.5, 2, 1, 0.5, 3, -1, 1],
            [0.25, -2, -1, -0.5, -1.5, 0.25, 2, -2],
        ]
    )[None]
    q, k, v, a, b = np.split(rows, [2, 4, 6, 7], axis=2)
    out = [
        [-0.212131932, 0.424263865],
        [-0.353324383, -0.533998251],
        [-0.0307687726, -0.0590271913],
    ]
    state = [[0.191780686, 0.074655205], [0.0678248405, 0.0934586003]]
    return C(
        (q, k, v, a, b, np.zeros((1, 1, 2, 2))),
        (np.array([out]), np.array([[state]])),
        (dense(np.array([0.3])), dense(np.array([-0.2]))),
        GatedDeltaNetAttributes(1, 1),
    )


CASES: Cases = {
    "causal_conv1d": causal_conv1d,
    "causal_conv1d-short": causal_conv1d_short,
    "gated_delta_net": gated_delta_net,
}


def test_every_op_has_a_case():
    assert {name.split("-")[0] for name in CASES} == family(family_module.OPS)


@pytest.mark.parametrize("name", CASES)
def test_reference(name):
    check_reference(name.split("-")[0], CASES[name](np.random.default_rng(1)))


def test_values_of_transformers():
    case = gated_delta_net_golden(np.random.default_rng(0))
    for dtype, bound in ((np.float32, 6e-8), (np.float64, 4e-8)):
        found = run_op("gated_delta_net", case.operands, case.weights, case.attrs, dtype=dtype)
        for value, expected in zip(found, case.expected, strict=True):
            np.testing.assert_allclose(value, expected, rtol=0, atol=bound)


def test_repeated_keys():
    """Equal keys with full write strength: the form that makes careless kernels diverge."""
    rng = np.random.default_rng(3)
    given_ = operands(rng, 1, 64)
    given_[1] = np.broadcast_to(given_[1][:, :1], given_[1].shape).copy()
    given_[4] = np.full_like(given_[4], 5.0)
    weights = [np.full(4, -8.0), np.zeros(4)]
    expected = chunked(*given_, *weights)
    found = run_op("gated_delta_net", given_, [dense(w) for w in weights], ATTRS, dtype=np.float64)
    for value, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=0, atol=1e-11)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_calls_on_few_rows_give_the_bits_of_one_call(chunks, narrow, seed):
    """Rows do not depend on each other's number, and neither does the state after them."""
    rng, dtype = np.random.default_rng(seed), np.float32 if narrow else np.float64
    *rows, state = operands(rng, 2, sum(chunks))
    weights = gates(rng)
    taps, conv_state = dense(values(rng, 20, 1, 4)), values(rng, 2, 20, 3)
    for op, xs, memory, w, attrs in (
        ("gated_delta_net", rows, state, weights, ATTRS),
        ("causal_conv1d", rows[2:3], conv_state, (taps,), None),
    ):
        together = run_op(op, [*xs, memory], w, attrs, dtype=dtype)
        pieces, start = [], 0
        for count in chunks:
            part = [x[:, start : start + count] for x in xs]
            piece, memory = run_op(op, [*part, memory], w, attrs, dtype=dtype)
            pieces.append(piece)
            start += count
        assert_same_bits([np.concatenate(pieces, axis=1), memory.astype(dtype)], together)


def test_sequences_do_not_depend_on_each_other():
    rng = np.random.default_rng(5)
    given_, weights = operands(rng, 3, 4), gates(rng)
    together = run_op("gated_delta_net", given_, weights, ATTRS)
    for i in range(3):
        alone = run_op("gated_delta_net", [x[i : i + 1] for x in given_], weights, ATTRS)
        assert_same_bits(alone, [y[i : i + 1] for y in together])


def test_no_rows_keep_the_state():
    rng = np.random.default_rng(6)
    given_ = operands(rng, 2, 0)
    out, state = run_op("gated_delta_net", given_, gates(rng), ATTRS, dtype=np.float64)
    assert out.shape == (2, 0, 20)
    np.testing.assert_array_equal(state, given_[-1])
    x, before = np.zeros((1, 0, 2)), values(rng, 1, 2, 3)
    y, after = run_op("causal_conv1d", [x, before], [dense(np.ones((2, 1, 4)))], dtype=np.float64)
    assert y.shape == (1, 0, 2)
    np.testing.assert_array_equal(after, before)


def test_a_closed_gate_freezes_the_state():
    """Write strength 0 and decay 1 in the limit: beta and g can be switched off exactly."""
    rng = np.random.default_rng(7)
    given_ = operands(rng, 1, 3)
    given_[3][:], given_[4][:] = -1e4, -1e4
    _, state = run_op("gated_delta_net", given_, gates(rng), ATTRS, dtype=np.float64)
    np.testing.assert_array_equal(state, given_[-1])


def test_zero_rows_are_finite():
    rng = np.random.default_rng(8)
    given_ = [np.zeros_like(x) for x in operands(rng, 1, 2)]
    for y in run_op("gated_delta_net", given_, gates(rng), ATTRS):
        assert not y.any()


def test_softplus():
    x = np.array([-800.0, -30, -1, 0, 1, 19.99, 20, 20.01, 800])
    with np.errstate(over="raise"):
        y = softplus(x)
    expected = [0, 9.357623e-14, 0.31326168752, 0.69314718056, 1.31326168752]
    np.testing.assert_allclose(y[:5], expected, rtol=1e-7, atol=0)
    assert y[5] > 19.99
    assert y[6] > 20
    assert y[7] == 20.01  # the identity, as in PyTorch
    assert y[8] == 800
    assert softplus(x.astype(np.float32)).dtype == np.float32


def test_l2_normalize_adds_to_the_sum_not_the_mean():
    x = np.array([[3e-3, 4e-3]])
    np.testing.assert_allclose(l2_normalize(x), x / np.sqrt(2.5e-5 + 1e-6), rtol=1e-15)


CONV = ("f32[b, t, 3]", "f32[b, 3, 3]")
NET = (
    *("f32[b, t, 6]", "f32[b, t, 6]", "f32[b, t, 20]"),
    *("f32[b, t, 4]", "f32[b, t, 4]", "f32[b, 4, 3, 5]"),
)


@pytest.mark.parametrize(
    ("types", "shape", "message"),
    [
        (("i64[b, t, 3]", CONV[1]), (3, 1, 4), "x must be floating-point, got i64"),
        (("f32[t, 3]", CONV[1]), (3, 1, 4), "x must have rank 3"),
        ((CONV[0], "f16[b, 3, 3]"), (3, 1, 4), "state must be f32, got f16"),
        (CONV, (3, 4), r"must be \[channels, 1, taps\] .* got \[3, 4\]"),
        (CONV, (3, 2, 4), r"must be \[channels, 1, taps\]"),
        (CONV, (3, 1, 1), "at least 2 taps"),
        (CONV, (4, 1, 4), "channels of x: expected 4, got 3"),
        (CONV, (3, 1, 5), "shape of the state"),
        ((CONV[0], "f32[c, 3, 3]"), (3, 1, 4), "shape of the state"),
        (("f32[b, t, t]", CONV[1]), (3, 1, 4), "channels of x: expected 3, got t"),
    ],
)
def test_causal_conv1d_refuses(types, shape, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("causal_conv1d", types, [dense(np.ones(shape))])


def changed(index: int, type_: str) -> tuple[str, ...]:
    return (*NET[:index], type_, *NET[index + 1 :])


@pytest.mark.parametrize(
    ("types", "attrs", "sizes", "message"),
    [
        (changed(0, "i64[b, t, 6]"), ATTRS, (4, 4), "q must be floating-point"),
        (changed(0, "f32[t, 6]"), ATTRS, (4, 4), "q must have rank 3"),
        (changed(1, "f16[b, t, 6]"), ATTRS, (4, 4), "k must be f32"),
        (changed(1, "f32[b, t, 8]"), ATTRS, (4, 4), "width of k: expected 6, got 8"),
        (changed(2, "f32[b, r, 20]"), ATTRS, (4, 4), "rows of v"),
        (changed(2, "f32[b, t, 18]"), ATTRS, (4, 4), "width 18 of v must divide into 4 heads"),
        (changed(0, "f32[b, t, t]"), ATTRS, (4, 4), "width t of q must divide into 2 heads"),
        (changed(3, "f32[b, t, 2]"), ATTRS, (4, 4), "width of a: expected 4, got 2"),
        (changed(4, "f32[b, t, 8]"), ATTRS, (4, 4), "width of b: expected 4, got 8"),
        (changed(5, "f32[b, 4, 5, 3]"), ATTRS, (4, 4), "shape of the state"),
        (changed(5, "f16[b, 4, 3, 5]"), ATTRS, (4, 4), "state must be f32"),
        (changed(5, "f32[c, 4, 3, 5]"), ATTRS, (4, 4), "shape of the state"),
        (NET, GatedDeltaNetAttributes(3, 4), (4, 4), "not whole: 4 / 3"),
        (NET, GatedDeltaNetAttributes(0, 4), (4, 4), "not whole: 4 / 0"),
        (NET, GatedDeltaNetAttributes(2, 0), (4, 4), "not whole: 0 / 2"),
        (NET, GatedDeltaNetAttributes(1, -4), (4, 4), "not whole: -4 / 1"),
        (NET, ATTRS, (2, 4), r"shape of A_log: expected \(4,\), got \(2,\)"),
        (NET, ATTRS, (4, 2), r"shape of dt_bias: expected \(4,\), got \(2,\)"),
        (NET, None, (4, 4), "expects attributes GatedDeltaNetAttributes"),
    ],
)
def test_gated_delta_net_refuses(types, attrs, sizes, message):
    with pytest.raises(TypeRuleError, match=message):
        infer("gated_delta_net", types, [dense(np.ones(n)) for n in sizes], attrs)


def test_gates_may_be_stored_in_16_bits():
    rng = np.random.default_rng(9)
    given_ = operands(rng, 1, 2)
    narrow = [dense(values(rng, 4), DType.BF16) for _ in range(2)]
    wide = [dense(run_dense(w)) for w in narrow]
    found = run_op("gated_delta_net", given_, narrow, ATTRS)
    assert_same_bits(found, run_op("gated_delta_net", given_, wide, ATTRS))


def run_dense(weight) -> np.ndarray:
    """The values of an inline weight."""
    (_, data), shape = weight.source.parts[0], weight.shape
    return np.frombuffer(data, weight.encoding.dtype.numpy).reshape(shape).astype(np.float32)
